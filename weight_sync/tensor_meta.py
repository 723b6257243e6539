"""Names, dtypes and shapes of logical tensors, and the seam between a model and everything that writes its weights.

A *logical* tensor is one that a checkpoint names (`model.layers.0.mlp.experts.3.gate_proj.weight`), however the engine
fuses, shards or replicates it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weight_sync.boxes import Box, parse_box, size_of
from weight_sync.errors import WeightRequestError, unquoted
from weight_sync.moves import Move

MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Convert `torch.bfloat16` to `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


class TensorMeta(NamedTuple):
    """Name, dtype and shape of a tensor, before or without its data.

    `box`: the part of it that is meant, such as what one message brings; None: all of it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the content: of the box, or of the whole."""
        return self.shape if self.box is None else size_of(self.box)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.dtype, self.shape, self.box)


@functools.lru_cache(maxsize=1024)
def _nbytes(dtype: torch.dtype, shape: tuple[int, ...], box: Box | None) -> int:
    """Return the bytes of a tensor or of a box of it; thousands of tensors have few shapes."""
    return math.prod(shape if box is None else size_of(box)) * dtype.itemsize


@dataclass(frozen=True, eq=False)
class BucketLayout:
    """Tensors or boxes of tensors, dense and in row-major order, each from byte `offsets` on of `num_bytes` bytes.

    A sender sends the same ones again and again.  A layout is one object for as long as the same lists come, so that
    what was worked out for it (`plan`) is found again.
    """

    metas: Sequence[TensorMeta]
    offsets: Sequence[int]
    num_bytes: int

    def views(
        self, content: torch.Tensor, places: Sequence[int] | None = None
    ) -> list[tuple[TensorMeta, torch.Tensor]]:
        """Return all tensors, or the ones at some places in the list, as views of the bucket, uint8 [num_bytes].

        Of a tensor that comes as a box, the view is the box.  A tensor that its dtype cannot be read from where it
        lies is copied.
        """
        found = []
        for place in range(len(self.metas)) if places is None else places:
            meta, start = self.metas[place], self.offsets[place]
            part = content[start : start + meta.nbytes]
            if part.data_ptr() % meta.dtype.itemsize or part.storage_offset() % meta.dtype.itemsize:
                part = part.clone()
            found.append((meta, part.view(meta.dtype).view(meta.sizes)))
        return found


class PackedBucket(NamedTuple):
    """One message as it came, uint8 [layout.num_bytes]."""

    layout: BucketLayout
    content: torch.Tensor

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return all tensors by name."""
        return [(meta.name, view) for meta, view in self.layout.views(self.content)]


Index = tuple[int | slice, ...]


