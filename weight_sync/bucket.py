"""The flattened bucket: many tensors as one uint8 tensor, bytes end to end in list order, without padding.

This is SGLang's `flattened_bucket` layout.  Because nothing is padded, a tensor can be a view of the bucket only if its
offset is a multiple of its item size; that always holds when larger item sizes come first.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from weight_sync.errors import WeightRequestError
from weight_sync.tensor_meta import TensorMeta, dtype_name

_SHAPE = operator.attrgetter("shape")
_ONE_THREAD = 32767
"""Elements that torch copies without a parallel region."""
_SMALL = 1 << 20
"""Elements up to which more threads gain less than a parallel region may cost."""
_STAGED = 1 << 22
"""Elements that are joined on a device at a time, to be cast or to go to another device."""
_EQUAL_RUN = 8
"""Tensors of one shape in a row that are worth a call of their own: torch joins equal shapes for half the price."""


def plan_buckets(metas: Sequence[TensorMeta], bucket_bytes: int) -> list[list[TensorMeta]]:
    """Split tensors into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    Larger item sizes first, otherwise in the order given, so that every bucket can be packed.
    """
    if bucket_bytes <= 0:
        raise WeightRequestError(f"bucket_bytes must be positive, got {bucket_bytes}")
    return runs_of(sorted(metas, key=lambda meta: -meta.dtype.itemsize), bucket_bytes)


def runs_of(metas: Iterable[TensorMeta], num_bytes: int) -> list[list[TensorMeta]]:
    """Return consecutive tensors of at most `num_bytes` together, at least one each."""
    return _cut(metas, lambda run, filled, meta, size: filled + size > num_bytes)


def cut_pieces(metas: Sequence[TensorMeta], piece_bytes: int) -> list[list[TensorMeta]]:
    """Cut a bucket's tensors, in order, into pieces of at most `piece_bytes`; a larger tensor is a piece of its own.

    A piece that is a quarter full ends where a run of tensors of one shape begins that fills a quarter, too: they are
    often parts of one tensor, and then a piece lies in the sender's memory as it is sent.  Shorter runs go on in the
    piece, as each piece costs either side as much as many small tensors.
    """
    runs = [list(run) for _, run in itertools.groupby(metas, _SHAPE)]
    long = {id(run[0]) for run in runs if 4 * sum(meta.nbytes for meta in run) >= piece_bytes}

    def is_over(piece: list[TensorMeta], filled: int, meta: TensorMeta, size: int) -> bool:
        return filled + size > piece_bytes or (4 * filled >= piece_bytes and id(meta) in long)

    return _cut(metas, is_over)


def cut_packed(metas: Sequence[TensorMeta], buffer_bytes: int) -> list[list[TensorMeta]]:
    """Cut tensors, in order, as vLLM's senders pack them: the one that makes a buffer longer than that is its last."""
    return _cut(metas, lambda buffer, filled, meta, size: filled > buffer_bytes)


def _cut(
    metas: Iterable[TensorMeta], is_over: Callable[[list[TensorMeta], int, TensorMeta, int], bool]
) -> list[list[TensorMeta]]:
    """Cut into runs.  `is_over(run, bytes of the run, next tensor, its bytes)`: whether that begins another run."""
    runs: list[list[TensorMeta]] = []
    filled = 0
    for meta in metas:
        size = meta.nbytes
        if not runs or is_over(runs[-1], filled, meta, size):
            runs.append([])
            filled = 0
        runs[-1].append(meta)
        filled += size
    return runs


def end_to_end(tensors: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return the bytes of tensors that lie end to end in one storage, uint8, a view; None where they do not.

    They must be of `dtype` and on `device`, and not all be empty.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return None
    sizes = [tensor.nbytes for tensor in tensors]
    start, total = tensors[0].data_ptr(), sum(sizes)
    if tensors[-1].data_ptr() + sizes[-1] != start + total:
        return None
    for tensor, address in zip(tensors, itertools.accumulate(sizes, initial=start)):
        is_next = tensor.data_ptr() == address and tensor.is_contiguous()
        if not (is_next and tensor.dtype == dtype and tensor.device == device):
            return None
    storage = tensors[0].untyped_storage()
    first = start - storage.data_ptr()
    if first + total > storage.nbytes():
        return None  # neighbours in memory, by chance, of several storages
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[first : first + total]


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


def pack(named_tensors: Sequence[tuple[str, torch.Tensor]], room: torch.Tensor | None = None) -> torch.Tensor:
    """Pack tensors into one uint8 tensor [bytes]: `room`, or a new one on their device.

    Raises `WeightRequestError` when not aligned.
    """
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]
    device = named_tensors[0][1].device if named_tensors else torch.device("cpu")
    total, start = check_alignment(metas), 0
    bucket = torch.empty(total, dtype=torch.uint8, device=device) if room is None else room
    for meta, (_, tensor) in zip(metas, named_tensors, strict=True):
        copy_into(bucket[start : start + meta.nbytes].view(meta.dtype).view(meta.shape), tensor)
        start += meta.nbytes
    return bucket


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one of its shape, whose dtype it takes.

    Small ones on a CPU are copied on this thread: where cores are busy, a parallel region waits until its threads run.
    """
    on_cpu = target.device.type == source.device.type == "cpu"
    if not (on_cpu and _ONE_THREAD < source.numel() <= _SMALL and source.is_contiguous() and target.is_contiguous()):
        target.copy_(source)
    elif target.dtype == source.dtype:
        _copy_bytes(target, [source])
    else:
        for some, wanted in zip(target.view(-1).split(_ONE_THREAD), source.view(-1).split(_ONE_THREAD)):
            some.copy_(wanted)


def _copy_bytes(target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Copy contiguous tensors end to end on the CPU, on this thread, while other threads of Python run.

    torch takes a parallel region for tensors of this size.
    """
    sizes = [source.nbytes if source.is_contiguous() else -1 for source in sources]
    assert target.is_contiguous() and min(sizes) >= 0 and sum(sizes) == target.nbytes, "the same bytes, in one run each"
    place = target.data_ptr()
    for source, size in zip(sources, sizes):
        ctypes.memmove(place, source.data_ptr(), size)
        place += size


