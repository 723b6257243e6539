"""`PieceRunner`: steps with prompts, as recordings of what lies between their attentions.

    a replay     piece 0 | attend, layer 0 | piece 1 | attend, layer 1 | .. | piece L
                 norm, products, rotation, KV    of any lengths    products, experts, sums over ranks

A step with prompts computes little and launches much: Python needs as long for hundreds of tokens as for thousands.
All kernels but attention depend on the number of tokens alone.  So they are captured for some numbers of tokens, and a
step takes the next larger one.  Attention runs on the step's own tokens, by the backend of steps in Python.  vLLM and
SGLang cut steps in the same places ("piecewise CUDA graphs").

    rows    0 .. T - 1     T .. size - 1
            the step's     padding: KV goes to the padding slot, attention's result is that of an earlier step

The ranks of an engine exchange tensors within the pieces, so they replay one size together, as `GraphRunner`'s do.

Shapes: T tokens of the step, D hidden, L layers, M MoE layers, K top-k, H query heads, hd head size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch, StepKind
from rollout.executor.captures import Between, Conditions, GraphPool, Replay, adapted_forms, forward_into
from rollout.executor.token_buffers import TokenBuffers
from rollout.memory.kv_pool import KVPool
from rollout.model.model_state import ModelState


@dataclass(frozen=True)
class _Captured:
    """Steps of one size."""

    batch: ForwardBatch
    replay: Replay


class PieceRunner:
    """Called by `ModelRunner`.  `sizes`: ascending numbers of tokens; `new_pool` makes memory for recordings."""

    def __init__(
        self,
        state: ModelState,
        attention: AttentionBackend,
        capturer: RoutedExpertsCapturer,
        buffers: TokenBuffers,
        sizes: Sequence[int],
        new_pool: Callable[[], GraphPool],
    ) -> None:
        self._state = state
        self._attention = attention
        self._capturer = capturer
        self._buffers = buffers
        self.sizes = list(sizes)
        self._new_pool = new_pool
        self._pool = new_pool()
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by size and form
        self._forms = adapted_forms(state)
        self._conditions = Conditions(state)

    def capture_all(self, with_routes: bool) -> None:
        """Capture every size.  The largest is first, as the others share its memory.  `with_routes`: see `forward`."""
        self._renew(with_routes)
        for size in reversed(self.sizes):
            for is_adapted in self._forms:
                self._capture(size, is_adapted, with_routes)

    def forward(self, batch: ForwardBatch, with_routes: bool) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Replay the step and return copies of its hidden states [T, D] and, `with_routes`, its logical ids [T, M, K].

        Returns None for steps that are never captured: with forced routes or recurrent states, or with more tokens than
        the largest size.  The ranks of an engine all replay the step or all get None.
        """
        size = self._size_for(batch)
        if size is None:
            return None
        self._renew(with_routes)
        is_adapted = batch.adapters is not None or self._forms[0]
        step = self._captured.get((size, is_adapted)) or self._capture(size, is_adapted, with_routes)
        count = batch.num_tokens
        self._buffers.fill(batch)
        self._attention.plan(batch)
        self._state.model.plan_replay(step.batch)
        step.replay()
        hidden, routes = self._buffers.hidden[:count].clone(), self._buffers.routes[:count]
        return hidden, routes.clone() if with_routes else None

    def _size_for(self, batch: ForwardBatch) -> int | None:
        """Return the size that the step is padded to, or None if it is not replayed; the same on all ranks."""
        counts = batch.global_num_tokens
        if counts is None:
            counts, is_free = [batch.num_tokens], batch.forced_routes is None
        else:
            is_free = batch.kind_everywhere is not StepKind.IN_PYTHON
        if not is_free or batch.states is not None or not 0 < max(counts) <= self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, max(counts))]

    def _renew(self, with_routes: bool) -> None:
        """Drop the recordings if they no longer hold."""
        if self._conditions.have_changed(with_routes):
            self._captured.clear()
            self._pool = self._new_pool()

    def _capture(self, size: int, is_adapted: bool, with_routes: bool) -> _Captured:
        buffers, num_groups = self._buffers, self._state.model.parallel.attn_dp.size
        buffers.clear()
        batch = buffers.batch(size, is_adapted)
        if num_groups > 1:
            batch.global_num_tokens = [size] * num_groups
        hidden, routes = buffers.hidden[:size], buffers.routes[:size] if with_routes else None

        def forward(between: Between) -> None:
            attention = _CutAttention(self._attention, buffers, between)
            forward_into(self._state, self._capturer, batch, attention, hidden, routes)

        step = self._captured[size, is_adapted] = _Captured(batch, self._pool.capture_in_pieces(forward))
        return step


class _CutAttention(AttentionBackend):
    """Cuts a recording at each attention: `inner` attends there, to the step that `inner` was planned for.

    Queries and results pass through buffers.  They outlive a recording, whose own memory other pieces use again.
    """

    def __init__(self, inner: AttentionBackend, buffers: TokenBuffers, between: Between) -> None:
        super().__init__(inner.kv)
        self._inner, self._buffers, self._between = inner, buffers, between

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None

    def plan(self, batch: ForwardBatch) -> None:
        raise AssertionError("the backend that attends is planned, before each replay")

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        size, num_heads, _ = q.shape
        inner, buffers = self._inner, self._buffers
        queries = buffers.queries(q.shape[1:])[:size]
        attended = buffers.attended(num_heads * self.kv.v[layer].shape[2])[:size]
        queries.copy_(q)

        def attend_to_the_step() -> None:  # it must not hold `self`, whose `_between` may hold the recording
            count = buffers.count
            if count:  # none while a step is captured, and on a rank without tokens
                rows = inner.attend(layer, queries[:count], scale, window, sinks)
                attended[:count].copy_(rows)

        self._between(attend_to_the_step)
        return attended


def graph_token_counts(most: int) -> list[int]:
    """Return the numbers of tokens for which pieces are captured, ascending, up to and including `most`.

    A step has at most a fifth of padding, from 64 tokens on.
    """
    sizes = [8, 16, 32, 48, 64]
    while sizes[-1] < most:
        step = 1 << (sizes[-1].bit_length() - 3)
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < most] + [most]
