"""The engine's model over the tensors of a trainer's model: one prefill of whole sequences, under autograd.

Only the source of the weights and the gradients differ from serving.  The decoder, its layers and operators are the
engine's, so that a token gets the engine's bits.

Shapes: T tokens, D hidden, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from eplb.expert_location import trivial_location
from eplb.placement import ExpertPlacement
from rollout.adapters.peft_folder import LoraWeights
from rollout.attention.base import AttentionBackend
from rollout.attention.registry import create_attention_backend
from rollout.core.specs.model_config import ModelConfig
from rollout.kernels.ops import Ops, plain_ops, select_ops
from rollout.layers.context import ForwardContext, States
from rollout.layers.lora import SlotSizes
from rollout.layers.moe.router import TopKRouter
from rollout.memory.kv_pool import KVPool
from rollout.memory.state_pool import StatePool
from rollout.model.adapter_places import AdapterPlaces, is_dense
from rollout.model.decoder import DecoderForCausalLM
from rollout.numerics.adapters import TrainedAdapter
from rollout.numerics.assembly import assemblies_of
from rollout.numerics.attention import DifferentiableAttention
from rollout.numerics.operators import Differentiable
from rollout.numerics.sequences import Sequences
from weight_sync.intake import load_weights
from weight_sync.ledger import WeightLedger
from weight_sync.staging import DirectSink

Named = Mapping[str, torch.Tensor]
# Takes a MoE layer's ordinal, its normed tokens [T, D] and their experts [T, K]; returns other experts, or None.
RouteChoice = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


class TrainedEngine:
    """The engine's model for a trainer's tensors.  It runs one forward at a time.

    `tensors` are the trainer's by name, of which only the shapes are read.  `padding_id` belongs to its embedding.
    `max_rank`: the greatest rank of an adapter, of which there are none by default; `with_experts`: it may adapt routed
    experts.

    Raises `StartupError`, and `UnknownTensorError` or `ShapeMismatchError` for tensors that are not the model's.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Named,
        dtype: torch.dtype,
        device: torch.device,
        kernels_available: bool,
        padding_id: int | None,
        max_rank: int = 0,
        with_experts: bool = False,
    ) -> None:
        self.config = config
        self._dtype, self._device, self._kernels_available = dtype, device, kernels_available
        ops = select_ops(dtype, device, kernels_available, deterministic=True)
        self._operators = Differentiable(ops, dtype, padding_id)
        self._choice: RouteChoice | None = None
        self._operators.choose = self._choose
        self._model = self._build(self._operators.ops, device)
        self._adapter = None
        if max_rank:
            wanted = (lambda _: True) if with_experts else is_dense
            self._adapter = TrainedAdapter(AdapterPlaces(self._model, SlotSizes(1, max_rank), wanted))
        template = self._build(plain_ops(), torch.device("meta"))
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._assemblies = assemblies_of(self._model, template, shapes)
        routers = (layer for _, layer in self._model.named_layers() if isinstance(layer, TopKRouter))
        self._moe_layer_of = {id(router.weight): router.moe_layer for router in routers}

    @property
    def batch_invariant(self) -> bool:
        """True if layers and attention give a token the same bits in every batch."""
        return self._operators.ops.batch_invariant and self._attention(1).batch_invariant

    def load(self, tensors: Named, adapter: Mapping[str, LoraWeights]) -> None:
        """Take the weights and the adapter as they are now, rounded to the engine's dtype as a refresh rounds them.

        Raises `CoverageError` if a weight is missing, `AdapterError` for an adapter that the engine cannot serve.
        """
        weights = self._model.weights
        ledger = WeightLedger(weights.metas())
        load_weights(weights, tensors.items(), DirectSink(weights), ledger, cast=True)
        ledger.settle()
        self._operators.named, self._operators.assemblies = tensors, self._assemblies
        if self._adapter is not None:
            self._adapter.load(adapter)
            self._operators.named = {**tensors, **self._adapter.named}
            self._operators.assemblies = self._assemblies | self._adapter.assemblies

    def forward(self, sequences: Sequences, choice: RouteChoice | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the final-normed hidden states [T, D] in float32, and the routes [T, L, K] of a model with experts."""
        count, model = sequences.rows.shape[0], self._model
        attention = DifferentiableAttention(self._attention(count), model.kv_layers, self._operators)
        states = None
        batch = sequences.step(has_states=any(model.state_layers))
        if self._adapter is not None and self._adapter.is_active:
            batch.adapters = torch.zeros(count, dtype=torch.int64, device=self._device)
        if batch.states is not None:
            pool = StatePool(len(sequences.lengths), model.state_layers, self._dtype, self._device)
            states = States(pool, batch.states)
        routes: dict[int, torch.Tensor] = {}
        context = ForwardContext(batch, attention, [routes.__setitem__], states=states)
        attention.plan(batch)
        self._choice = choice
        try:
            hidden_TD = model(batch, context)
        finally:
            self._choice = None
            self._operators.stored.clear()
        return hidden_TD, torch.stack(list(routes.values()), dim=1) if routes else None

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] in float32 that hold numbers of the engine's dtype."""
        return self._model.compute_logits(hidden_ND)

    def _choose(self, arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if self._choice is None:
            return None
        normed, _, ids = outputs
        return self._choice(self._moe_layer_of[id(arguments["weight"])], normed, ids)

    def _attention(self, num_tokens: int) -> AttentionBackend:
        kv = KVPool(num_tokens, self._model.kv_layers, self._dtype, self._device)
        name = "fixed_splits" if kv.k[0].device.type == "cuda" and self._kernels_available else "auto"
        return create_attention_backend(name, kv, self._kernels_available)

    def _build(self, ops: Ops, device: torch.device) -> DecoderForCausalLM:
        config = self.config
        placement = ExpertPlacement(trivial_location(len(config.moe_layer_ids), config.num_experts))
        return DecoderForCausalLM(config, self._dtype, device, placement, ops)
