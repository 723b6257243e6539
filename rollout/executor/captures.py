"""The parts that captures of decode steps and of steps in pieces share: the pool, the forward, and what they hold for.

A recording reads weights, KV and expert tables at their addresses during the capture.  They keep their addresses under
a refresh, and tables change in place, so it holds for every version.  If something did move, steps are captured anew.

Shapes: T tokens of a captured step, t of this rank's slice, D hidden, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.distributed.communicator import share_sizes
from rollout.layers.context import ForwardContext, SliceRoutes, States
from rollout.memory.kv_pool import KVPool, kv_bytes_per_token
from rollout.model.model_state import ModelState, ServingEpoch
from rollout.model.weight_loading import weight_tensors

MAX_BYTES_READ_AGAIN = 16 << 20
"""The bytes of KV that a layer may read more than once in a step of decoding rows: 5 us at an H100's 3.35 TB/s.

It is an estimate of the time between two pieces and an attention, which a whole recording saves.  **Not run**.
"""

Replay = Callable[[], None]
Work = Callable[[], None]
Between = Callable[[Work], None]


class GraphPool(Protocol):
    """Recordings that share the memory of their intermediate results: one is played at a time.

    A recording frees its memory with the last reference to it.  So no reference cycle may hold it: a worker rarely
    searches for cycles.
    """

    def capture(self, run: Callable[[], None]) -> Replay:
        """Record the kernels that `run` launches.  The returned function launches them again, on the same memory.

        `run` is called several times.  It reads and writes tensors that outlive it, waits for nothing on the device,
        and allocates nothing whose size depends on numbers there.  Memory that it allocates must not be read after it.
        """

    def capture_in_pieces(self, run: Callable[[Between], None]) -> Replay:
        """Record as `capture` does, but for the work that `run` passes to its argument.

        There the recording is cut.  The work is done at once, and again by the host at each replay, between the same
        two pieces.  It may wait and allocate.  It keeps no memory that `run` allocates.
        """


def reads_little_again(kv: KVPool, num_tokens: int) -> bool:
    """Return whether tokens may each be a decoding row, which reads its sequence's KV by itself.

    `num_tokens`: the KV that rows read after another row of their sequence has read it, in tokens.
    """
    bytes_again = num_tokens * kv_bytes_per_token(kv.layers, kv.stored)
    return bytes_again <= MAX_BYTES_READ_AGAIN * len(kv.layers)


def adapted_forms(state: ModelState) -> tuple[bool, ...]:
    """Return the forms that a step is captured in: without adapters, and with slots for them also with adapters.

    A recording with adapters reads each token's slot.  It holds for all adapters that come and go.  Groups of attention
    DP run the second form in every step, as the step of one group may have adapters and that of another none: ranks
    capture and replay the same.
    """
    if state.adapters.max_rank is None:
        return (False,)
    return (True,) if state.model.parallel.attn_dp.size > 1 else (False, True)


class Conditions:
    """The conditions that recordings hold for: addresses, forms of the expert tables, and whether routes are wanted."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._weights = weight_tensors(state.model)
        self._seen: tuple[ServingEpoch | None, int, bool] = (None, 0, False)  # at the last comparison
        self._hold_for: Hashable = None

    def have_changed(self, with_routes: bool) -> bool:
        """Return whether recordings have to be made anew; True at the first call.  Compared once for each epoch.

        Ranks capture together.  So they vote, in the step in which each of them sees a new epoch.
        """
        epoch, placement = self._state.epoch, self._state.placement
        if self._seen[0] is epoch and self._seen[1:] == (placement.epoch, with_routes):
            return False
        self._seen = epoch, placement.epoch, with_routes
        hold_for = with_routes, placement.form, tuple(tensor.data_ptr() for tensor in self._weights)
        changed = self._state.model.parallel.tp.any_of(hold_for != self._hold_for)
        self._hold_for = hold_for
        return changed


def forward_into(
    state: ModelState,
    capturer: RoutedExpertsCapturer,
    batch: ForwardBatch,
    attention: AttentionBackend,
    hidden_TD: torch.Tensor,
    routes_TLK: torch.Tensor | None,
    states: States | None = None,
) -> None:
    """Run the model on `batch`, write its hidden states and, unless that is None, the logical ids of all its tokens."""
    model = state.model
    hooks = [] if routes_TLK is None else [capturer.record]
    slices = None
    if routes_TLK is not None:
        recorded = routes_TLK
        if model.scatters_tokens:  # this rank routes a slice of the tokens
            ranks, slices = model.parallel.attn_tp, SliceRoutes(capturer)
            count = share_sizes(batch.num_tokens, ranks.size)[ranks.rank]
            recorded = routes_TLK.new_empty(count, *routes_TLK.shape[1:])
        capturer.begin_step_in(recorded)
    hidden_TD.copy_(model(batch, ForwardContext(batch, attention, hooks, slices, states)))
    if routes_TLK is None:
        return
    if slices is None:
        capturer.finish_step()
    else:
        routes_TLK.copy_(slices.routes())
