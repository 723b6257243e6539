"""The decoder stack that the Qwen3 families share; a family says what stands in the place of the feed-forward block.

Parameter names below `model.` and `lm_head` are those of the Hugging Face checkpoints.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from eplb.placement import ExpertPlacement
from rollout.core.forward_batch import ForwardBatch
from rollout.core.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.layers.attention import Attention
from rollout.layers.context import ForwardContext
from rollout.layers.embedding import Embedding, OutputHead, TiedEmbedding
from rollout.layers.layer import Layer
from rollout.layers.mlp import DenseMLP
from rollout.layers.moe.dispatchers.base import Dispatcher
from rollout.layers.moe.dispatchers.select import MoeBackend, tokens_by_rank
from rollout.layers.moe.layer import MoELayer
from rollout.layers.norm_rotary import RMSNorm, RotaryTable
from rollout.layers.ops.base import AttentionWeights, LayerOps, LayerRun, SparseWeights
from rollout.layers.shard import Shard, kv_heads
from rollout.models.weight_loading import WeightIndex

# Hidden-layer index -> block called with (residual [T, D], hidden [T, D], the norm before it, context).
MLPFactory = Callable[[int], DenseMLP | MoELayer]


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        mlp: DenseMLP | MoELayer,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        parallel: Parallel,
    ) -> None:
        norm_args = (config.hidden_size, config.rms_norm_eps, dtype, device, ops)
        self.input_layernorm = RMSNorm(*norm_args)
        self.self_attn = Attention(config, layer_id, self.input_layernorm, dtype, device, ops, parallel)
        self.post_attention_layernorm = RMSNorm(*norm_args)
        self.mlp = mlp

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        angles: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor | None:
        """The block's output, not yet added to the residual stream, which is changed in place; None if it is added."""
        parts_TD = self.self_attn(residual_TD, hidden_TD, angles, context)
        return self.mlp(residual_TD, parts_TD, self.post_attention_layernorm, context)

    def local_weights(self) -> tuple[AttentionWeights, SparseWeights] | None:
        """What the layer computes with, if it is sparse and no token leaves this rank."""
        if not isinstance(self.mlp, MoELayer):
            return None
        sparse = self.mlp.local_weights(self.post_attention_layernorm)
        return None if sparse is None else (self.self_attn.weights, sparse)


class LocalRun:
    """Consecutive sparse layers of a model on one rank, computed by one call.  Called like a `DecoderLayer`."""

    def __init__(self, first_layer: int, layers: Sequence[DecoderLayer]) -> None:
        weights = [layer.local_weights() for layer in layers]
        self._run = LayerRun([w for w in weights if w], range(first_layer, first_layer + len(layers)))
        assert len(self._run.layers) == len(layers), "layers of a run are local"
        self._attention = layers[0].self_attn
        self._blocks = [layer.mlp for layer in layers if isinstance(layer.mlp, MoELayer)]

    def __call__(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        angles: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        tables = [block.placement.table(block.moe_layer) for block in self._blocks]
        slots_T = context.batch.out_cache_loc
        hidden_TD, chosen = self._attention.ops.decoder_layers(
            residual_TD, hidden_TD, self._run, tables, angles, context.attention, slots_T
        )
        for block, logical_ids_TK in zip(self._blocks, chosen):
            block.gate.show(logical_ids_TK, context.route_hooks)
        return hidden_TD


def _in_runs(layers: Sequence[DecoderLayer]) -> list[DecoderLayer | LocalRun]:
    """Local layers side by side become runs; others stay what they are."""
    numbered = enumerate(layers)
    runs: list[DecoderLayer | LocalRun] = []
    for is_local, group in groupby(numbered, key=lambda item: item[1].local_weights() is not None):
        members = list(group)
        if is_local:
            runs.append(LocalRun(members[0][0], [layer for _, layer in members]))
        else:
            runs += [layer for _, layer in members]
    return runs


class Decoder(Layer):
    """Embedding, layers, final norm.  `dispatcher` is that of the MoE layers."""

    def __init__(
        self,
        config: ModelConfig,
        make_mlp: MLPFactory,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        parallel: Parallel,
        dispatcher: Dispatcher,
    ) -> None:
        self._layout, self._dispatcher = parallel.layout, dispatcher
        self.embed_tokens: Embedding | TiedEmbedding
        if config.tie_word_embeddings:
            self.embed_tokens = TiedEmbedding(Shard.whole(config.hidden_size), config.vocab_size, dtype, device, ops)
        else:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device, ops)
        self.layers = [
            DecoderLayer(config, layer_id, make_mlp(layer_id), dtype, device, ops, parallel)
            for layer_id in range(config.num_hidden_layers)
        ]
        self._runs = _in_runs(self.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device, ops)
        rotary = (config.head_dim, config.rope_theta, config.max_position_embeddings)
        self.rotary = RotaryTable(*rotary, dtype, device, ops)

    def __call__(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        if self._layout.tp_size > 1:
            tokens = batch.global_num_tokens or [batch.num_tokens]
            scattered = self._dispatcher.scatters_tokens
            self._dispatcher.plan_step(tokens_by_rank(self._layout, tokens, scattered=scattered))
        angles = self.rotary.angles(batch.positions)
        residual_TD, hidden_TD = self.embed_tokens(batch.input_ids), None
        for run in self._runs:
            hidden_TD = run(residual_TD, hidden_TD, angles, context)
        return self.norm(residual_TD, hidden_TD)


class DecoderForCausalLM(Layer):
    """A model as the engine sees it.

    `weights` is its side of loading and refresh; `moe_layer_ids` are the hidden layers whose routes hooks see, in the
    order of their ordinals.  Run it without autograd.

    On several ranks, all of an engine call it together, each with the tokens of its attention-DP rank, perhaps none;
    `compute_logits` is called together by those that share tokens.  `local_kv_heads`: KV heads of this rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_mlp: MLPFactory,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        parallel: Parallel,
        dispatcher: Dispatcher,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.parallel = parallel
        self.dispatcher = dispatcher
        self.scatters_tokens = dispatcher.scatters_tokens and parallel.attn_tp.size > 1
        self.moe_layer_ids = config.moe_layer_ids
        self.model = Decoder(config, make_mlp, dtype, device, ops, parallel, dispatcher)
        self.local_kv_heads = kv_heads(config, parallel).length
        embedding = self.model.embed_tokens
        tied_to = embedding if isinstance(embedding, TiedEmbedding) else None
        self.lm_head = OutputHead(config.vocab_size, config.hidden_size, dtype, device, ops, parallel.attn_tp, tied_to)
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied_to else {}
        self.weights = WeightIndex(self, aliases)

    def __call__(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """Final-normed hidden states [T, D] of the step's tokens."""
        return self.model(batch, context)

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in the model's dtype."""
        return self.lm_head(hidden_ND)


class ModelFactory(Protocol):
    """A family: what `registry` lists.  `parallel` is this rank's view, of an engine of one rank by default."""

    def __call__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: ExpertPlacement,
        ops: LayerOps,
        parallel: Parallel | None = None,
        moe_backend: MoeBackend | None = None,
    ) -> DecoderForCausalLM:
        """Raises `StartupError` for sizes that do not divide over the ranks."""
