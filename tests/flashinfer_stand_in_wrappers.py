"""The stand-in's wrappers, with the signatures of flashinfer-python 0.7.2.post1: decode, prefill, latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.flashinfer_stand_in import INT_WORKSPACE_BYTES, PagedWrapper, Planned
from tests.flashinfer_stand_in_kernels import attend_paged, read_plan


def fa3_takes(dtype_q: torch.dtype, dtype_kv: torch.dtype, head_dim_qk: int, head_dim_vo: int) -> bool:
    """Return what FlashInfer's `is_fa3_backend_supported` and `is_fa3_prefill_head_dim_supported` say together."""
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    if (dtype_kv in fp8 and dtype_q not in fp8) or dtype_kv == torch.uint8:
        return False
    if head_dim_qk == head_dim_vo:
        return head_dim_qk in (64, 128, 256)
    return (head_dim_qk, head_dim_vo) == (192, 128)


class Modules:
    """FlashInfer's choice of a module, and which modules are built: `flashinfer.utils` and `flashinfer.jit` in one.

    `built`: names of modules; None: all.
    """

    def __init__(self) -> None:
        self.is_hopper = False
        self.built: set[str] | None = None

    def determine_attention_backend(
        self,
        device: torch.device,
        pos_encoding_mode: int,
        use_fp16_qk_reductions: bool,
        use_custom_mask: bool,
        dtype_q: torch.dtype,
        dtype_kv: torch.dtype,
        *,
        head_dim_qk: int | None = None,
        head_dim_vo: int | None = None,
    ) -> str:
        assert head_dim_qk and head_dim_vo, "without sizes it says fa3 for sizes that fa3 has not"
        plain = (pos_encoding_mode, use_fp16_qk_reductions, use_custom_mask) == (0, False, False)
        takes = self.is_hopper and plain and fa3_takes(dtype_q, dtype_kv, head_dim_qk, head_dim_vo)
        return "fa3" if takes else "fa2"

    def gen_batch_prefill_module(
        self,
        backend: str,
        dtype_q: torch.dtype,
        dtype_kv: torch.dtype,
        dtype_o: torch.dtype,
        dtype_idx: torch.dtype,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: int,
        use_sliding_window: bool,
        use_logits_soft_cap: bool,
        use_fp16_qk_reduction: bool,
    ) -> Any:
        assert (backend, dtype_o, dtype_idx) == ("fa3", dtype_q, torch.int32), "another module than the wrapper takes"
        assert not use_logits_soft_cap and not use_fp16_qk_reduction and pos_encoding_mode == 0
        name = f"head_dim_qk_{head_dim_qk}_use_swa_{use_sliding_window}_sm90"
        return SimpleNamespace(name=name, is_compiled=self.built is None or name in self.built)


