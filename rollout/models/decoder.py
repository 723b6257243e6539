"""The decoder stack that the Qwen3 families share; a family says what stands in the place of the feed-forward block.

Parameter names below `model.` and `lm_head` are those of the Hugging Face checkpoints.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from eplb.placement import ExpertPlacement
from rollout.core.forward_batch import ForwardBatch
from rollout.core.model_config import ModelConfig
from rollout.layers.attention import Attention
from rollout.layers.context import ForwardContext
from rollout.layers.embedding import Embedding, OutputHead
from rollout.layers.norm_rotary import RMSNorm, RotaryTable
from rollout.layers.ops.base import LayerOps, Rotary
from rollout.models.weight_loading import WeightIndex

MLPFactory = Callable[[int], nn.Module]  # hidden-layer index -> block called with (hidden [T, D], context)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        mlp: nn.Module,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        norm_args = (config.hidden_size, config.rms_norm_eps, dtype, device, ops)
        self.input_layernorm = RMSNorm(*norm_args)
        self.self_attn = Attention(config, layer_id, dtype, device, ops)
        self.post_attention_layernorm = RMSNorm(*norm_args)
        self.mlp = mlp

    def forward(
        self,
        hidden_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotary: Rotary,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block's output, not yet added, and the residual stream (changed in place)."""
        if residual_TD is None:
            hidden_TD, residual_TD = self.input_layernorm(hidden_TD), hidden_TD
        else:
            hidden_TD, residual_TD = self.input_layernorm.add_and_norm(hidden_TD, residual_TD)
        hidden_TD = self.self_attn(hidden_TD, rotary, context)
        hidden_TD, residual_TD = self.post_attention_layernorm.add_and_norm(hidden_TD, residual_TD)
        return self.mlp(hidden_TD, context), residual_TD


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        make_mlp: MLPFactory,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_id, make_mlp(layer_id), dtype, device, ops)
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device, ops)
        self.rotary = RotaryTable(config.head_dim, config.rope_theta, dtype, device)

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        rotary = self.rotary.angles(batch.positions)
        hidden_TD, residual_TD = self.embed_tokens(batch.input_ids), None
        for layer in self.layers:
            hidden_TD, residual_TD = layer(hidden_TD, residual_TD, rotary, context)
        if residual_TD is None:
            return self.norm(hidden_TD)
        return self.norm.add_and_norm(hidden_TD, residual_TD)[0]


class DecoderForCausalLM(nn.Module):
    """A model as the engine sees it.

    `weights` is its side of loading and refresh; `moe_layer_ids` are the hidden layers whose routes hooks see, in the
    order of their ordinals.  Run it without autograd.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_mlp: MLPFactory,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.moe_layer_ids = config.moe_layer_ids
        self.model = Decoder(config, make_mlp, dtype, device, ops)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = OutputHead(config.vocab_size, config.hidden_size, dtype, device, ops, tied_to)
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied_to else {}
        self.weights = WeightIndex(self, aliases)

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> torch.Tensor:
        """Final-normed hidden states [T, D] of the step's tokens."""
        return self.model(batch, context)

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] in float32, or float64 for a float64 model."""
        return self.lm_head(hidden_ND)


ModelFactory = Callable[[ModelConfig, torch.dtype, torch.device | str, ExpertPlacement, LayerOps], DecoderForCausalLM]
