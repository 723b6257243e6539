"""The decoder of every family: embedding, layers built from their specs, final norm, and the head on top.

Layers have their names in the Hugging Face checkpoints.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary, rd rotated elements of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb.placement import ExpertPlacement
from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.heads import LabelsSpec
from rollout.core.specs.layer_specs import LayerSpec, MoESpec, RotarySpec
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops
from rollout.layers.attention_kinds import ATTENTION_LAYERS
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.embedding import Embedding, LabelHead, OutputHead, TiedEmbedding
from rollout.layers.layer import Layer
from rollout.layers.mlp import DenseMLP
from rollout.layers.moe.dispatchers.base import Dispatcher, LocalDispatcher
from rollout.layers.moe.dispatchers.select import DispatcherNeeds, MoeBackend, select_dispatcher, tokens_by_rank
from rollout.layers.moe.layer import MoELayer
from rollout.layers.norm_rotary import Hidden, RMSNorm, RotaryTable
from rollout.layers.shard import Shard
from rollout.model.weight_loading import WeightIndex


class DecoderLayer(Layer):
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    This is the only definition of the order of operations, on every device and path.  `moe_layer`: the ordinal of the
    layer among the MoE layers, if it is one.
    """

    def __init__(
        self,
        spec: LayerSpec,
        config: ModelConfig,
        layer_id: int,
        moe_layer: int,
        placement: ExpertPlacement,
        dispatcher: Dispatcher,
        build: Build,
    ) -> None:
        hidden_size, norm = config.hidden_size, config.norm
        self.rotary: RotarySpec | None = spec.attention.rotary
        self.input_layernorm = RMSNorm(hidden_size, norm, build)
        kind = ATTENTION_LAYERS[type(spec.attention)]
        attention = kind(spec.attention, hidden_size, layer_id, norm, build)
        setattr(self, kind.name, attention)  # its name in checkpoints
        self._attention = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, norm, build)
        self.mlp: DenseMLP | MoELayer
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MoELayer(spec.mlp, hidden_size, moe_layer, placement, dispatcher, build)
        else:
            self.mlp = DenseMLP(spec.mlp, hidden_size, build)

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden: Hidden,
        angles: torch.Tensor | None,
        context: ForwardContext,
    ) -> Hidden:
        """Return the block's output, which is not yet added to the residual stream; None if it is added.

        The residual stream is changed in place.
        """
        attended_TD = self._attention(residual_TD, hidden, self.input_layernorm, angles, context)
        return self.mlp(residual_TD, attended_TD, self.post_attention_layernorm, context)


