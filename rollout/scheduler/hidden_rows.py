"""Hidden states of tokens: from the layers of a step to the records of the requests that want them.

    forward -- LayerStates --> HiddenRows.take --> rows, in flight -- enter_hidden --> HiddenRecord

A row belongs to the token that a step takes as input, so all tokens get one but a sample's last.  The rows of drafted
tokens that are not kept, and of tokens behind the end of a request, enter no record.

Shapes: T tokens of a step, n tokens of a request in it, L layers that the request wants, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from rollout.layers.context import LayerStates
from rollout.model.model_state import ServingEpoch
from rollout.scheduler.policy import StepPlan
from rollout.scheduler.req import Req
from rollout.scheduler.step_spans import spans_of
from rollout.scheduler.verify import VerifiedRows

_NONE: frozenset[int] = frozenset()


class HiddenPart(NamedTuple):
    """The rows [n, L, D] of a request in a step, of the tokens from position `first` on; D is 0 without numbers."""

    req: Req
    first: int
    rows_nLD: torch.Tensor


class HiddenRows:
    """Finds the layers whose hidden states the requests of a step want, and takes the rows of each request.

    Ranks that share tokens all have one, and decide the same.  Only one of them answers.  The others count rows, and
    keep none of their numbers.
    """

    def __init__(self, num_layers: int, *, answers: bool = True) -> None:
        self._final = num_layers  # the number of the states after the final norm
        self._answers = answers
        self._of_decodes: tuple[int, frozenset[int]] = (-1, _NONE)  # generation of the decode batch, and its layers

    def wanted(self, plan: StepPlan) -> frozenset[int]:
        """Return the layers that any request of the step wants."""
        decodes = plan.decodes
        if self._of_decodes[0] != decodes.generation:
            self._of_decodes = (decodes.generation, _layers(decodes.reqs))
        layers = self._of_decodes[1]
        return layers | _layers(item.req for item in plan.extends) if plan.extends else layers

    def between(self, wanted: frozenset[int]) -> LayerStates | None:
        """Return what keeps the states in front of layers; None if the final ones are enough."""
        layers = wanted - {self._final}
        return LayerStates(layers) if layers else None

    def take(
        self, plan: StepPlan, verified: VerifiedRows | None, hidden_TD: torch.Tensor, kept: LayerStates | None
    ) -> list[HiddenPart]:
        """Return the rows of a launched step, before its tokens are counted.  They share no memory with the step."""
        parts, end = [], 0
        for req, start, count in spans_of(plan, verified):
            begin, end = end, end + count
            record = req.output.hidden
            known = 0 if record is None else max(record.next_position - start, 0)
            if record is None or known >= count:
                continue
            layers = record.params.layers
            if self._answers:
                of_layers = [self._states(layer, hidden_TD, kept)[begin + known : end] for layer in layers]
                rows_nLD = torch.stack(of_layers, 1)
            else:
                rows_nLD = hidden_TD.new_empty((count - known, len(layers), 0))
            parts.append(HiddenPart(req, start + known, rows_nLD))
        return parts

    def _states(self, layer: int, hidden_TD: torch.Tensor, kept: LayerStates | None) -> torch.Tensor:
        if layer == self._final:
            return hidden_TD
        assert kept is not None, "the step kept no states of layers"
        return kept.of(layer)


def _layers(reqs: Iterable[Req]) -> frozenset[int]:
    return _NONE.union(*(req.output.hidden.params.layers for req in reqs if req.output.hidden is not None))


def enter_hidden(parts: Sequence[HiddenPart], epoch: ServingEpoch) -> None:
    """Append the rows of a finished step of `epoch` to the records.  Its tokens have entered them."""
    for req, first, rows_nLD in parts:
        record = req.output.hidden
        assert record is not None
        end = req.num_tokens - bool(req.output_ids)
        rows_nLD = rows_nLD[: max(end - first, 0)][max(record.next_position - first, 0) :]
        if len(rows_nLD):
            assert first <= record.next_position, "rows of hidden states are missing"
            record.append(rows_nLD, epoch)
