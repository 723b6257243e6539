"""The flattened bucket: many tensors as one uint8 tensor, bytes end to end in list order, without padding.

This is SGLang's `flattened_bucket` layout.  Because nothing is padded, a tensor can be a view of the bucket only if its
offset is a multiple of its item size; that always holds when larger item sizes come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import TensorMeta, dtype_name

_ONE_THREAD = 32767
"""Elements that torch copies without a parallel region."""
_SMALL = 1 << 20
"""Elements up to which more threads gain less than a parallel region may cost."""


def plan_buckets(metas: Sequence[TensorMeta], bucket_bytes: int) -> list[list[TensorMeta]]:
    """Split tensors into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Larger item sizes first, otherwise in the order given, so that every bucket can be packed.
    """
    if bucket_bytes <= 0:
        raise WeightRequestError(f"bucket_bytes must be positive, got {bucket_bytes}")
    return runs_of(sorted(metas, key=lambda meta: -meta.dtype.itemsize), bucket_bytes)


def runs_of(metas: Iterable[TensorMeta], num_bytes: int) -> list[list[TensorMeta]]:
    """Return consecutive tensors of at most `num_bytes` together, at least one each."""
    return _cut(metas, lambda run, filled, meta: filled + meta.nbytes > num_bytes)


def cut_pieces(metas: Sequence[TensorMeta], piece_bytes: int) -> list[list[TensorMeta]]:
    """Cut a bucket's tensors, in order, into pieces of at most `piece_bytes`; a larger tensor is a piece of its own.

    Where tensors of another shape begin, a piece that is a quarter full ends: tensors of one shape are often parts of
    one tensor, and then a piece lies in the sender's memory as it is sent.
    """

    def is_over(piece: list[TensorMeta], filled: int, meta: TensorMeta) -> bool:
        is_other = meta.shape != piece[-1].shape and piece_bytes - filled <= piece_bytes * 3 // 4
        return is_other or filled + meta.nbytes > piece_bytes

    return _cut(metas, is_over)


def cut_packed(metas: Sequence[TensorMeta], buffer_bytes: int) -> list[list[TensorMeta]]:
    """Cut tensors, in order, as vLLM's senders pack them: the one that makes a buffer longer than that is its last."""
    return _cut(metas, lambda buffer, filled, meta: filled > buffer_bytes)


def _cut(
    metas: Iterable[TensorMeta], is_over: Callable[[list[TensorMeta], int, TensorMeta], bool]
) -> list[list[TensorMeta]]:
    """Cut into runs.  `is_over(run, bytes of the run, next tensor)`: whether the next one begins another run."""
    runs: list[list[TensorMeta]] = []
    filled = 0
    for meta in metas:
        if not runs or is_over(runs[-1], filled, meta):
            runs.append([])
            filled = 0
        runs[-1].append(meta)
        filled += meta.nbytes
    return runs


def end_to_end(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return the bytes of tensors that lie end to end in one storage, uint8, a view; None where they do not.

    They must be of `dtype` and on `device`, and not all be empty.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return None
    storage = tensors[0].untyped_storage()
    start = address = tensors[0].data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == address and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not (is_next and tensor.is_contiguous() and tensor.dtype == dtype and tensor.device == device):
            return None
        address += tensor.nbytes
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return whole[start - storage.data_ptr() : address - storage.data_ptr()]


def check_alignment(metas: Sequence[TensorMeta]) -> int:
    """Return the total bytes of a bucket.  Raises `WeightRequestError` for a tensor whose offset its dtype cannot be
    read from.
    """
    offset = 0
    for meta in metas:
        if offset % meta.dtype.itemsize:
            raise WeightRequestError(
                f"bucket is not aligned: {meta.name} ({dtype_name(meta.dtype)}) would start at byte {offset}. "
                "Put tensors of larger item size first, or send each dtype in its own bucket."
            )
        offset += meta.nbytes
    return offset


def pack(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Pack tensors into one uint8 tensor [bytes] on their device.  Raises `WeightRequestError` when not aligned."""
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]
    device = named_tensors[0][1].device if named_tensors else torch.device("cpu")
    bucket = torch.empty(check_alignment(metas), dtype=torch.uint8, device=device)
    for (_, view), (_, tensor) in zip(unpack(bucket, metas), named_tensors, strict=True):
        copy_into(view, tensor)
    return bucket


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one of its shape, whose dtype it takes.

    Small ones on a CPU are copied on this thread: where cores are busy, a parallel region waits until its threads run.
    """
    on_cpu = target.device.type == source.device.type == "cpu"
    if on_cpu and _ONE_THREAD < source.numel() <= _SMALL and source.is_contiguous() and target.is_contiguous():
        for some, wanted in zip(target.view(-1).split(_ONE_THREAD), source.view(-1).split(_ONE_THREAD)):
            some.copy_(wanted)
    else:
        target.copy_(source)


def unpack(bucket: torch.Tensor, metas: Sequence[TensorMeta]) -> list[tuple[str, torch.Tensor]]:
    """Return views into `bucket` (uint8 [total bytes]), one per meta.

    Raises `WeightRequestError` when the bucket is not aligned or has another size than the metas add up to.
    """
    total = check_alignment(metas)
    if bucket.numel() != total:
        raise WeightRequestError(f"bucket has {bucket.numel()} bytes, but its tensors have {total} bytes in total")
    views = []
    offset = 0
    for meta in metas:
        view = bucket[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape)
        views.append((meta.name, view))
        offset += meta.nbytes
    return views
