"""The kernels of prompts of grouped query heads: FlashAttention 3 (Shah et al., 2024), or 2.

    own module       `flash_attn_interface`, where it is installed and its build has the kernels (`flash_attention_3`)
    FlashInfer's     its module `fa3`, where it has been built
    FlashAttention 2

FlashInfer takes its module `fa3` by itself where a wrapper is left the choice (`auto`): on Hopper, for the dtypes and
head sizes that its kernels have.  It then compiles the module for minutes if it is not there, and each process chooses
alone.  Here FlashAttention 3 is taken where FlashInfer would take it, if nothing has to be compiled, and if all ranks
can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rollout.attention.flash_attention_3 import MODULE, load_module
from rollout.core.specs.layer_specs import WindowKV
from rollout.memory.kv_pool import KVPool

_NO_POSITIONS = 0  # `PosEncodingMode.NONE`: queries and keys are rotated before


class PromptChoice(NamedTuple):
    """The kernels of prompts: `own_module`, or, where that is None, FlashInfer's of this name.

    `words`: for /server_info and the log.
    """

    module: str
    own_module: Any
    words: str


def choose_prompts(library: Any, kv: KVPool, all_agree: Callable[[bool], bool]) -> PromptChoice:
    """Choose with the other ranks.  `library`: the package `flashinfer`.  Nothing is compiled."""
    unfit = fa3_unfit(library, kv)
    own, without_own = (None, unfit) if unfit is not None else load_module(kv)
    if all_agree(own is not None):
        return PromptChoice("fa2", own, f"FlashAttention 3, {MODULE}")
    reason = unfit if unfit is not None else not_built(library, kv)
    if all_agree(reason is None):
        return PromptChoice("fa3", None, "FlashAttention 3")
    found = reason or "another rank of the engine has none"
    if unfit is None:
        found = f"{without_own or f'another rank has no {MODULE}'}; {found}"
    return PromptChoice("fa2", None, f"FlashAttention 2: {found}")


def fa3_unfit(library: Any, kv: KVPool) -> str | None:
    """Return why no kernel of FlashAttention 3 is for such keys on this device; None if one is."""
    if any(x is not None and x.values_in_keys for x in kv.layers):
        return "latents have modules of their own"
    for key_size, value_size, _ in _heads(kv):
        choice = library.utils.determine_attention_backend(
            kv.k[0].device, _NO_POSITIONS, False, False, kv.dtype, kv.stored,
            head_dim_qk=key_size, head_dim_vo=value_size,
        )  # fmt: skip
        if choice != "fa3":
            what = f"heads of {key_size}, queries in {kv.dtype}, keys in {kv.stored}"
            return f"FlashInfer has no other module for {what} on this device"
    return None


def not_built(library: Any, kv: KVPool) -> str | None:
    """Return which module of FlashInfer's is missing; None if all are built."""
    for key_size, value_size, has_window in _heads(kv):
        sizes = key_size, value_size, _NO_POSITIONS, has_window, False, False
        dtypes = kv.dtype, kv.stored, kv.dtype, torch.int32
        module = library.jit.gen_batch_prefill_module("fa3", *dtypes, *sizes)
        if not module.is_compiled:
            return f"FlashInfer's module {module.name} is not built"
    return None


def _heads(kv: KVPool) -> list[tuple[int, int, bool]]:
    """Return the sizes of keys and values of all layers, and whether there is a window."""
    return sorted({(x.key_size, x.value_size, isinstance(x, WindowKV)) for x in kv.layers if x is not None})
