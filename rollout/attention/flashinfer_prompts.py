"""`fa3_obstacle`: whether FlashInfer computes prompts of grouped query heads by FlashAttention 3 (Shah et al., 2024).

FlashInfer takes its module `fa3` by itself where a wrapper is left the choice (`auto`): on Hopper, for the dtypes and
head sizes that its kernels have.  It then compiles the module for minutes if it is not there, and each process chooses
alone.  Here the module is taken if FlashInfer would take it and it has been built, and if all ranks can.
"""

from __future__ import annotations

from typing import Any

import torch

from rollout.core.specs.layer_specs import WindowKV
from rollout.memory.kv_pool import KVPool

_NO_POSITIONS = 0  # `PosEncodingMode.NONE`: queries and keys are rotated before


def fa3_obstacle(library: Any, kv: KVPool) -> str | None:
    """Return why prompts are not computed by FlashAttention 3; None if they can be.

    `library`: the package `flashinfer`.  Nothing is compiled.
    """
    heads = sorted({(x.key_size, x.value_size, isinstance(x, WindowKV)) for x in kv.layers if x is not None})
    if any(x is not None and x.values_in_keys for x in kv.layers):
        return "latents have modules of their own"
    for key_size, value_size, has_window in heads:
        choice = library.utils.determine_attention_backend(
            kv.k[0].device, _NO_POSITIONS, False, False, kv.dtype, kv.stored,
            head_dim_qk=key_size, head_dim_vo=value_size,
        )  # fmt: skip
        if choice != "fa3":
            what = f"heads of {key_size}, queries in {kv.dtype}, keys in {kv.stored}"
            return f"FlashInfer has no other module for {what} on this device"
        sizes = key_size, value_size, _NO_POSITIONS, has_window, False, False
        dtypes = kv.dtype, kv.stored, kv.dtype, torch.int32
        module = library.jit.gen_batch_prefill_module("fa3", *dtypes, *sizes)
        if not module.is_compiled:
            return f"FlashInfer's module {module.name} is not built"
    return None
