"""A stand-in for FlashAttention 3's module `flash_attn_interface` on CPU tensors: the call in use, and its checks.

The signature is that of `hopper/flash_attn_interface.py` of Dao-AILab/flash-attention at c082294e.  Dtypes, shapes
and contiguity are checked as by the TORCH_CHECKs of `hopper/flash_api.cpp`.

    keys         in pages; a page that no sequence has is never read, and has NaN in tests
    masks        causal at the end of the keys; `causal` alone by default is False, and no window
    num_splits   0 by default: the kernel splits as it likes
    result       new memory; sums of the softmax as natural logarithms, float32 [H, T], only where they are asked for
    builds       may lack windows, keys in pages, or sizes of heads: `FLASHATTENTION_DISABLE_...`

It computes in float64.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.flashinfer_stand_in_kernels import attend_paged

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_LN_2 = 0.6931471805599453


class FlashAttention3:
    """One build of the module.  `calls`: facts of each call, in order.

    `without`: what the build lacks: "windows", "pages", or sizes of heads as numbers.  `dtypes`: that it takes; no real
    build has float32.
    """

    def __init__(self, *without: str | int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
        self.without, self.dtypes = without, dtypes
        self.calls: list[SimpleNamespace] = []

    def module(self) -> Any:
        """Return the module, to be put into `sys.modules`."""
        made: Any = ModuleType("flash_attn_interface")
        made.flash_attn_with_kvcache = self.flash_attn_with_kvcache
        return made

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        given = [k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens]
        assert not any(x is not None for x in (*given, q_descale, k_descale, v_descale, scheduler_metadata)), "not here"
        assert isinstance(cache_seqlens, torch.Tensor) and page_table is not None and cu_seqlens_q is not None
        self._check(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        left, right = window_size if window_size[0] < page_table.shape[1] - 1 else (-1, window_size[1])
        assert causal and (left == -1 or right == 0) and not attention_chunk and not softcap, "another mask"
        if left >= 0 and "windows" in self.without:
            raise RuntimeError("This flash attention build does not support local attention.")
        self.calls.append(SimpleNamespace(num_splits=num_splits, window=window_size, pages=page_table.clone()))
        rows = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()
        used = [pages[:length] for pages, length in zip(page_table, cache_seqlens.tolist())]
        indptr = torch.tensor([0, *(len(pages) for pages in used)]).cumsum(0)
        out, lse = torch.empty_like(q[..., : v_cache.shape[-1]]), torch.empty(q.shape[:2])
        lens = list(zip(rows, cache_seqlens.tolist()))
        attend_paged(q, k_cache, v_cache, lens, indptr, torch.cat(used), scale, True, left, out=out, lse=lse)
        return (out, (lse * _LN_2).t().contiguous(), None, None) if return_softmax_lse else out

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lens: torch.Tensor,
        pages: torch.Tensor,
        ends: torch.Tensor,
        longest: int | None,
    ) -> None:
        """Raise `RuntimeError` as the module's own checks do."""
        num_sequences, (_, heads, size) = len(ends) - 1, q.shape
        if "pages" in self.without:
            raise RuntimeError("This flash attention build does not support paged KV.")
        if size in self.without:
            raise RuntimeError(f"This flash attention build does not support head dimension {size}.")
        is_right = {
            "k must have shape (num_pages, page_size, num_heads_k, head_size)": k.dim() == v.dim() == 4,
            "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type": q.dtype in self.dtypes,
            "query and key must have the same dtype": q.dtype == k.dtype == v.dtype,
            "Input tensor must have contiguous last dimension": q.stride(-1) == k.stride(-1) == v.stride(-1) == 1,
            "Number of heads in key/value must divide number of heads in query": heads % k.shape[-2] == 0,
            "head_size must be that of the keys": size == k.shape[-1] == v.shape[-1] and size <= 256 and size % 8 == 0,
            "page_table must have shape (batch_size, max_num_pages_per_seq)": pages.dim() == 2
            and len(pages) == num_sequences,
            "lengths and pages must have dtype torch.int32": {x.dtype for x in (lens, pages, ends)} == {torch.int32},
            "seqused_k must be contiguous": lens.is_contiguous() and lens.shape == (num_sequences,),
            "page_table must have contiguous last dimension": pages.stride(-1) == 1,
            "max_seqlen_q must be provided if cu_seqlens_q is provided": longest is not None,
        }
        for message, holds in is_right.items():
            if not holds:
                raise RuntimeError(message)
        rows = ends[1:] - ends[:-1]
        assert int(ends[-1]) == len(q) and int(rows.max()) == longest, "memory behind the queries"
        assert bool((lens >= rows).all()) and int(lens.max()) <= pages.shape[1], "memory behind the pages"
