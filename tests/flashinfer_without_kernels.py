"""The installed package `flashinfer` on CPU tensors: its own wrappers in Python, above the stand-in's kernels.

All that the wrappers check, copy and pass on is the package's own; what they take for a device of sm_90 computes in
float64.  For flashinfer-python 0.7.2.post1: other releases may load their modules elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.flashinfer_stand_in_kernels import attend_paged, read_plan, write_plan

_CAUSAL = 1  # flashinfer.utils.MaskMode


class _GroupedHeads:
    """The result of `get_batch_prefill_module` for FlashAttention 2, as `plan` and `run` of the wrappers call it."""

    workspace_size = None

    def plan(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor, pinned: torch.Tensor, *rest: Any) -> Any:
        qo_indptr, kv_indptr, kv_lens, num_rows, batch_size, *_ = rest
        assert len(rest) == 17, f"FlashAttention 2 takes four arguments more than others: {len(rest)}"
        assert batch_size == len(kv_lens) == len(kv_indptr) - 1 and num_rows == int(qo_indptr[-1])
        write_plan(pinned, qo_indptr, kv_lens)
        int_workspace.copy_(pinned)
        return [num_rows]

    def paged_run(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor, plan: Any, *rest: Any) -> None:
        q, k, v, qo_indptr, indptr, indices, _, out, lse, mask_mode, layout, window_left, *more = rest
        scale = more[8]
        assert layout == 0 and int(qo_indptr[-1]) == len(q), "pages are positions, then heads"
        lens = read_plan(int_workspace)
        attend_paged(q, k, v, lens, indptr, indices, scale, mask_mode == _CAUSAL, window_left, out=out, lse=lse)


class _Latents:
    """The result of `get_batch_mla_module`."""

    def plan(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor, pinned: torch.Tensor, *rest: Any) -> Any:
        qo_indptr, _, kv_lens, *_ = rest
        write_plan(pinned, qo_indptr, kv_lens)
        int_workspace.copy_(pinned)
        return []

    def run(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor, plan: Any, *rest: Any) -> None:
        q_nope, q_pe, ckv, kpe, indices, out, lse, mask_mode, _, page_size, scale, *_ = rest
        lens = read_plan(int_workspace)
        indptr = torch.tensor([0, *accumulate(length for _, length in lens)])
        q, keys = torch.cat([q_nope, q_pe], -1), torch.cat([ckv, kpe], -1).unsqueeze(2)
        assert page_size == 1, "its plan holds where pages begin"
        mask = mask_mode == _CAUSAL, -1
        attend_paged(q, keys, keys[..., : ckv.shape[-1]], lens, indptr, indices, scale, *mask, out=out, lse=lse)


@contextmanager
def without_kernels() -> Iterator[Any]:
    """Yield what `import flashinfer` gives, for use within; raises `ImportError` where it is not installed."""
    import flashinfer
    from flashinfer.mla._batch_mla import _auto_policy
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    empty = torch.empty

    def empty_on_cpu(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    def capability(device: torch.device) -> tuple[int, int]:
        return 9, 0

    memory = SimpleNamespace(shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448)
    patches = [
        (torch, "empty", empty_on_cpu),
        (flashinfer.decode, "get_batch_prefill_module", lambda *_: _GroupedHeads()),
        (flashinfer.prefill, "get_batch_prefill_module", lambda *_: _GroupedHeads()),
        (_auto_policy, "_get_compute_capability", capability),
        (_auto_policy, "is_sm90a_supported", lambda device: True),
        (_fa_common, "get_compute_capability", capability),
        (_fa_common, "is_sm90a_supported", lambda device: True),
        (_fa_common, "get_device_properties", lambda device: memory),
        (_fa_common, "get_device_sm_count", lambda device: 132),
        (fa2_backend, "get_batch_mla_module", lambda *_: _Latents()),
        (fa3_backend, "get_batch_mla_module", lambda *_: _Latents()),
    ]
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield flashinfer
