"""`MtpHead`: the layer of a checkpoint that predicts one token further, as a draft of the served model.

Shapes: T tokens, N rows whose logits are wanted, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from eplb.errors import EplbError
from eplb.expert_location import trivial_location
from eplb.placement import ExpertPlacement
from rollout.core.errors import StartupError
from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.layer_specs import KVKind, MoESpec
from rollout.core.specs.mtp import MtpSpec
from rollout.distributed.parallel import Parallel
from rollout.kernels.ops import Ops
from rollout.layers.attention_kinds import ATTENTION_LAYERS
from rollout.layers.build import Build
from rollout.layers.context import ForwardContext
from rollout.layers.embedding import Embedding, OutputHead, TiedEmbedding
from rollout.layers.layer import Layer
from rollout.layers.linear import Linear
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.layers.norm_rotary import RMSNorm, RotaryTable
from rollout.layers.shard import Shard
from rollout.model.decoder import DecoderForCausalLM, DecoderLayer, dispatcher_of, plan_exchange
from rollout.model.weight_loading import WeightIndex


class _Served(NamedTuple):
    """The layers of the served model that the head uses.  It is a tuple so that their weights are not the head's."""

    embedding: Embedding | TiedEmbedding
    head: OutputHead


class MtpHead(Layer):
    """A draft that reads the served model's hidden states: `MtpSpec` has its arithmetic.

    The row of position p gets token p + 1 and the model's hidden state of p, after the final norm.  It predicts token
    p + 2, and its own hidden state goes on as that of p + 1.  Layers have their names in checkpoints; `weights` has no
    tensor of the model.  Experts have a map of their own, with one row and no copies, and no route is shown to hooks.

    All ranks call it together, as they call the model.  `kv_layers`: the KV that its one layer keeps of a token.
    Raises `StartupError` for a model without such a layer, and for sizes that do not divide over the ranks.
    """

    needs_hidden = True

    def __init__(
        self,
        model: DecoderForCausalLM,
        device: torch.device | str,
        ops: Ops,
        moe_backend: MoeBackend | None = None,
    ) -> None:
        config, spec, parallel = model.config, model.config.mtp, model.parallel
        if spec is None or model.lm_head is None:
            raise StartupError(
                f"{config.architecture} has no layer that predicts several tokens at once: "
                "choose another --speculative-algorithm"
            )
        self.spec = spec
        self.has_experts = isinstance(spec.layer.mlp, MoESpec)
        build, backend = Build(ops, model.dtype, device, parallel), moe_backend or MoeBackend()
        placement = _placement(spec, device, parallel, backend)
        self.dispatcher = dispatcher_of(config, placement, backend, build)
        self._layout = parallel.layout
        self._served = _Served(model.model.embed_tokens, model.lm_head)
        size, norm = config.hidden_size, config.norm
        embedding_norm, hidden_norm = RMSNorm(size, norm, build), RMSNorm(size, norm, build)
        projection = Linear(Shard.whole(2 * size), size, build, as_sent=True)
        layer = DecoderLayer(spec.layer, config, 0, 0, placement, self.dispatcher, build)
        final_norm = RMSNorm(size, norm, build)
        setattr(self, spec.embedding_norm, embedding_norm)  # their names in checkpoints
        setattr(self, spec.hidden_norm, hidden_norm)
        setattr(self, spec.projection, projection)
        setattr(self, spec.block, layer)
        setattr(self, spec.final_norm, final_norm)
        self._embedding_norm, self._hidden_norm, self._projection = embedding_norm, hidden_norm, projection
        self._layer, self._final_norm = layer, final_norm
        self._rotary = None
        if layer.rotary is not None:
            known = model.model.rotary_tables.get(layer.rotary)
            self._rotary = known or RotaryTable(layer.rotary, config.max_position_embeddings, build)
        attention = spec.layer.attention
        self.kv_layers: Sequence[KVKind | None] = [ATTENTION_LAYERS[type(attention)].kept(attention, parallel)]
        self.weights = WeightIndex(self, {}, [copy for copy, _ in spec.copies], config.renamed_prefixes)

    def __call__(self, batch: ForwardBatch, context: ForwardContext, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states [T, D] for the logits of each row, and for the next row of its sequence.

        `batch` has the next token of each position; `hidden` [T, D] is of the positions, None where there are none.
        `context` has the KV of this layer alone.
        """
        plan_exchange(self.dispatcher, self._layout, batch)
        angles = None if self._rotary is None else self._rotary.angles(batch.positions)
        embedded_TD = self._embedding_norm(self._served.embedding(batch.input_ids), None)
        if hidden_TD is None:
            assert not batch.num_tokens, "the head reads the model's hidden states"
            hidden_TD = embedded_TD  # as empty
        both_T2D = torch.cat((embedded_TD, self._hidden_norm(hidden_TD, None)), dim=1)
        residual_TD = self._projection(both_T2D)
        return self._final_norm(residual_TD, self._layer(residual_TD, None, angles, context))

    def compute_logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] in the model's dtype, by the model's head."""
        return self._served.head(hidden_ND)


def _placement(spec: MtpSpec, device: torch.device | str, parallel: Parallel, backend: MoeBackend) -> ExpertPlacement:
    """Return the map of the layer's experts: one row, each expert once."""
    mlp = spec.layer.mlp
    location = trivial_location(1, mlp.router.num_experts) if isinstance(mlp, MoESpec) else trivial_location(0, 0)
    ranks = parallel.position.ep_rank, parallel.layout.ep_size
    try:
        return ExpertPlacement(location, device, *ranks, routes_alone=backend.name != "none")
    except EplbError as error:
        raise StartupError(f"--ep-size does not fit the layer that predicts several tokens at once: {error}") from None
