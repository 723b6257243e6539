"""The stand-in's wrapper of keys and values outside of pages, with the signatures of flashinfer-python 0.7.2.post1."""

from __future__ import annotations

from typing import Any

import torch

from tests.flashinfer_stand_in import Planned
from tests.flashinfer_stand_in_kernels import attend_paged, read_plan


class BatchRagged(Planned):
    """Queries at the end of keys and values that lie one sequence after the other, outside of pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert kv_layout == "NHD" and not use_cuda_graph and jit_args is None, "not in the stand-in"
        self._begin(float_workspace_buffer, use_cuda_graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        dtypes = self._check_plan({"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}, q_data_type, kv_data_type)
        sizes = head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo
        if num_qo_heads % num_kv_heads or sizes not in ((64, 64), (128, 128), (192, 128), (256, 256)):
            raise ValueError(f"no kernel for {num_qo_heads} and {num_kv_heads} heads of {sizes}")
        if len(qo_indptr) != len(kv_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        lens = kv_indptr[1:] - kv_indptr[:-1]
        assert (lens > 0).all(), "a sequence without keys has no sum of scores: not in the stand-in"
        self._indptr = self._stage(None, kv_indptr)
        self._keep_plan(
            qo_indptr,
            lens,
            self._pinned,
            heads=(num_qo_heads, num_kv_heads),
            sizes=sizes,
            dtypes=dtypes,
            causal=causal,
            window_left=window_left,
            scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            rows=(int(qo_indptr[-1]), int(kv_indptr[-1])),
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        planned = self._planned
        if planned is None:
            raise AssertionError("plan info is not initialized")
        (rows, keys), (heads, kv_heads), (key_size, value_size) = planned.rows, planned.heads, planned.sizes
        if (q.dtype, k.dtype, v.dtype) != (*planned.dtypes, planned.dtypes[1]):
            raise ValueError("the dtype of q, k or v does not match that of plan")
        if q.shape != (rows, heads, key_size):
            raise ValueError(f"q is {tuple(q.shape)}, planned {rows} rows of {heads} heads of {key_size}")
        if k.shape != (keys, kv_heads, key_size) or v.shape != (keys, kv_heads, value_size):
            raise ValueError("k or v has another shape than planned")
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1 and (lse_base, lse_layout) == ("log2", "NH"), "not here"
        out = q.new_empty(rows, heads, value_size) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32) if return_lse and lse is None else lse
        workspace, indptr, whole = self._int_workspace_buffer, self._indptr, out

        def kernel() -> None:
            lens, positions = read_plan(workspace), torch.arange(keys)
            mask = planned.causal, planned.window_left
            attend_paged(
                q, k.unsqueeze(1), v.unsqueeze(1), lens, indptr, positions, planned.scale, *mask, out=whole, lse=lse
            )

        self._launch(kernel, [self._float_workspace_buffer, workspace, q, k, v, indptr], planned.scale)
        return (out, lse) if return_lse else out
