"""A stand-in for the package `flashinfer` on CPU tensors: the promises of 0.7.2.post1 for the calls in use, and traps.

    stream       copies and kernels run in order, later if the stream is `late`: what they read may have changed by then
    plan         writes page-locked memory that the wrapper keeps, and enqueues the copy of it; not in a capture
    run          reads lengths of the plan, indptr and indices where they lie when it runs; not before plan
    dtypes       indices int32; queries and KV have the plan's, float16 by default
    workspace    zero before its first use
    capture      only with fixed buffers; every replay must find all it read at the same addresses
    defaults     not causal, no window
    sinks        `run` takes them and ignores them
    scales       `run` takes them as numbers of the host; that of values is a launch of its own, unless it is 1.0

Signatures are the package's (`tests/flashinfer_signatures.py`).  Kernels compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.flashinfer_stand_in_kernels import attend_paged, merge, read_plan, write_plan

INT_WORKSPACE_BYTES = 1 << 16


class Stream:
    """Work in the order in which it was enqueued: at once, or, if `late`, when the host waits for it."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self.dtypes = dtypes
        self.late = False
        self.begun: set[int] = set()  # workspaces that were zero once
        self.pinned: list[torch.Tensor] = []  # page-locked memory that was given back
        self._queue: list[Callable[[], None]] = []
        self._num_enqueued = 0
        self._num_done = 0
        self.capturing: list[tuple[Any, ...]] | None = None

    def enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._num_enqueued += 1
        if not self.late:
            self.run_until(self._num_enqueued)

    def run_until(self, count: int) -> None:
        while self._num_done < count:
            self._queue.pop(0)()
            self._num_done += 1

    def progress(self) -> None:
        self.run_until(self._num_enqueued)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def work() -> None:
            target.copy_(source)

        self.enqueue(work)

    @contextmanager
    def capture(self) -> Iterator[list[tuple[Any, ...]]]:
        kernels: list[tuple[Any, ...]] = []
        self.capturing = kernels
        try:
            yield kernels
        finally:
            self.capturing = None


