"""`DraftGraphs`: forwards of a draft as recordings that a device plays without Python between its kernels.

A forward is replayed with a decoding row for each of its tokens, as `GraphRunner` replays a step that verifies.  So one
recording of a size serves the tokens that a draft catches up with and the ones that it proposes.

Shapes: B rows of the largest recording, n of a forward, D hidden.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.distributed.communicator import Communicator
from rollout.executor.captures import GraphPool, Replay, reads_little_again
from rollout.executor.graph_buffers import GraphBuffers
from rollout.executor.input_builder import as_decoding_rows
from rollout.layers.context import ForwardContext
from rollout.model.model_state import ModelState

# The draft's forward in Python: rows and their hidden states [n, D] to states [n, D].
Forward = Callable[[ForwardBatch, ForwardContext, torch.Tensor | None], torch.Tensor]


class _Captured(NamedTuple):
    """The forward of one size."""

    batch: ForwardBatch
    attention: AttentionBackend
    replay: Replay


class DraftGraphs:
    """Called by `DraftRunner`, on all ranks that share its requests alike.

    `sizes`: ascending numbers of rows.  `hidden_like` [D]: a row of the hidden states that the draft takes; None: it
    takes none.  `weights`: the tensors that recordings read, which keep their addresses under a refresh.
    """

    def __init__(
        self,
        forward: Forward,
        attention: AttentionBackend,
        buffers: GraphBuffers,
        sizes: Sequence[int],
        new_pool: Callable[[], GraphPool],
        hidden_like: torch.Tensor | None,
        state: ModelState,
        weights: Sequence[torch.Tensor],
        ranks: Communicator,
    ) -> None:
        self._forward, self._attention, self._buffers = forward, attention, buffers
        self.sizes = list(sizes)
        self._new_pool, self._pool = new_pool, new_pool()
        self._hidden = None
        if hidden_like is not None:
            shape = sizes[-1], *hidden_like.shape
            self._hidden = torch.zeros(shape, dtype=hidden_like.dtype, device=hidden_like.device)
        self._state, self._weights, self._ranks = state, weights, ranks
        self._seen: tuple[object, object] = (None, None)  # epoch and content of the draft at the last comparison
        self._hold_for: Hashable = None
        self._captured: dict[int, _Captured] = {}

    def capture_all(self) -> None:
        """Capture every size.  The largest is first, as the others share its memory."""
        self._renew()
        for size in reversed(self.sizes):
            self._capture(size)

    def forward(self, batch: ForwardBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor | None:
        """Replay a forward and return a copy of its states [n, D].

        Returns None for a forward that is too large, or that would read too much KV again, as of a prompt.
        """
        count = batch.num_tokens
        spans = zip(batch.extend_prefix_lens, batch.extend_lens, strict=True)
        read_again = sum((length - 1) * (start + length) for start, length in spans)
        if not 0 < count <= self.sizes[-1] or not reads_little_again(self._attention.kv, read_again):
            return None
        self._renew()
        size = self.sizes[bisect_left(self.sizes, count)]
        step = self._captured.get(size) or self._capture(size)
        self._buffers.fill(as_decoding_rows(batch) if batch.extend_lens else batch)
        if self._hidden is not None and hidden_TD is not None:
            self._hidden[:count].copy_(hidden_TD)
        step.attention.plan(step.batch)
        step.replay()
        return self._buffers.outputs.hidden[:count].clone()

    def _renew(self) -> None:
        """Drop the recordings if a tensor that they read has moved, on any rank.  Compared once for each refresh."""
        draft = self._state.draft
        seen = self._state.epoch, None if draft is None else draft.digests
        if self._seen[0] is seen[0] and self._seen[1] is seen[1]:
            return
        self._seen = seen
        hold_for = tuple(tensor.data_ptr() for tensor in self._weights)
        if self._ranks.any_of(hold_for != self._hold_for):
            self._captured.clear()
            self._pool = self._new_pool()
        self._hold_for = hold_for

    def _capture(self, size: int) -> _Captured:
        attention = self._attention.for_graph(size)
        assert attention is not None, "`capture_draft` asks before it makes a DraftGraphs"
        self._buffers.clear()
        batch, out = self._buffers.batch(size), self._buffers.outputs.hidden[:size]
        given = None if self._hidden is None else self._hidden[:size]
        attention.plan(batch)

        def run() -> None:
            out.copy_(self._forward(batch, ForwardContext(batch, attention), given))

        step = self._captured[size] = _Captured(batch, attention, self._pool.capture(run))
        return step