class _Copy(NamedTuple):
    """One call of a `PackPlan`: tensors `first` .. `last - 1` go to elements `start` .. `stop - 1`."""

    first: int
    last: int
    start: int
    stop: int
    way: Literal["join", "each", "cast", "alone"]


class PackPlan:
    """Copies contiguous tensors of one dtype and device end to end, by calls that are chosen once from their shapes.

    Holds no tensor.  `source`, `target`: the dtypes of the tensors, and of the room that they go to.  `devices`: where
    the tensors are, and the room.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        source: torch.dtype,
        target: torch.dtype,
        devices: tuple[torch.device, torch.device],
    ) -> None:
        self._source, self._device = source, devices[0]
        on_cpu = devices[0].type == devices[1].type == "cpu"
        if source == target and devices[0] == devices[1]:
            self._copies = _joined(shapes, on_cpu)
        else:
            self._copies = _staged(shapes, _ONE_THREAD if on_cpu else _STAGED)
        self._rows = [_rows(shapes[copy.first : copy.last]) for copy in self._copies]
        self._scratch = max((copy.stop - copy.start for copy in self._copies if copy.way == "cast"), default=0)

    def pack(self, tensors: Sequence[torch.Tensor], room: torch.Tensor) -> None:
        """Copy `tensors`, of the planned shapes, into `room`, which is flat and of the target's dtype."""
        scratch = torch.empty(self._scratch, dtype=self._source, device=self._device)
        for (first, last, start, stop, way), rows in zip(self._copies, self._rows, strict=True):
            if way == "alone":
                copy_into(room[start:stop], tensors[first].view(-1))
                continue
            some, joined = list(tensors[first:last]), scratch[: stop - start] if way == "cast" else room[start:stop]
            if way == "each":
                _copy_bytes(joined, some)
            elif rows is None:
                torch.cat(list(map(torch.ravel, some)), out=joined)
            else:
                torch.cat(some, out=joined.view(rows))  # so that no view of each is made
            if way == "cast":
                room[start:stop].copy_(joined)


def _rows(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of tensors of one shape below one another; None for others, and for scalars."""
    first = shapes[0]
    return (len(shapes) * first[0], *first[1:]) if first and len(set(shapes)) == 1 else None


def _joined(shapes: Sequence[tuple[int, ...]], on_cpu: bool) -> list[_Copy]:
    """Cut tensors that are copied as they are: many in a call, longer runs of equal shapes apart from others."""
    copies: list[_Copy] = []
    first = start = 0
    takes_more = False  # the last copy is no such run
    for shape, run in itertools.groupby(shapes):
        count, size = len(list(run)), math.prod(shape)
        last, stop, is_run = first + count, start + count * size, count >= _EQUAL_RUN
        way: Literal["join", "each"] = "each" if on_cpu and _ONE_THREAD < size <= _SMALL else "join"
        if takes_more and not is_run and copies[-1].way == way:
            copies[-1] = copies[-1]._replace(last=last, stop=stop)
        else:
            copies.append(_Copy(first, last, start, stop, way))
        first, start, takes_more = last, stop, not is_run
    return copies


def _staged(shapes: Sequence[tuple[int, ...]], limit: int) -> list[_Copy]:
    """Cut tensors that are joined first, `limit` elements at a time; a larger one is copied by itself."""
    copies: list[_Copy] = []
    start = 0
    for at, size in enumerate(map(math.prod, shapes)):
        before = copies[-1] if copies and copies[-1].way == "cast" else None
        if size > limit:
            copies.append(_Copy(at, at + 1, start, start + size, "alone"))
        elif before and start + size - before.start <= limit:
            copies[-1] = before._replace(last=at + 1, stop=start + size)
        else:
            copies.append(_Copy(at, at + 1, start, start + size, "cast"))
        start += size
    return copies