class Event:
    """A CUDA event: `synchronize` waits for all work enqueued before the last `record`."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, 0

    def record(self) -> None:
        self._at = self._stream._num_enqueued

    def synchronize(self) -> None:
        self._stream.run_until(self._at)


class Graph:
    """A captured call: `replay` runs the same kernels again, with the arguments of the capture."""

    def __init__(self, stream: Stream, call: Callable[[], torch.Tensor]) -> None:
        self._stream, self._call = stream, call
        with stream.capture() as self._kernels:
            call()
        assert self._kernels, "nothing was captured"

    def replay(self) -> torch.Tensor:
        with self._stream.capture() as kernels:
            out = self._call()
        if kernels != self._kernels:
            raise RuntimeError("a replay reads what was captured: another address or number now")
        return out


class Planned:
    """The state that wrappers share: workspaces, and what `plan` leaves for `run`."""

    stream: Stream

    def _begin(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool) -> None:
        self._take_workspace(float_workspace_buffer)
        self._use_cuda_graph = use_cuda_graph
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        self._pinned = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        self._planned: SimpleNamespace | None = None

    def _take_workspace(self, workspace: torch.Tensor) -> None:
        if workspace.dtype != torch.uint8 or workspace.data_ptr() % 16:
            raise ValueError("float_workspace_buffer must be uint8 and 16-byte aligned")
        ends = workspace[:4096], workspace[-4096:]
        if workspace.data_ptr() not in self.stream.begun and any(end.any() for end in ends):
            raise ValueError("float_workspace_buffer must be initialised to 0 for its first use")
        self.stream.begun.add(workspace.data_ptr())
        self._float_workspace_buffer = workspace

    def _check_plan(self, integers: dict[str, torch.Tensor], q_data_type: Any, kv_data_type: Any) -> tuple[Any, Any]:
        if self.stream.capturing is not None:
            raise RuntimeError("plan cannot be captured")
        for name, tensor in integers.items():
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int32, got {tensor.dtype}")
        q_dtype = getattr(torch, q_data_type) if isinstance(q_data_type, str) else q_data_type
        kv_dtype = q_dtype if kv_data_type is None else kv_data_type
        if q_dtype not in self.stream.dtypes or kv_dtype not in (q_dtype, torch.float8_e4m3fn):
            raise ValueError(f"no kernel for queries in {q_dtype} and keys in {kv_dtype}")
        return q_dtype, kv_dtype

    def _keep_plan(self, qo_indptr: torch.Tensor, kv_lens: torch.Tensor, pinned: torch.Tensor, **facts: Any) -> None:
        write_plan(pinned, qo_indptr, kv_lens)
        self.stream.copy(self._int_workspace_buffer, pinned)
        self._planned = SimpleNamespace(**facts)

    def _stage(self, fixed: torch.Tensor | None, source: torch.Tensor) -> torch.Tensor:
        """Copy on the device into `fixed`, or into new memory."""
        if not self._use_cuda_graph:
            fixed = torch.empty_like(source)
        assert fixed is not None
        if fixed.shape[0] < source.shape[0]:
            raise ValueError("the size of indices should be less than or equal to the allocated buffer")
        self.stream.copy(fixed[: source.shape[0]], source)
        return fixed

    def _launch(self, work: Callable[[], None], reads: list[torch.Tensor | None], *numbers: Any) -> None:
        if self.stream.capturing is not None:
            if not self._use_cuda_graph:
                raise RuntimeError("captured without fixed buffers: the next plan replaces what the kernel reads")
            places = [None if tensor is None else tensor.data_ptr() for tensor in reads]
            self.stream.capturing.append((*places, *numbers))
        self.stream.enqueue(work)


class PagedWrapper(Planned):
    """The base of decoding and extending: attention over pages of grouped key/value heads."""

    _qo_indptr_buf: torch.Tensor | None
    _paged_kv_indptr_buf: torch.Tensor | None
    _paged_kv_indices_buf: torch.Tensor | None
    _paged_kv_last_page_len_buf: torch.Tensor | None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        self._take_workspace(float_workspace_buffer)
        self._int_workspace_buffer = int_workspace_buffer
        self._pinned = torch.empty_like(int_workspace_buffer)

    def _plan_pages(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int, int, int],
        dtypes: tuple[Any, Any],
        *,
        page_size: int,
        causal: bool,
        window_left: int,
        sm_scale: float | None,
    ) -> None:
        integers = {"indptr": kv_indptr, "indices": kv_indices, "last_page_len": last_page_len}
        q_dtype, kv_dtype = self._check_plan(integers | {"qo_indptr": qo_indptr}, *dtypes)
        if heads[0] % heads[1] or heads[2] not in (64, 128, 256) or heads[3] != heads[2]:
            raise ValueError(f"no kernel for query heads, kv heads and sizes of {heads}")
        lens = (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + last_page_len
        if len(qo_indptr) != len(kv_indptr) or len(lens) != len(kv_indptr) - 1:
            raise ValueError("indptr and last_page_len are not of one batch")
        if (last_page_len < 1).any() or (last_page_len > page_size).any() or int(kv_indptr[-1]) != len(kv_indices):
            raise ValueError("last_page_len is from 1 to the page size, and indptr ends with the number of indices")
        if self._use_cuda_graph and len(lens) != self._fixed_batch_size:
            raise ValueError("the batch size should be fixed in cudagraph mode")
        self._paged_kv_indptr_buf = self._stage(self._paged_kv_indptr_buf, kv_indptr)
        self._paged_kv_indices_buf = self._stage(self._paged_kv_indices_buf, kv_indices)
        self._paged_kv_last_page_len_buf = self._stage(self._paged_kv_last_page_len_buf, last_page_len)
        self._keep_plan(
            qo_indptr,
            lens,
            self._pinned,
            heads=heads,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            causal=causal,
            window_left=window_left,
            sm_scale=sm_scale,
            num_rows=int(qo_indptr[-1]),
        )

    def _run_pages(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        k_scale: float | None,
        v_scale: float | None,
    ) -> Any:
        planned = self._planned
        if planned is None:
            raise AssertionError("plan info is not initialized")
        k, v = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        if q.dtype != planned.q_dtype or k.dtype != planned.kv_dtype or v.dtype != planned.kv_dtype:
            raise ValueError(f"the dtype of q or k, {q.dtype} and {k.dtype}, does not match that of plan")
        if q.shape != (planned.num_rows, planned.heads[0], planned.heads[2]):
            raise ValueError(f"q is {tuple(q.shape)}, planned {planned.num_rows} rows of {planned.heads}")
        if k.shape[1:] != (planned.page_size, planned.heads[1], planned.heads[2]) or k.stride() != v.stride():
            raise ValueError(f"pages of {tuple(k.shape[1:])} with equal strides were planned otherwise")
        assert window_left is None or window_left == planned.window_left
        scale = q.shape[2] ** -0.5 if planned.sm_scale is None else planned.sm_scale
        scale *= 1.0 if k_scale is None else k_scale
        out = torch.empty_like(q) if out is None else out
        if out.shape != q.shape or out.dtype != q.dtype:
            raise ValueError("out has another shape or dtype than q")
        lse = torch.empty(q.shape[:2], dtype=torch.float32) if return_lse and lse is None else lse
        indptr, indices = self._paged_kv_indptr_buf, self._paged_kv_indices_buf
        assert indptr is not None and indices is not None
        workspace, mask = self._int_workspace_buffer, (planned.causal, planned.window_left)

        def kernel() -> None:
            lens = read_plan(workspace)
            attend_paged(q, k, v, lens, indptr, indices, scale, *mask, out=out, lse=lse)

        reads = [self._float_workspace_buffer, workspace, q, k, v, indptr, indices, self._paged_kv_last_page_len_buf]
        self._launch(kernel, reads, scale, *mask, planned.num_rows)
        if v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
            whole, factor = out, v_scale
            self._launch(lambda: whole.mul_(factor), [], factor)
        return (out, lse) if return_lse else out


def stand_in(dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)) -> Any:
    """Return what `import flashinfer` gives, and a stream of its own: `stream`, `Event()`, `Graph(call)`."""
    from tests.flashinfer_stand_in_ragged import BatchRagged
    from tests.flashinfer_stand_in_wrappers import BatchDecode, BatchMLA, BatchPrefill, MLAPlanMetadata, Modules

    stream, modules = Stream(dtypes), Modules()
    wrappers = {
        "BatchDecodeWithPagedKVCacheWrapper": BatchDecode,
        "BatchPrefillWithPagedKVCacheWrapper": BatchPrefill,
        "BatchMLAPagedAttentionWrapper": BatchMLA,
        "BatchPrefillWithRaggedKVCacheWrapper": BatchRagged,
    }

    def merge_state_in_place(
        v: torch.Tensor,
        s: torch.Tensor,
        v_other: torch.Tensor,
        s_other: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        if s.dtype != torch.float32 or s_other.dtype != torch.float32:
            raise ValueError("sums of another dtype are copied, and not changed in place")
        assert mask is None and v.is_contiguous() and s.is_contiguous(), "not in the stand-in"
        stream.enqueue(lambda: merge(v, s, v_other, s_other))

    return SimpleNamespace(
        **{name: type(name, (wrapper,), {"stream": stream}) for name, wrapper in wrappers.items()},
        mla=SimpleNamespace(MLAPlanMetadata=MLAPlanMetadata),
        merge_state_in_place=merge_state_in_place,
        utils=modules,
        jit=modules,
        stream=stream,
        Event=lambda: Event(stream),
        Graph=lambda call: Graph(stream, call),
    )
