"""The engine's operators under autograd: results come from the operator, gradients from its plain form.

    forward     tensors of the trainer -> operator on the engine's matrices -> its bits, in float32
    backward    the plain form in float32 on the same inputs, assembled again; autograd through it

Between operators tensors are float32 and hold numbers of the engine's dtype, so that gradients are not rounded on their
way.  Plain forms read the trainer's own tensors, rounded as the engine holds them, as packed matrices have no gradient.
A tensor that changes between forward and backward is an error, as everywhere in autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from rollout.kernels.operator import Gradient, Operator
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import Ops
from rollout.numerics.assembly import Assembly


@dataclass(frozen=True)
class Call:
    """One call of an operator, with the gradient of `formula`.

    `arguments` are in order, with None in the place of `flows`, the names of given arguments that have gradients.
    `matrices` assemble the arguments that hold weights from the trainer's tensors, which come one after the other.
    `dtype` is the engine's.  `padding_id`: the row of a looked up matrix that has no gradient, as in an `nn.Embedding`.
    """

    operator: Callable[..., Any]
    formula: Callable[..., Any]
    rule: Gradient
    arguments: Mapping[str, Any]
    flows: tuple[str, ...]
    matrices: Mapping[str, Assembly]
    dtype: torch.dtype
    padding_id: int | None = None

    @property
    def sums(self) -> bool:
        return self.rule.sums and len(self.flows) == 2

    def by_matrix(self, per_tensor: Sequence[Any]) -> Iterator[tuple[str, Assembly, Sequence[Any]]]:
        """Yield each matrix with its share of `per_tensor`, which has a value for each of the trainer's tensors."""
        start = 0
        for name, assembly in self.matrices.items():
            end = start + len(assembly.names)
            yield name, assembly, per_tensor[start:end]
            start = end

    def recompute(self, inputs: Mapping[str, torch.Tensor], chosen: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the results of the formula for these inputs, and the rows that it stores in pools of its own."""
        work = next(iter(inputs.values())).dtype
        pools = {name: torch.zeros_like(self.arguments[name], dtype=work) for name in self.rule.pools}
        arguments = {**self.arguments, **inputs, **pools}
        if self.rule.chosen is not None:
            arguments[self.rule.chosen] = chosen
        result = self.formula(*arguments.values())
        results = [value for value in _listed(result) if value.is_floating_point()]
        return results + [pools[name].index_select(0, arguments["slots"]) for name in self.rule.stored]


class Operation(torch.autograd.Function):
    """`apply(call, *flows, *the trainer's tensors)` returns the sum, if any, results and stored rows, in float32."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flows, parts = tensors[: len(call.flows)], tensors[len(call.flows) :]
        held = {name: tensor.to(call.dtype) for name, tensor in zip(call.flows, flows, strict=True)}
        result = call.operator(*{**call.arguments, **held}.values())
        results = _listed(result)
        stored = [call.arguments[pool].index_select(0, call.arguments["slots"]) for pool in call.rule.stored]
        whole = [value for value in results if not value.is_floating_point()]
        if call.rule.sums:
            stream, total = flows[0], held[call.flows[0]]
            # later layers change the stream, but the gradient needs its value of now
            held = {call.flows[0]: total.clone() if total is stream else total}
            if call.sums:
                stream.copy_(total)
                ctx.mark_dirty(stream)
        ctx.call, ctx.held, ctx.num_parts = call, tuple(held), len(parts)
        ctx.is_whole = [not value.is_floating_point() for value in (*results, *stored)]
        ctx.mark_non_differentiable(*whole)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*held.values(), *parts, *whole)
        outputs = [value.float() if value.is_floating_point() else value for value in (*results, *stored)]
        return (stream, *outputs) if call.sums else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        flows_needed, parts_needed = needed[: len(call.flows)], needed[len(call.flows) :]
        held, rest = saved[: len(ctx.held)], saved[len(ctx.held) :]
        parts, whole = rest[: ctx.num_parts], rest[ctx.num_parts :]
        inputs = {name: value.float().detach() for name, value in zip(ctx.held, held)}
        for name, is_needed in zip(ctx.held, [any(flows_needed)] if call.sums else flows_needed, strict=True):
            inputs[name].requires_grad_(is_needed)
        for (name, assembly, tensors), (_, _, wanted) in zip(call.by_matrix(parts), call.by_matrix(parts_needed)):
            matrix = assembly.matrix(tensors, call.dtype, torch.float32).detach()
            inputs[name] = matrix.requires_grad_(any(wanted))
        of_results = [g for g, is_whole in zip(gradients[int(call.sums) :], ctx.is_whole, strict=True) if not is_whole]
        with torch.enable_grad(), torch.autocast(saved[0].device.type, enabled=False):
            results = call.recompute(inputs, whole[0] if whole else None)
        found = _gradients(results, inputs, of_results)
        if call.padding_id is not None:
            found = {name: _without_row(gradient, call.padding_id) for name, gradient in found.items()}
        of_flows = [found.get(name) for name in call.flows]
        if call.sums:
            both = _sum(found.get(call.flows[0]), gradients[0])
            of_flows = [both, both]
        of_parts: list[torch.Tensor | None] = []
        for name, assembly, wanted in call.by_matrix(parts_needed):
            of_matrix = found.get(name)
            of_parts += [None] * len(wanted) if of_matrix is None else assembly.gradients(of_matrix, wanted)
        return None, *of_flows, *of_parts


