"""`ModelRunner`: one forward pass, and the rows that it leaves behind.

Owns the KV pool, the attention backend, the route recorder and, while it records, the load recorder.  Knows no
requests: it gets a `ForwardBatch` and gives back hidden states, and routes that are still on the device.

Shapes: T tokens of the step, D hidden, L MoE layers, K top-k, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from capture.capturer import RoutedExpertsCapturer
from capture.slot_store import RouteSlotStore
from capture.storage import narrowest
from eplb.load_counter import LoadCounter
from eplb.load_recorder import LoadRecorder
from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.layers.context import ForwardContext
from rollout.mem_cache.kv_pool import KVPool
from rollout.model_executor.model_state import ModelState
from rollout.model_executor.recorded_forward import RecordedForward
from rollout.model_executor.route_gather import RouteRider, gather_step, slice_size

_SCORED_ROWS_AT_ONCE = 256


class StepRoutes(NamedTuple):
    """What routers chose in one step, by KV slot: `slots` [T] and logical ids `rows_TLK`, on the device."""

    slots: torch.Tensor
    rows_TLK: torch.Tensor


class RouteRecorder:
    """The capture pair of a MoE engine: device buffer of one step, host rows by KV slot."""

    def __init__(self, capturer: RoutedExpertsCapturer, store: RouteSlotStore) -> None:
        self.capturer = capturer
        self.store = store


class ModelRunner:
    """Runs `state.model` over the KV pool.  Called in inference mode."""

    def __init__(
        self,
        state: ModelState,
        kv_pool: KVPool,
        attention: AttentionBackend,
        recorder: RouteRecorder | None,
        recorded: RecordedForward | None = None,
    ) -> None:
        self.state = state
        self.recorded = recorded  # None: the model runs in Python
        self.kv_pool = kv_pool
        self.recorder = recorder
        self.load_recorder: LoadRecorder | None = None
        self.load_counter: LoadCounter | None = None  # of the balancer: this rank's own tokens
        self._attention = attention
        config = state.model.config
        layers, top_k, dtype = len(config.moe_layer_ids), config.num_experts_per_tok, narrowest(config.num_experts)
        self._capturer = recorder.capturer if recorder else RoutedExpertsCapturer(layers, top_k, dtype)

    def forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, StepRoutes | None]:
        """Hidden states [T, D] of the step, and its routes where they are recorded: for `keep_routes`, in order.

        Reads nothing back from the device.  The weight epochs of the step's tokens are noted by KV slot; the load
        recorder sees the routes of all attention-DP ranks.  Ranks that share tokens all have all rows, also where each
        of them routed a slice.
        """
        model = self.state.model
        wants_routes = (self.recorder or self.load_recorder or self.load_counter) is not None
        written: tuple[torch.Tensor, ...] = ()
        hooks, rider = [], None
        if wants_routes:
            num_rows = batch.num_tokens
            if model.scatters_tokens:
                num_rows = slice_size(num_rows, model.parallel.attn_tp)
                rider = self._new_rider()
            written = (self._capturer.begin_step(num_rows),)
            hooks.append(self._capturer.record)
        self._attention.plan(batch)
        context = ForwardContext(batch, self._attention, hooks, rider)
        if self.recorded is None:
            hidden_TD = model(batch, context)
        else:
            hidden_TD, played = self.recorded(batch, context, self.state.placement.epoch, written)
            if played:
                self._capturer.played()
        routes = None
        if wants_routes:
            routes = self._note_routes(batch, self._capturer.finish_step() if rider is None else rider.routes())
        self.kv_pool.stamp(batch.out_cache_loc, self.state.epoch.weight_epoch)
        return hidden_TD, routes

    def keep_routes(self, routes: StepRoutes) -> None:
        """Bring the routes of a step to the host: its rows can be read by KV slot from now on."""
        if self.recorder is not None:
            self.recorder.store.write(routes.slots, routes.rows_TLK)

    def _new_rider(self) -> RouteRider | None:
        """For one step; None: the capturer has routes of all tokens in the end."""
        return RouteRider(self._capturer)

    def _note_routes(self, batch: ForwardBatch, ids_TLK: torch.Tensor) -> StepRoutes:
        if self.load_counter is not None:
            self.load_counter.note(ids_TLK, self.state.epoch.weight_epoch)
        if self.load_recorder is not None:
            step = gather_step(batch, ids_TLK, self.state.model.parallel.attn_dp)
            self.load_recorder.note(step[0], self.state.epoch, *step[1:])
        return StepRoutes(batch.out_cache_loc, ids_TLK)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of chosen rows."""
        return self.state.model.compute_logits(hidden_ND)

    def logits_in_chunks(self, hidden_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of many rows a few at a time, so that a long scored prompt does not need [N, V] at once."""
        for rows in hidden_ND.split(_SCORED_ROWS_AT_ONCE):
            yield self.state.model.compute_logits(rows)
