"""`operator`: a decorator that makes a function in plain torch an operator of torch's registry.

`torch.ops.lockstep.NAME` runs the form that torch's dispatcher finds for the device of its arguments: the compiled CPU
kernel where `load_kernels` loaded it, the Triton kernel where `load_gpu_kernels` did, else the plain form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_LIBRARY = torch.library.Library("lockstep", "FRAGMENT")


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The way of gradients through an operator, in names of its arguments.

    `flows`: tensors of the forward that have gradients; `weights`: matrices that have them; `sums`: the first flow
    becomes its sum with the second, in place, and the plain form takes the sum and None for the gradient; `chosen`: the
    argument that gives the plain form the integers that the operator returned; `pools`: tensors that the operator
    writes; `stored`: the pools whose rows `slots` are further results; `looks_up`: a padding row of the weight has no
    gradient; `copied`: integers that may be others before the backward, so that the gradient is of a copy.

    `form`: the function that autograd follows, where the plain form computes more than its gradient needs.
    """

    flows: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    sums: bool = False
    chosen: str | None = None
    pools: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    looks_up: bool = False
    copied: tuple[str, ...] = ()
    form: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Operator:
    """An operator: `schema` in torch's language, and `plain`, the function that defines its results.

    `gradient`: None for an operator of integers.  `rule`: the class of a named tuple.  The argument `rule` of every
    form is such a tuple, and the schema has its fields in that place.
    """

    name: str
    schema: str
    plain: Callable[..., Any]
    gradient: Gradient | None
    rule: Callable[..., Any] | None

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The names of arguments in order, each with its default or `inspect.Parameter.empty`."""
        return {name: given.default for name, given in inspect.signature(self.plain).parameters.items()}

    @property
    def registered(self) -> Callable[..., Any]:
        """The form of torch's registry, called with the arguments of `plain`."""
        found: Callable[..., Any] = getattr(torch.ops.lockstep, self.name).default
        if self.rule is None:
            return found
        at = list(self.parameters).index("rule")
        return lambda *given, **named: found(*given[:at], *given[at], *given[at + 1 :], **named)

    def implement(self, form: Callable[..., Any], key: str) -> None:
        """Put `form`, which has the arguments of `plain`, into the registry under a dispatch key."""
        _LIBRARY.impl(self.name, self._of_fields(form), key)

    def _of_fields(self, form: Callable[..., Any]) -> Callable[..., Any]:
        """Return `form` as a function that takes the fields of the rule in place of the rule."""
        rule = self.rule
        if rule is None:
            return form
        at = list(self.parameters).index("rule")
        end = at + len(inspect.signature(rule).parameters)
        return lambda *given: form(*given[:at], rule(*given[at:end]), *given[end:])


def operator(
    schema: str,
    gradient: Gradient | None,
    *,
    rule: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function under its name as the plain form of an operator of this schema.

    Fields of a rule have no defaults in the schema: torch leaves out last arguments that equal their defaults.
    """

    def register(plain: Callable[..., Any]) -> Operator:
        made = Operator(plain.__name__, schema, plain, gradient, rule)
        _LIBRARY.define(made.name + schema)
        made.implement(plain, "CompositeExplicitAutograd")
        return made

    return register