class Decoder(Layer):
    """Embedding, layers, final norm.  The MoE layers use `dispatcher`."""

    def __init__(self, config: ModelConfig, placement: ExpertPlacement, dispatcher: Dispatcher, build: Build) -> None:
        self._layout, self._dispatcher = build.parallel.layout, dispatcher
        self.embed_tokens: Embedding | TiedEmbedding
        if config.tie_word_embeddings:
            self.embed_tokens = TiedEmbedding(Shard.whole(config.hidden_size), config.vocab_size, build, as_sent=True)
        else:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, build)
        ordinals = {layer_id: ordinal for ordinal, layer_id in enumerate(config.moe_layer_ids)}
        self.layers = [
            DecoderLayer(spec, config, layer_id, ordinals.get(layer_id, -1), placement, dispatcher, build)
            for layer_id, spec in enumerate(config.layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.norm, build)
        self.rotary_tables: dict[RotarySpec, RotaryTable] = {}
        for layer in self.layers:
            if layer.rotary is not None and layer.rotary not in self.rotary_tables:
                self.rotary_tables[layer.rotary] = RotaryTable(layer.rotary, config.max_position_embeddings, build)

    def __call__(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        self.plan_exchange(batch)
        angles: dict[RotarySpec | None, torch.Tensor] = {}
        for rotary, table in self.rotary_tables.items():
            angles[rotary] = table.angles(batch.positions)
        residual_TD, hidden, kept = self.embed_tokens(batch.input_ids), None, context.layer_states
        for layer_id, layer in enumerate(self.layers):
            if kept is not None:
                kept.take(layer_id, residual_TD, hidden, layer.input_layernorm)
            hidden = layer(residual_TD, hidden, angles.get(layer.rotary), context)
        return self.norm(residual_TD, hidden)

    def plan_exchange(self, batch: ForwardBatch) -> None:
        """Prepare the dispatcher for the tokens that the ranks bring.  A replay of a captured forward needs it, too."""
        plan_exchange(self._dispatcher, self._layout, batch)

    def capture_obstacle(self, num_tokens: int) -> str | None:
        """Return why a forward of `num_tokens` tokens on every attention-DP rank cannot be captured; None if it can."""
        tokens = [num_tokens] * self._layout.attn_dp_size
        return self._dispatcher.capture_obstacle(_tokens_by_rank(self._dispatcher, self._layout, tokens))


class DecoderForCausalLM(Layer):
    """A model as the engine sees it.  Its head is over the vocabulary, over labels, or there is none.

    `weights` finds its weights by name, for loading and refresh; `moe_layer_ids` are the hidden layers whose routes
    hooks get, in the order of their ordinals.  Run it without autograd.

    All ranks of an engine call it together, each with the tokens of its attention-DP rank, perhaps none.  The ranks
    that share tokens call `compute_logits` together.  `parallel` is this rank's view, of an engine of one rank by
    default.  `placement` has a row for each MoE layer and is shared by routers and weights.  `kv_layers`: the KV that
    each layer keeps of a token on this rank.  Raises `StartupError` for sizes that do not divide over the ranks.
    """

    lm_head: OutputHead | None = None
    score: LabelHead | None = None

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: ExpertPlacement,
        ops: Ops,
        parallel: Parallel | None = None,
        moe_backend: MoeBackend | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.parallel = parallel = parallel or Parallel()
        build = Build(ops, dtype, device, parallel)
        self.dispatcher = dispatcher = dispatcher_of(config, placement, moe_backend or MoeBackend(), build)
        self.scatters_tokens = dispatcher.scatters_tokens and parallel.attn_tp.size > 1
        self.moe_layer_ids = config.moe_layer_ids
        self.model = Decoder(config, placement, dispatcher, build)
        self.kv_layers = [
            ATTENTION_LAYERS[type(layer.attention)].kept(layer.attention, parallel) for layer in config.layers
        ]
        self.state_layers = [
            ATTENTION_LAYERS[type(layer.attention)].state(layer.attention, parallel) for layer in config.layers
        ]
        embedding, head = self.model.embed_tokens, config.head
        tied_to = embedding if isinstance(embedding, TiedEmbedding) else None
        if head == "vocabulary":
            self.lm_head = OutputHead(config.vocab_size, config.hidden_size, build, tied_to)
        elif isinstance(head, LabelsSpec):
            self.score = LabelHead(config.hidden_size, len(head.labels), head.has_bias, build)
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied_to else {}
        self.weights = WeightIndex(self, aliases, config.ignored_names, config.renamed_prefixes)

    def __call__(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """Return the final-normed hidden states [T, D] of the step's tokens."""
        return self.model(batch, context)

    def plan_replay(self, batch: ForwardBatch) -> None:
        """Prepare for a replay of the captured forward of `batch`, in the place of a call."""
        self.model.plan_exchange(batch)

    def capture_obstacle(self, num_tokens: int) -> str | None:
        """Return why a step of `num_tokens` tokens on every attention-DP rank cannot be captured; None if it can.

        The answer is the same on all ranks.
        """
        exchanges = self.parallel.layout.tp_size > 1
        if exchanges and self.parallel.tp.device is None:
            return "the ranks of the engine exchange tensors through the host"
        return self.model.capture_obstacle(num_tokens)

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] in the model's dtype.  Without a head over the vocabulary V is 0."""
        return hidden_ND.new_empty(hidden_ND.shape[0], 0) if self.lm_head is None else self.lm_head(hidden_ND)

    def compute_scores(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all labels [N, labels] in the model's dtype.  The model must have a head for them."""
        assert self.score is not None, "the model has no labels"
        return self.score(hidden_ND)


def plan_exchange(dispatcher: Dispatcher, layout: ParallelLayout, batch: ForwardBatch) -> None:
    """Prepare a dispatcher for the tokens that the ranks bring to a step."""
    if layout.tp_size > 1:
        tokens = batch.global_num_tokens or [batch.num_tokens]
        dispatcher.plan_step(_tokens_by_rank(dispatcher, layout, tokens))


def _tokens_by_rank(dispatcher: Dispatcher, layout: ParallelLayout, tokens_by_dp_rank: Sequence[int]) -> list[int]:
    return tokens_by_rank(layout, tokens_by_dp_rank, scattered=dispatcher.scatters_tokens)


def dispatcher_of(config: ModelConfig, placement: ExpertPlacement, backend: MoeBackend, build: Build) -> Dispatcher:
    """Return a dispatcher of MoE layers.  A dense model does not use it."""
    if not config.is_moe:
        return LocalDispatcher()
    return select_dispatcher(
        DispatcherNeeds(
            parallel=build.parallel,
            backend=backend,
            num_physical_experts=placement.num_physical_experts,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
            dtype=build.dtype,
            device=torch.device(build.device),
        )
    )