class BatchDecode(PagedWrapper):
    """One query a request, after all of its KV: no mask but the window."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD" and backend in ("auto", "fa2") and jit_args is None, "not in the stand-in"
        self._begin(float_workspace_buffer, use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        if use_cuda_graph:
            if paged_kv_indptr_buffer is None or paged_kv_indices_buffer is None:
                raise ValueError("paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode")
            assert paged_kv_last_page_len_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("the size of paged_kv_indptr_buffer should be batch_size + 1")

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        if deprecated_positional_args:
            raise DeprecationWarning("optional arguments of plan are given by keyword")
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        assert (pos_encoding_mode, q_len_per_req, o_data_type, data_type) == ("NONE", 1, None, None), "not here"
        group = num_qo_heads // num_kv_heads
        if not self._use_tensor_cores and group not in (1, 2, 3, 4, 8):
            raise ValueError(f"plain cores have no kernel for groups of {group} heads")
        qo_indptr = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan_pages(
            qo_indptr,
            indptr,
            indices,
            last_page_len,
            (num_qo_heads, num_kv_heads, head_dim, head_dim),
            (q_data_type, kv_data_type),
            page_size=page_size,
            causal=False,
            window_left=window_left,
            sm_scale=sm_scale,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        return self._run_pages(q, paged_kv_cache, out, lse, return_lse, window_left, k_scale, v_scale)


class BatchPrefill(PagedWrapper):
    """Queries at the end of each sequence's KV."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph and jit_args is None, "not in the stand-in"
        assert backend in ("fa2", "fa3"), "the choice is left to nobody"
        self.backend = backend
        self._begin(float_workspace_buffer, use_cuda_graph)
        self._paged_kv_indptr_buf = self._paged_kv_indices_buf = self._paged_kv_last_page_len_buf = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        head_dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        dtypes = q_data_type, q_data_type if kv_data_type is None else kv_data_type
        if self.backend == "fa3" and not fa3_takes(*dtypes, head_dim_qk, head_dim_vo):
            raise ValueError(f"fa3 has no kernel for {dtypes} and heads of {head_dim_qk}")
        self._plan_pages(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            (q_data_type, kv_data_type),
            page_size=page_size,
            causal=causal,
            window_left=window_left,
            sm_scale=sm_scale,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        return self._run_pages(q, paged_kv_cache, out, lse, return_lse, window_left, k_scale, v_scale)


@dataclass(frozen=True)
class MLAPlanMetadata:
    """The CSR form; the dense one is not here."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLA(Planned):
    """Latent attention in the absorbed form.

    Without fixed buffers every plan takes new workspaces, and the page-locked one of the plan before goes back to a
    pool: the next plan but one writes into it.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._begin(float_workspace_buffer, use_cuda_graph)
        self._fixed = qo_indptr, kv_indptr, kv_indices, kv_len_arr

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        if metadata is None:
            raise DeprecationWarning("plan is given metadata")
        assert query_layout is None and kv_cache_layout is None and lse_mode == "none", "not in the stand-in"
        csr = [metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr]
        if None in (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type):
            raise TypeError("plan() missing required arguments")
        assert all(tensor is not None for tensor in csr) and num_heads and head_dim_ckv and head_dim_kpe is not None
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        self._check_plan(dict(zip(names, csr)), q_data_type, kv_data_type)
        if head_dim_ckv % 128 or head_dim_kpe % 64:
            raise ValueError("no kernel: head_dim_ckv must be a multiple of 128 and head_dim_kpe of 64")
        query_indptr, indptr, indices, lens = csr
        assert query_indptr is not None and indptr is not None and indices is not None and lens is not None
        if int(indptr[-1]) > len(indices) or not len(query_indptr) == len(indptr) == len(lens) + 1:
            raise ValueError("CSR metadata batch dimensions must agree")
        if causal:
            _check_tiles((query_indptr[1:] - query_indptr[:-1]).tolist(), lens.tolist(), num_heads)
        if not self._use_cuda_graph:
            self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        elif any(tensor is None for tensor in self._fixed):
            raise ValueError("CUDA graph mode requires reserved buffers")
        pool, before = self.stream.pinned, self._pinned
        self._pinned = pool.pop() if pool else torch.empty_like(before)
        pool.append(before)
        self._on_device = [self._stage(fixed, source) for fixed, source in zip(self._fixed, csr) if source is not None]
        self._keep_plan(
            query_indptr,
            lens,
            self._pinned,
            heads=num_heads,
            sizes=(head_dim_ckv, head_dim_kpe),
            page_size=page_size,
            dtypes=(q_data_type, kv_data_type),
            causal=causal,
            scale=sm_scale,
            num_rows=int(query_indptr[-1]),
        )

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        planned = self._planned
        if planned is None:
            raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
        if q_nope is not None or ckv_cache is not None:
            raise DeprecationWarning("run is given query and kv_cache")
        if return_lse or lse is not None or sinks is not None:
            raise ValueError("planned run argument mismatch: LSE mode or sinks")
        ckv, kpe = planned.sizes
        if (query.dtype, kv_cache.dtype) != planned.dtypes:
            raise ValueError("the dtype does not match the planned one")
        if query.shape != (planned.num_rows, planned.heads, ckv + kpe):
            raise ValueError(f"packed query is {tuple(query.shape)}, not as planned")
        if kv_cache.shape[1:] != (planned.page_size, ckv + kpe):
            raise ValueError(f"packed KV cache is {tuple(kv_cache.shape)}, not as planned")
        out = torch.empty(*query.shape[:2], ckv, dtype=query.dtype) if out is None else out
        if out.shape != (*query.shape[:2], ckv) or out.dtype != query.dtype:
            raise ValueError("out has another shape or dtype")
        workspace, (_, indptr, indices, _) = self._int_workspace_buffer, self._on_device
        keys = kv_cache.unsqueeze(2)

        def kernel() -> None:
            lens = read_plan(workspace)
            mask = planned.causal, -1
            attend_paged(query, keys, keys[..., :ckv], lens, indptr, indices, planned.scale, *mask, out=out, lse=None)

        reads = [self._float_workspace_buffer, workspace, query, kv_cache, indptr, indices]
        self._launch(kernel, reads, planned.scale, planned.causal, planned.num_rows)
        return out


def _check_tiles(query_lens: list[int], kv_lens: list[int], num_heads: int) -> None:
    """Refuse a tile whose end cuts a token in front of a block of keys: it would miss that block."""
    tile = 64 * (2 if sum(query_lens) * num_heads // len(query_lens) > 64 else 1)
    for rows, length in zip(query_lens, kv_lens):
        for end in range(tile, rows * num_heads, tile):
            query, cut = divmod(end, num_heads)
            if cut and (length - rows + query) % 64 == 0:
                raise ValueError("MLA causal tile boundary is unsupported")
