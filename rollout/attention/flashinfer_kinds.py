"""FlashInfer's wrappers for the kinds of layers of a model: grouped query heads, and latent attention.

A kind is what FlashInfer's `plan` asks for: layers of one kind share a plan.  The extending sequences of a step and the
decoding ones have a wrapper each.  Written against flashinfer-python 0.7.2.post1.

Shapes: T tokens of the step, H query heads, hd head size, B decoding requests, S slots, R rank of latents, rd rotated
elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rollout.attention.flashinfer_sequences import CsrPart
from rollout.core.errors import StartupError
from rollout.memory.kv_pool import KVScale

Dtypes = tuple[torch.dtype, torch.dtype]
# The sum of a softmax comes as its logarithm to the base of 2.
_LN_2 = math.log(2)
# Limits of a plan of latent attention (flashinfer/mla/_fa_common.py): a tile has at most _TILE_ROWS tokens times heads.
_MAX_TILES, _TILE_ROWS = 16384, 64


class LayerKind(NamedTuple):
    """Layers that can share a plan.  `is_latent`: values are the first `value_size` elements of the keys."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    is_latent: bool


class FixedBuffers(NamedTuple):
    """Device memory of captured steps of B requests, all int32 but for the workspace: kernels read it at each replay.

    They take the fields of `CsrPart`: `qo_indptr`, `kv_indptr` [B + 1]; `lens` [B], of the last pages or of the KV, as
    the wrapper asks; `kv_indices`, with room for the longest sequences.  `int_workspace` uint8 holds plans of grouped
    query heads.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    lens: torch.Tensor
    kv_indices: torch.Tensor
    int_workspace: torch.Tensor


class KindOfLayer(ABC):
    """Plans and runs the layers of one kind.  `dtypes`: of queries and results, and of keys and values.

    Layers of one kind may have different scales of keys and values in float8_e4m3fn: `run` takes them.  FlashInfer
    multiplies the scores' scale by that of the keys on the host, and the result by that of the values, unless it is 1,
    with a launch of its own.

    `workspace` uint8 is zero before its first use, and may be shared by all kinds.  With `fixed` buffers there are only
    decoding requests, always the same number, and `run` can be captured.
    """

    # The wrappers of extending and of decoding sequences, of which steps that are captured have no first one.
    _extend: Any = None
    _decode: Any

    def __init__(self, kind: LayerKind, dtypes: Dtypes, fixed: FixedBuffers | None) -> None:
        self.kind, self.fixed = kind, fixed
        self.dtype, self.kv_dtype = dtypes
        self._num_extend_tokens = 0
        self._has_decodes = False

    def plan(self, extends: CsrPart | None, decodes: CsrPart | None) -> None:
        """Plan the next step: its extending and its decoding sequences, None where there are none."""
        assert self.fixed is None or extends is None, "only steps that decode are captured"
        self._num_extend_tokens, self._has_decodes = 0, decodes is not None
        if extends is not None:
            self._num_extend_tokens = int(extends.qo_indptr[-1])
            self._plan_extends(extends)
        if decodes is not None:
            self._plan_decodes(decodes)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scales: KVScale
    ) -> torch.Tensor:
        """Attend with q [T, H, hd] to the pools k and v [S, kv heads, size] of a layer.

        Returns [T, H, value size].
        """
        out = q.new_empty(q.shape[0], q.shape[1], self.kind.value_size)
        cut = self._num_extend_tokens
        if cut:
            self._run(self._extend, q[:cut], k, v, sinks, scales, out[:cut])
        if self._has_decodes:
            self._run(self._decode, q[cut:], k, v, sinks, scales, out[cut:])
        return out

    def run_decodes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: KVScale) -> torch.Tensor:
        """Attend as `run`, with q [B, H, hd] of the step's decoding sequences alone."""
        out = q.new_empty(q.shape[0], q.shape[1], self.kind.value_size)
        if self._has_decodes:
            self._run(self._decode, q, k, v, None, scales, out)
        return out

    @abstractmethod
    def _plan_extends(self, part: CsrPart) -> None: ...

    @abstractmethod
    def _plan_decodes(self, part: CsrPart) -> None: ...

    @abstractmethod
    def _run(
        self,
        wrapper: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scales: KVScale,
        out: torch.Tensor,
    ) -> None: ...