def _gradients(
    results: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor], of_results: Sequence[torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Return the gradient of each input that has one."""
    both = zip(results, of_results, strict=True)
    pairs = [(result, gradient) for result, gradient in both if gradient is not None and result.requires_grad]
    wanted = [name for name, tensor in inputs.items() if tensor.requires_grad]
    if not pairs or not wanted:
        return {}
    outputs, of_outputs = zip(*pairs)
    found = torch.autograd.grad(outputs, [inputs[name] for name in wanted], of_outputs, allow_unused=True)
    return {name: gradient for name, gradient in zip(wanted, found) if gradient is not None}


def _listed(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _without_row(gradient: torch.Tensor, row: int) -> torch.Tensor:
    gradient[row] = 0
    return gradient


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return one if other is None else other if one is None else one + other


class Differentiable:
    """The operators of an engine for a trainer's tensors.  `padding_id` belongs to its embedding.

    `named`: the trainer's tensors in the current forward; `stored`: the rows that its operators stored in each pool, by
    the id of the pool.  `choose` gets the arguments and outputs of an operator that chooses integers; it returns other
    integers to force, or None.
    """

    def __init__(self, ops: Ops, dtype: torch.dtype, padding_id: int | None) -> None:
        self._dtype, self._padding_id = dtype, padding_id
        self.assemblies: Mapping[int, Assembly] = {}
        self.named: Mapping[str, torch.Tensor] = {}
        self.stored: dict[int, torch.Tensor] = {}
        self.choose: Callable[[Mapping[str, Any], Sequence[torch.Tensor]], torch.Tensor | None] = lambda *_: None
        mine = {name: self._differentiable(one, getattr(ops, name)) for name, one in OPERATORS.items()}
        # A deferred sum runs plain functions, which have no gradient; the operators give its bits, too.
        self.ops = ops.replace(**mine, deferred_sum=None)

    def run(
        self,
        operator: Callable[..., Any],
        formula: Callable[..., Any],
        rule: Gradient,
        arguments: Mapping[str, Any],
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of `Operation`, or of the operator itself if nothing has a gradient by `rule`."""
        flows = tuple(name for name in rule.flows if arguments[name] is not None)
        held = {name: self.assemblies.get(id(arguments[name])) for name in rule.weights}
        matrices = {name: assembly for name, assembly in held.items() if assembly is not None}
        if not flows and not matrices:
            return (operator(*arguments.values()),)
        padding_id = self._padding_id if rule.looks_up else None
        copies = {name: arguments[name].clone() for name in rule.copied}
        without_flows = {**arguments, **copies, **dict.fromkeys(flows)}
        call = Call(operator, formula, rule, without_flows, flows, matrices, self._dtype, padding_id)
        parts = [self.named[name] for assembly in matrices.values() for name in assembly.names]
        results: tuple[torch.Tensor, ...] = Operation.apply(call, *(arguments[name] for name in flows), *parts)
        return results

    def _differentiable(self, one: Operator, operator: Callable[..., Any]) -> Callable[..., Any]:
        rule = one.gradient
        if rule is None:
            return operator
        formula = rule.form or one.plain

        def call(*given: Any) -> Any:
            arguments = one.parameters | dict(zip(one.parameters, given))
            outputs = self.run(operator, formula, rule, arguments)
            if rule.sums and arguments["hidden"] is not None:
                outputs = outputs[1:]
            if rule.chosen is not None and (chosen := self.choose(arguments, outputs)) is not None:
                # the first run has added the sum
                forced = {**arguments, "hidden": None, rule.chosen: chosen}
                outputs = self.run(operator, formula, rule, forced)
            if rule.stored:
                end = len(outputs) - len(rule.stored)
                self.stored.update(zip((id(arguments[pool]) for pool in rule.stored), outputs[end:], strict=True))
                outputs = outputs[:end]
            return outputs if len(outputs) > 1 else outputs[0]

        return call
