"""The memory of attention's partial results for tokens that decode.

The largest step does not show it, as it has prompts alone (`warm_up`).  An attention backend states its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rollout.attention.registry import find_attention_backend
from rollout.core.specs.layer_specs import GatedDeltaSpec, LayerSpec
from rollout.distributed.parallel import Parallel
from rollout.engine.build_drafts import LoadedDraft
from rollout.layers.shard import query_heads
from rollout.memory.cache_manager import MAX_STEPS_AHEAD
from rollout.memory.kv_pool import KVPool
from rollout.model.decoder import DecoderForCausalLM

# Takes the numbers of decoding tokens that steps have, and the most tokens of a context; returns the most bytes of one.
PartialBytes = Callable[[Sequence[int], int], int]


def partial_bytes_of(
    model: DecoderForCausalLM,
    device: torch.device,
    *,
    attention: str,
    kv_dtype: torch.dtype,
    kernels_available: bool,
    draft: LoadedDraft | None,
) -> PartialBytes:
    """Return the function of a model on this rank; with a draft it adds what the draft's forwards hold.

    `attention` is the backend's name, `kv_dtype` the dtype in which the model's KV is held.
    """
    config, choice = model.config, (attention, kernels_available)
    kv = KVPool(0, model.kv_layers, model.dtype, device, stored=kv_dtype)
    of_each = [_of_layers(config.layers, kv, model.parallel, *choice)]
    if draft is not None:
        if draft.config is not None:
            layers = draft.config.layers
        else:  # a layer of the model's checkpoint
            assert config.mtp is not None
            layers = (config.mtp.layer,)
        kv = KVPool(0, draft.model.kv_layers, draft.dtype, draft.device)
        of_each.append(_of_layers(layers, kv, draft.parallel, *choice))
    # Slot tables have room for steps ahead, and captured steps count all positions of a table.
    return lambda counts, context: sum(each(counts, context + MAX_STEPS_AHEAD) for each in of_each)


def _of_layers(
    layers: Sequence[LayerSpec], kv: KVPool, parallel: Parallel, attention: str, kernels_available: bool
) -> PartialBytes:
    backend = find_attention_backend(attention, kv, kernels_available)
    heads = {
        (query_heads(layer.attention, parallel).length, kept)
        for layer, kept in zip(layers, kv.layers, strict=True)
        if kept is not None and not isinstance(layer.attention, GatedDeltaSpec)
    }
    return partial(backend.partial_bytes, heads, kv.dtype)