class GroupedHeads(KindOfLayer):
    """Grouped query heads.  Decoding runs FlashAttention 2 on tensor cores; extending runs the module `prompts`.

    FlashAttention 2 is the same module for both, and takes groups of any size, which the kernel for plain cores does
    not.  `prompts` is None where a subclass runs what extends.
    """

    def __init__(
        self,
        library: Any,
        kind: LayerKind,
        dtypes: Dtypes,
        workspace: torch.Tensor,
        fixed: FixedBuffers | None,
        prompts: str | None,
    ) -> None:
        super().__init__(kind, dtypes, fixed)
        if fixed is None:
            if prompts is not None:
                self._extend = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=prompts)
            self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
        else:
            self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=fixed.kv_indptr,
                paged_kv_indices_buffer=fixed.kv_indices,
                paged_kv_last_page_len_buffer=fixed.lens,
                backend="fa2",
            )
            self._decode.reset_workspace_buffer(workspace, fixed.int_workspace)

    def _plan_extends(self, part: CsrPart) -> None:
        kind = self.kind
        self._extend.plan(
            part.qo_indptr,
            part.kv_indptr,
            part.kv_indices,
            part.last_page_len,
            kind.num_heads,
            kind.num_kv_heads,
            kind.key_size,
            1,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
        )

    def _plan_decodes(self, part: CsrPart) -> None:
        # No slot before the window is among the indices: the module without windows serves layers with one, too.
        kind = self.kind
        self._decode.plan(
            part.kv_indptr,
            part.kv_indices,
            part.last_page_len,
            kind.num_heads,
            kind.num_kv_heads,
            kind.key_size,
            1,
            sm_scale=kind.scale,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
        )

    def _run(
        self,
        wrapper: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scales: KVScale,
        out: torch.Tensor,
    ) -> None:
        pages = k.unsqueeze(1), v.unsqueeze(1)
        if sinks is None:
            wrapper.run(q, pages, out=out, k_scale=scales.k, v_scale=scales.v)
            return
        # `run` takes `sinks`, and ignores them where it does not run on Blackwell.  One more score in the sum of the
        # softmax, which has no value, scales the output.
        _, log2_sums_TH = wrapper.run(q, pages, out=out, return_lse=True, k_scale=scales.k, v_scale=scales.v)
        out.mul_(torch.sigmoid(log2_sums_TH * _LN_2 - sinks.float()).unsqueeze(-1))


class Latents(KindOfLayer):
    """Latent attention in the absorbed form: queries [T, H, R + rd], and one latent of R + rd elements in each slot."""

    def __init__(
        self, library: Any, kind: LayerKind, dtypes: Dtypes, workspace: torch.Tensor, fixed: FixedBuffers | None
    ) -> None:
        super().__init__(kind, dtypes, fixed)
        assert kind.window is None, "no model has latent attention with a window"
        self._metadata = library.mla.MLAPlanMetadata
        wrapper = library.BatchMLAPagedAttentionWrapper
        if fixed is None:
            self._extend, self._decode = wrapper(workspace), wrapper(workspace)
        else:
            self._decode = wrapper(
                workspace,
                use_cuda_graph=True,
                qo_indptr=fixed.qo_indptr,
                kv_indptr=fixed.kv_indptr,
                kv_indices=fixed.kv_indices,
                kv_len_arr=fixed.lens,
            )
        # A tile is 64 or 128 rows of heads; where its end cuts a token, FlashInfer refuses causal plans.
        self._causal_heads = 1 << (kind.num_heads - 1).bit_length()

    def _plan_extends(self, part: CsrPart) -> None:
        num_tokens, num_heads = int(part.qo_indptr[-1]), self._causal_heads
        if num_tokens * num_heads > _MAX_TILES * _TILE_ROWS:  # the largest step, at startup, meets this first
            most = _MAX_TILES * _TILE_ROWS // num_heads
            raise StartupError(
                f"FlashInfer plans {most} tokens of {self.kind.num_heads} latent heads at once, and a step may have "
                f"{num_tokens}: give a smaller --chunked-prefill-size"
            )
        self._plan(self._extend, part, num_heads, causal=True)

    def _plan_decodes(self, part: CsrPart) -> None:
        self._plan(self._decode, part, self.kind.num_heads, causal=False)

    def _plan(self, wrapper: Any, part: CsrPart, num_heads: int, causal: bool) -> None:
        kind = self.kind
        wrapper.plan(
            metadata=self._metadata.csr(part.qo_indptr, part.kv_indptr, part.kv_indices, part.kv_lens),
            num_heads=num_heads,
            head_dim_ckv=kind.value_size,
            head_dim_kpe=kind.key_size - kind.value_size,
            page_size=1,
            causal=causal,
            sm_scale=kind.scale,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
        )

    def _run(
        self,
        wrapper: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scales: KVScale,
        out: torch.Tensor,
    ) -> None:
        assert sinks is None, "no model has latent attention with sinks"
        missing = self._causal_heads - q.shape[1] if wrapper is self._extend else 0
        if missing:
            out.copy_(wrapper.run(query=F.pad(q, (0, 0, 0, missing)), kv_cache=k)[:, : q.shape[1]])
        else:
            wrapper.run(query=q, kv_cache=k, out=out)
