"""Arguments of every operator, each in the module of its name: the cases of the tests that go over all operators.

`CASES` of a module: the peculiarity of a case -> its arguments by name, floating-point tensors in float64; defaults
may be left out.  `stored(ops, arguments)` of a module with matrices: the same with matrices as these operators hold
them.  `COSTS_WHAT_IT_IS_GIVEN = True`: a call reads and writes whole tensors and multiplies no matrices.
`TOKEN_AXIS`: the dimension of tensors that counts tokens, where it is not the first.

Shapes: T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import Ops

T, D, E, K = 9, 12, 6, 3
WIDE = ("state_pool", "correction_bias")  # float32 where the others are bfloat16
Arguments = dict[str, Any]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def module_of(name: str) -> ModuleType:
    """Return the module of an operator.  Raises `ImportError` while it has none."""
    return import_module(f"tests.operators.{name}")


def all_cases() -> Mapping[str, Arguments]:
    """Return the arguments of every case, in the operator's order.

    The name of a case is its operator, or the operator, a comma and the peculiarity of the case.
    """
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        for what, given in module_of(path.stem).CASES.items():
            found[f"{path.stem}, {what}" if what else path.stem] = {
                name: given.get(name, default) for name, default in OPERATORS[path.stem].parameters.items()
            }
    return found


def name_of(case: str) -> str:
    return case.partition(",")[0]


def copies(arguments: Arguments, dtype: torch.dtype | None = None) -> Arguments:
    """Copy the arguments: tensors are cloned, floating-point ones into `dtype`."""

    def copy(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if dtype is None or not value.is_floating_point():
            return value.clone()
        return value.to(torch.promote_types(dtype, torch.float32) if name in WIDE else dtype, copy=True)

    return {name: copy(name, value) for name, value in arguments.items()}


def as_stored(case: str, ops: Ops, arguments: Arguments) -> Arguments:
    """Return the arguments with matrices stored as `ops` hold them."""
    of_module = getattr(module_of(name_of(case)), "stored", None)
    return arguments if of_module is None else of_module(ops, arguments)