class Piece(NamedTuple):
    """One logical tensor inside a tensor that came over the wire: `wire[index]`, or the transpose of that matrix.

    Index `()` is the whole; a fused `experts.gate_up_proj` [E, 2I, D] yields 2E pieces such as
    `(3, slice(0, I))` for `experts.3.gate_proj.weight`.
    """

    name: str
    index: Index = ()  # type: ignore[assignment]  # in the place of a tuple's `index`, which nothing calls
    transposed: bool = False

    @property
    def is_all(self) -> bool:
        """True if it is the wire tensor itself."""
        return self.index == () and not self.transposed

    def of(self, wire: torch.Tensor) -> torch.Tensor:
        """Return the logical tensor, a view."""
        content = wire[self.index]
        return content.mT if self.transposed else content

    def shape_in(self, wire_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the logical tensor's shape, inside a wire tensor of `wire_shape`."""
        sizes = []
        for dim, size in enumerate(wire_shape):
            picked = self.index[dim] if dim < len(self.index) else slice(None)
            if isinstance(picked, slice):
                sizes.append(len(range(size)[picked]))
        return tuple(reversed(sizes)) if self.transposed else tuple(sizes)


@dataclass(frozen=True)
class Region:
    """A part of a logical tensor: indices `start` .. `start + length - 1` of dimension `dim`.

    `sections` are sizes that make up the dimension, such as queries, keys and values in one matrix: the region is then
    that share of each of them, side by side.
    """

    dim: int
    start: int
    length: int
    sections: tuple[int, ...] = ()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor of the whole's shape: a view, but for that of several sections."""
        parts = [tensor[run.in_whole] for run in self.runs()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def runs(self) -> list[Run]:
        """Return the runs that lie together in the whole, ascending; at least one."""
        total, ends, at = sum(self.sections), 0, 0
        spans = [(self.start, self.length)]
        if self.sections:
            spans = []
            for size in self.sections:
                spans.append((ends + size * self.start // total, size * self.length // total))
                ends += size
        found = []
        for start, length in spans:
            found.append(Run(self._index(at, length), self._index(start, length)))
            at += length
        assert at == self.length, "a region has an equal share of each section"
        return found

    def _index(self, start: int, length: int) -> tuple[slice, ...]:
        return (*[slice(None)] * self.dim, slice(start, start + length))


class Run(NamedTuple):
    """`part[in_part]` is `whole[in_whole]`."""

    in_part: tuple[slice, ...]
    in_whole: tuple[slice, ...]


class Pair(NamedTuple):
    """Quantised elements [..., R, C], and a scale for each `block` of rows and columns, which their values do not show.

    Blocks at the lower and right edge are cut.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical tensor."""
        return tuple(self.weight.shape)

    def of(self, region: Region) -> Pair:
        """Return this part of the matrix.  Whole blocks make up the region, or reach beyond the edge of the matrix."""
        size, (start, length) = self.block[region.dim], (region.start, region.length)
        assert not region.sections and start % size == 0, region
        assert length % size == 0 or start + length == self.shape[region.dim], region
        of_scale = self.scale.narrow(region.dim, start // size, -(-length // size))
        return Pair(self.weight.narrow(region.dim, start, length), of_scale, self.block)


class Part(NamedTuple):
    """The part of a logical tensor that a place holds, or will hold: `content` is its `region`, or all of it."""

    region: Region | None
    content: torch.Tensor


class Place(Protocol):
    """The place where one logical tensor lives, or a part of it, in a storage of any layout.

    It stays valid as long as the storage: addresses never change.
    """

    @property
    def storage(self) -> torch.Tensor:
        """The tensor, or the view of one, that the content lies in."""

    @property
    def address(self) -> int:
        """The address of the whole storage behind `storage`."""

    @property
    def region(self) -> Region | None:
        """The part of the logical tensor that lives here; None: all of it."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the storage that are this content's."""

    def rebind(self, storage: torch.Tensor) -> Place:
        """Return the same place in another tensor, of the dtype, sizes and strides of `storage`."""

    def write(self, source: torch.Tensor | Pair) -> None:
        """Take the content of `source`, the whole logical tensor, cast to the storage's dtype.

        A pair comes only where pairs are held (`HeldFormat.pairs`), and is taken bit for bit.
        """

    def read(self) -> torch.Tensor:
        """Return the values here, bit for bit; a view where the layout allows, and never to be written to."""

    def saved(self) -> torch.Tensor | Pair:
        """Return all that is held here: what `read` gives, or a pair where its values do not determine it."""

    def restore(self, content: torch.Tensor | Pair) -> None:
        """Take what `saved` gave, here or at another place of the same tensor."""

    def moves(self, shape: Sequence[int], lead: int | None = None) -> list[Move] | None:
        """Return the moves that do what `write` does with a tensor of `shape`; None where only `write` can.

        The tensor is read as the matrix `matrix_of(shape, lead)`: rows are its first dimension, or for a region of
        dimension d > 0 its first d, so that a region is a box.  `lead` is that number where another place asks.
        """


class LogicalWeights(Protocol):
    """The interface of a model to cold load and live refresh; they see nothing else of it."""

    def metas(self) -> Mapping[str, TensorMeta]:
        """Return every logical tensor of the model by canonical name: the full coverage."""

    def split(self, wire: TensorMeta) -> list[Piece]:
        """Return the logical tensors inside a wire tensor, by any name the model accepts.

        Raises `UnknownTensorError`, `ShapeMismatchError` (never on dtype: the caller decides whether to cast).
        """

    def nearest(self, name: str) -> str | None:
        """Return the name that the model accepts and that a wrong one was meant to be, if one is like it.

        Takes milliseconds, whatever the number of names.
        """

    def write(self, name: str, source: torch.Tensor | Pair) -> None:
        """Copy logical tensor `name` to every place where it lives under the current placement.

        Storage addresses do not change.  `source` has the meta's shape; its dtype is cast to the parameter's.
        """

    def places(self, name: str) -> Sequence[Place]:
        """Return every place of logical tensor `name` on this rank under the current placement.

        All of them hold the same part.  None, where all of the tensor lives on other ranks.
        """

    def places_key(self) -> Hashable:
        """Return a key of where tensors live: while it is the same, `places` returns the same places."""

    def restore(self, name: str, content: torch.Tensor | Pair) -> None:
        """Copy to every place of this rank what `saved` of one of them gave."""

    def recompute_derived(self) -> None:
        """Bring tensors that are computed from weights (none in most models) up to date."""


def parts_of(weights: LogicalWeights, name: str) -> list[Part]:
    """Return what every place of logical tensor `name` on this rank holds now; never to be written to."""
    return [Part(place.region, place.read()) for place in weights.places(name)]


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes in row-major order, uint8 [nbytes], in host memory; a view where possible."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


# --- parsing of names, dtypes and shapes in control calls ----------------------------------------------------------

Lists = tuple[Sequence[str], Sequence[str], Sequence[Sequence[int]], Sequence[object] | None]
"""Names, dtypes, shapes and boxes, in parallel lists; boxes None: all tensors are whole."""


def parse_dtype(text: str) -> torch.dtype:
    """Parse `"bfloat16"` or `"torch.bfloat16"`.  Raises `WeightRequestError` for a name that is not in `DTYPES`."""
    dtype = DTYPES.get(text.removeprefix("torch.")) if isinstance(text, str) else None
    if dtype is None:
        raise WeightRequestError(f"unknown dtype {text!r}; known: {', '.join(DTYPES)}")
    return dtype


class MetaParser:
    """A reader of announced tensors.  A call has few dtypes and shapes, and each pair of them is checked once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]] = {}

    def __call__(self, name: str, dtype: str, shape: Sequence[int]) -> TensorMeta:
        """Parse one tensor.  Raises `WeightRequestError` for a bad name or dtype, a negative or an absurd size."""
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise WeightRequestError(f"a tensor's name must be text of 1 to {MAX_NAME_LENGTH} characters")
        sizes = tuple(shape)
        try:
            known = self._known.get((dtype, sizes))
        except TypeError:  # something in it has no hash, and is neither text nor a number
            known = None
        if known is None:
            known = self._known[dtype, sizes] = _checked(name, dtype, sizes)
        return TensorMeta(name, *known)


def _checked(name: str, dtype: str, sizes: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise WeightRequestError(f"{unquoted(name)}: sizes must be whole numbers of at least 0, got {list(sizes)}")
    parsed = parse_dtype(dtype)
    if len(sizes) > MAX_DIMENSIONS or math.prod(sizes) > MAX_ELEMENTS:
        raise WeightRequestError(f"{unquoted(name)}: shape {list(sizes)} is out of range")
    return parsed, sizes


def parse_meta(name: str, dtype: str, shape: Sequence[int]) -> TensorMeta:
    """Parse an announced tensor.  Raises `WeightRequestError` for a bad name or dtype, a negative or absurd size."""
    return MetaParser()(name, dtype, shape)


def parse_metas(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    boxes: Sequence[object] | None = None,
) -> list[TensorMeta]:
    """Parse the parallel lists of `update_weights_from_distributed`.  Raises `WeightRequestError`.

    `boxes`: of each tensor [[start, stop], ...] in its shape, or None; None: all tensors are whole.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightRequestError(
            f"names, dtypes and shapes must be equally long, got {len(names)}, {len(dtypes)} and {len(shapes)}"
        )
    parse = MetaParser()
    metas = list(map(parse, names, dtypes, shapes))
    if boxes is None:
        return metas
    if len(boxes) != len(names):
        raise WeightRequestError(f"boxes and names must be equally long, got {len(boxes)} and {len(names)}")
    return [
        meta if box is None else meta._replace(box=parse_box(meta.name, meta.shape, box))
        for meta, box in zip(metas, boxes, strict=True)
    ]
