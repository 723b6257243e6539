"""`ModelRunner`: one forward pass, and the rows that it leaves behind.

Owns the KV pool, the attention backend and the store of routes.  It gets a `ForwardBatch`, no requests, and gives back
hidden states, and routes that are still on the device.

Shapes: T tokens of the step, D hidden, L MoE layers, K top-k, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from capture.capturer import RoutedExpertsCapturer
from capture.slot_store import RouteSlotStore
from rollout.attention.base import AttentionBackend
from rollout.core.forward_batch import ForwardBatch
from rollout.distributed.communicator import share_sizes
from rollout.executor.graph_runner import GraphRunner
from rollout.executor.recorded_forward import RecordedForward
from rollout.layers.context import ForwardContext, SliceRoutes, States
from rollout.memory.kv_pool import KVPool
from rollout.memory.state_pool import StatePool
from rollout.model.model_state import ModelState, ServingEpoch
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo

_SCORED_ROWS_AT_ONCE = 256

# Called after every forward, in order, with what it computed and under which epoch: the logical ids [T, L, K] of this
# rank's tokens, on the device.  Copies what it keeps; on several ranks, all have the same observers.
RouteObserver = Callable[[ForwardBatch, ServingEpoch, torch.Tensor], None]


class StepRoutes(NamedTuple):
    """The routers' choices in one step, by KV slot: `slots` [T] and logical ids `rows_TLK`, on the same device."""

    slots: torch.Tensor
    rows_TLK: torch.Tensor


class ModelRunner:
    """Runs `state.model` over the KV pool.  Called in inference mode.

    `route_store`: routes by KV slot, None where they are not captured.  `route_observers`: who else gets them; while
    there is neither, routers are not asked.
    """

    def __init__(
        self,
        state: ModelState,
        kv_pool: KVPool,
        attention: AttentionBackend,
        route_store: RouteSlotStore | None,
        recorded: RecordedForward | None = None,
        state_pool: StatePool | None = None,
    ) -> None:
        self.state = state
        self.recorded = recorded  # None: the model runs in Python
        self.kv_pool = kv_pool
        self.state_pool = state_pool  # None: the model has no recurrent layers
        self.route_store = route_store
        self.route_observers: list[RouteObserver] = []
        self.graphs: GraphRunner | None = None  # None: no step is replayed
        self.attention = attention
        self._capturer = self.new_capturer()

    def new_capturer(self) -> RoutedExpertsCapturer:
        """Return a capturer of this model's routes."""
        config = self.state.model.config
        layers, device = len(config.moe_layer_ids), self.kv_pool.k[0].device
        return RoutedExpertsCapturer(layers, config.num_experts_per_tok, config.num_experts, device)

    @property
    def wants_routes(self) -> bool:
        """True while the routers' choices have a reader."""
        return self.route_store is not None or bool(self.route_observers)

    def forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, StepRoutes | None]:
        """Hidden states [T, D] of the step, and its routes where they are recorded: for `keep_routes`, in order.

        Reads nothing back from the device.  Ranks that share tokens all have all rows, also where each of them routed a
        slice.
        """
        replayed = None if self.graphs is None else self.graphs.forward(batch, self.wants_routes)
        hidden_TD, ids_TLK = self._computed(batch) if replayed is None else replayed
        return hidden_TD, None if ids_TLK is None else self._note_routes(batch, ids_TLK)

    def sample_replayed(self, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens | None:
        """Sample the step that was forwarded last as `Sampler.sample` does, if its sampling was captured; else None."""
        return None if self.graphs is None else self.graphs.sample(info, positions_N)

    def _computed(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, D] and, where they are recorded, the logical ids [T, L, K]."""
        model = self.state.model
        wants_routes = self.wants_routes
        written: tuple[torch.Tensor, ...] = ()
        hooks, slices = [], None
        if wants_routes:
            num_rows = batch.num_tokens
            if model.scatters_tokens:
                ranks = model.parallel.attn_tp
                num_rows = share_sizes(num_rows, ranks.size)[ranks.rank]
                slices = self._new_slice_routes()
            written = (self._capturer.begin_step(num_rows),)
            hooks.append(self._capturer.record)
        self.attention.plan(batch)
        states = None
        if self.state_pool is not None and batch.states is not None:
            states = States(self.state_pool, batch.states)
        context = ForwardContext(batch, self.attention, hooks, slices, states)
        if self.recorded is None:
            hidden_TD = model(batch, context)
        else:
            hidden_TD, played = self.recorded(batch, context, self.state.placement.epoch, written)
            if played:
                self._capturer.played()
        if not wants_routes:
            return hidden_TD, None
        return hidden_TD, self._capturer.finish_step() if slices is None else slices.routes()

    def keep_routes(self, routes: StepRoutes) -> None:
        """Enter the routes of a step, once they are on the host: its rows can be read by KV slot from now on."""
        if self.route_store is not None:
            self.route_store.write(routes.slots, routes.rows_TLK)

    def _new_slice_routes(self) -> SliceRoutes | None:
        """For one step; None: the capturer has routes of all tokens in the end."""
        return SliceRoutes(self._capturer)

    def _note_routes(self, batch: ForwardBatch, ids_TLK: torch.Tensor) -> StepRoutes:
        for observe in self.route_observers:
            observe(batch, self.state.epoch, ids_TLK)
        return StepRoutes(batch.out_cache_loc, ids_TLK)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of chosen rows."""
        return self.state.model.compute_logits(hidden_ND)

    def logits_in_chunks(self, hidden_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of many rows a few at a time, so that a long scored prompt does not need [N, V] at once."""
        for rows in hidden_ND.split(_SCORED_ROWS_AT_ONCE):
            yield self.state.model.compute_logits(rows)
