"""`ModelRunner`: one forward pass, with its KV and routes.

It owns the KV pool, the attention backend and the store of routes.  It gets a `ForwardBatch`, no requests, and returns
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
from rollout.core.forward_batch import ForwardBatch, StateOperands
from rollout.core.host_copy import to_device
from rollout.distributed.communicator import share_sizes
from rollout.executor.graph_runner import GraphRunner
from rollout.executor.piece_runner import PieceRunner
from rollout.executor.recorded_forward import RecordedForward
from rollout.layers.context import ForwardContext, LayerStates, SliceRoutes, States
from rollout.memory.kv_pool import KVPool
from rollout.memory.state_pool import StatePool
from rollout.model.model_state import ModelState, ServingEpoch
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo

_SCORED_ROWS_AT_ONCE = 256

# Called after every forward, in order, with the batch, its epoch and the logical ids [T, L, K] of this rank's tokens,
# on the device.  An observer copies the rows that it keeps.  All ranks have the same observers.
RouteObserver = Callable[[ForwardBatch, ServingEpoch, torch.Tensor], None]


class StepRoutes(NamedTuple):
    """The routers' choices in one step, by KV slot: `slots` [T] and logical ids `rows_TLK`, on the same device."""

    slots: torch.Tensor
    rows_TLK: torch.Tensor


class ModelRunner:
    """Runs `state.model` over the KV pool.  Called in inference mode.

    `route_store`: routes by KV slot, None if they are not captured.  `route_observers` get the routes, too.  Without
    store and observers, routes are not recorded.
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
        self.observes_later = False  # True: the caller calls `observe` once it knows which tokens stay
        self.graphs: GraphRunner | None = None  # None: no step is replayed as a whole
        self.pieces: PieceRunner | None = None  # None: no step is replayed in pieces
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
        """Run the step.  Returns its hidden states [T, D], and its routes if they are recorded.

        The caller passes the routes to `keep_routes`, step by step.  This call reads nothing back from the device.
        Ranks that share tokens all get the routes of all rows, even if each of them routed a slice.
        """
        replayed = None if self.graphs is None else self.graphs.forward(batch, self.wants_routes)
        if replayed is None and self.pieces is not None:
            replayed = self.pieces.forward(batch, self.wants_routes)
        hidden_TD, ids_TLK = self._computed(batch) if replayed is None else replayed
        return hidden_TD, None if ids_TLK is None else self._note_routes(batch, ids_TLK)

    def forward_keeping(self, batch: ForwardBatch, kept: LayerStates) -> tuple[torch.Tensor, StepRoutes | None]:
        """Run the step as `forward` does, and keep hidden states between layers.

        No recording keeps them, so the step runs in Python.  Other data-parallel ranks know by `kind_everywhere`.
        """
        if self.graphs is not None:
            self.graphs.skip()
        hidden_TD, ids_TLK = self._computed(batch, kept)
        return hidden_TD, None if ids_TLK is None else self._note_routes(batch, ids_TLK)

    def sample_replayed(self, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens | None:
        """Sample the step that was forwarded last as `Sampler.sample` does, if its sampling was captured; else None."""
        return None if self.graphs is None else self.graphs.sample(info, positions_N)

    def takes_verify(self, num_rows: int, num_read_again: int) -> bool:
        """Return whether a step that verifies drafts is replayed as a whole: see `GraphRunner.takes_verify`."""
        return self.graphs is not None and self.graphs.takes_verify(num_rows, num_read_again)

    def _computed(
        self, batch: ForwardBatch, layer_states: LayerStates | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the hidden states [T, D] and, if they are recorded, the logical ids [T, L, K]."""
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
            device = self.kv_pool.k[0].device
            states = States(self.state_pool, StateOperands(*(to_device(table, device) for table in batch.states)))
        context = ForwardContext(batch, self.attention, hooks, slices, states, layer_states)
        if self.recorded is None or layer_states is not None:
            hidden_TD = model(batch, context)
        else:
            hidden_TD, played = self.recorded(batch, context, self.state.placement.epoch, written)
            if played:
                self._capturer.played()
        if not wants_routes:
            return hidden_TD, None
        return hidden_TD, self._capturer.finish_step() if slices is None else slices.routes()

    def keep_routes(self, routes: StepRoutes) -> None:
        """Store the routes of a step, which are on the host now.  From now on they can be read by KV slot."""
        if self.route_store is not None:
            self.route_store.write(routes.slots, routes.rows_TLK)

    def _new_slice_routes(self) -> SliceRoutes | None:
        """Return the recorder of one step's routes by slices; None if the capturer gets the routes of all tokens."""
        return SliceRoutes(self._capturer)

    def observe(self, epoch: ServingEpoch, batch: ForwardBatch, ids_TLK: torch.Tensor) -> None:
        """Give the routes of a step to the observers."""
        for observe in self.route_observers:
            observe(batch, epoch, ids_TLK)

    def _note_routes(self, batch: ForwardBatch, ids_TLK: torch.Tensor) -> StepRoutes:
        if self.route_observers and not self.observes_later:
            self.observe(self.state.epoch, batch, ids_TLK)
        return StepRoutes(batch.out_cache_loc, ids_TLK)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of chosen rows."""
        return self.state.model.compute_logits(hidden_ND)

    def logits_in_chunks(self, hidden_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of many rows, a few rows at a time: a long scored prompt does not need [N, V] at once."""
        for rows in hidden_ND.split(_SCORED_ROWS_AT_ONCE):
            yield self.state.model.compute_logits(rows)
