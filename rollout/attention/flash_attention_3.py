"""Prompts of grouped query heads by FlashAttention 3's own module, `flash_attn_interface` (Shah et al., 2024).

It is written to the module's documented call, in `hopper/flash_attn_interface.py` of Dao-AILab/flash-attention at
c082294e.  **Not run** on a device: tests run `tests/flash_attention_3_stand_in.py`.

    plan     slots of each sequence in a row of its own; lengths, copied from page-locked memory
    attend   one launch of a kernel, and one of the module's own plan

Keys are never split (`num_splits=1`), so that the order of a token's sums does not follow from the number of
multiprocessors or from the other sequences of the step.  The module has no sinks: they are applied to the result, by
the logarithm of the softmax's sum.

Shapes: T tokens of prompts, n sequences, H query heads, hd head size, S slots, P slots that all sequences read.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.attention.flashinfer_kinds import Dtypes, GroupedHeads, LayerKind
from rollout.attention.flashinfer_sequences import CsrPart, gather_rows
from rollout.core.specs.layer_specs import WindowKV
from rollout.memory.kv_pool import KVPool, KVScale

MODULE = "flash_attn_interface"
_PROBED_GROUP = 2  # query heads of a key head in the trial


class _Prompts(NamedTuple):
    """The plan of a step, int32 on the device.

    `ends` [n + 1]: the first token of each sequence, and the end.  `kv_lens` [n].  `pages` [n, longest]: the slots of
    each sequence.  `longest`: the most tokens of one.
    """

    ends: torch.Tensor
    kv_lens: torch.Tensor
    pages: torch.Tensor
    longest: int


def load_module(kv: KVPool) -> tuple[Any, str]:
    """Return the module, or None and why it is not taken.  Keys and values are in a dtype and of a size that it takes.

    A trial with one token of each kind of layer shows whether its build has the kernels: it may leave out windows, keys
    in pages, or sizes of heads.
    """
    layers = {
        (k.shape[1:], isinstance(spec, WindowKV)): layer
        for layer, (k, spec) in enumerate(zip(kv.k, kv.layers, strict=True))
        if spec is not None
    }
    try:
        module = import_module(MODULE)
        for layer in layers.values():
            _try(module, kv, layer)
    except Exception as error:  # whatever a foreign build raises: another operator serves
        lines = str(error).splitlines() or [type(error).__name__]
        return None, f"{MODULE} cannot be used ({lines[0]})"
    return module, ""


def _try(module: Any, kv: KVPool, layer: int) -> None:
    """Attend with one token to the first slot of a layer, which is read as two positions, and wait for it."""
    k, v, spec = kv.k[layer], kv.v[layer], kv.layers[layer]
    heads, size = k.shape[1:]
    window = 1 if isinstance(spec, WindowKV) else None  # one that reaches all keys would count as none
    kind = LayerKind(heads * _PROBED_GROUP, heads, size, v.shape[2], size**-0.5, window, False)
    numbers = torch.tensor([0, 1, 2, 0, 0], dtype=torch.int32).to(k.device)
    step = _Prompts(numbers[:2].clone(), numbers[2:3].clone(), numbers[3:].clone().view(1, 2), 1)
    q = torch.zeros(1, kind.num_heads, size, dtype=kv.dtype, device=k.device)
    out, sums = _call(module, kind, step, q, k, v, with_sums=True)
    if out.shape != q.shape or sums.cpu().shape != (kind.num_heads, 1):
        raise TypeError(f"a result of {list(out.shape)} with sums of {list(sums.shape)}")


class Fa3Heads(GroupedHeads):
    """Grouped query heads whose prompts are computed by `module`; their decoding is `GroupedHeads`'."""

    def __init__(self, library: Any, kind: LayerKind, dtypes: Dtypes, workspace: torch.Tensor, module: Any) -> None:
        super().__init__(library, kind, dtypes, workspace, None, None)
        assert self.dtype == self.kv_dtype, "queries and keys have one dtype"
        self._module = module
        self._prompts: _Prompts | None = None

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scales: KVScale
    ) -> torch.Tensor:
        cut = self._num_extend_tokens
        if not cut:
            return super().run(q, k, v, sinks, scales)
        assert self._prompts is not None and scales == KVScale(), "only keys in FP8 have scales"
        found = _attend(self._module, self.kind, self._prompts, q[:cut], k, v, sinks)
        if not self._has_decodes:
            return found
        out = q.new_empty(q.shape[0], q.shape[1], self.kind.value_size)
        out[:cut] = found
        self._run(self._decode, q[cut:], k, v, sinks, scales, out[cut:])
        return out

    def _plan_extends(self, part: CsrPart) -> None:
        device, lens = part.kv_indices.device, np.diff(part.qo_indptr.numpy())
        ends, kv_lens = (host.to(device, non_blocking=True) for host in (part.qo_indptr, part.kv_lens))
        self._prompts = _Prompts(ends, kv_lens, pages_of(part), int(lens.max()))


def pages_of(part: CsrPart) -> torch.Tensor:
    """Return the slots of each sequence in a row of its own, int32 [n, longest], with zeros behind the last."""
    count = len(part.kv_lens)
    if count == 1:
        return part.kv_indices.view(1, -1)
    first_n, counts_n = (host.numpy().astype(np.int64) for host in (part.kv_indptr[:-1], part.kv_lens))
    return gather_rows(part.kv_indices, first_n, counts_n)


def _attend(
    module: Any,
    kind: LayerKind,
    step: _Prompts,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with q [T, H, hd] to the pools k and v.  Returns [T, H, value size]."""
    out, sums_HT = _call(module, kind, step, q, k, v, with_sums=sinks is not None)
    if sinks is not None:
        out.mul_(torch.sigmoid(sums_HT.t() - sinks.float()).unsqueeze(-1))
    return out


def _call(
    module: Any,
    kind: LayerKind,
    step: _Prompts,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    with_sums: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and, if `with_sums`, the logarithm of each softmax's sum, float32 [H, T]."""
    found = module.flash_attn_with_kvcache(
        q,
        k.unsqueeze(1),
        v.unsqueeze(1),
        cache_seqlens=step.kv_lens,
        page_table=step.pages,
        cu_seqlens_q=step.ends,
        max_seqlen_q=step.longest,
        softmax_scale=kind.scale,
        causal=True,
        window_size=(-1, -1) if kind.window is None else (kind.window - 1, 0),
        num_splits=1,
        return_softmax_lse=with_sums,
    )
    return (found[0], found[1]) if with_sums else (found, found)
