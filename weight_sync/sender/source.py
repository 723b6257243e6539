"""`Source`: the trainer's tensors of one refresh, and `SourceForm`, by which a plan for them is known again."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from weight_sync.sender.plan import NamedTensors, TensorSource, sent_name, untied

_SHAPE, _DTYPE, _DEVICE = map(operator.attrgetter, ("shape", "dtype", "device"))


class Source:
    """`names` and `tensors` as they were given; `is_state`: by a model or state dict, of which tied tensors go once.

    `locals`: what of the tensors lies on this rank.  `lacks`: why this rank cannot send them.
    """

    def __init__(self, source: TensorSource, lacks: Exception | None = None) -> None:
        self.lacks = lacks
        state = source.state_dict() if isinstance(source, torch.nn.Module) else source
        self.is_state = isinstance(state, Mapping)
        if isinstance(state, Mapping):
            self.names, self.tensors = list(state), list(state.values())
        else:
            named = list(state)
            self.names, self.tensors = [name for name, _ in named], [tensor for _, tensor in named]
        self.is_sharded = any(issubclass(kind, DTensor) for kind in set(map(type, self.tensors)))
        self.locals = self.tensors
        if self.is_sharded:
            with torch.no_grad():  # a tensor that is asked for its local part in a graph gets a new one
                self.locals = [it.to_local() if isinstance(it, DTensor) else it for it in self.tensors]

    def kept(self) -> list[int]:
        """Return the numbers of the tensors that are sent: all but those tied to an earlier one."""
        return untied(self.tensors) if self.is_state else list(range(len(self.tensors)))

    def named(self, numbers: list[int]) -> NamedTensors:
        """Return the tensors of these numbers, by the names that are sent."""
        names = [sent_name(name) for name in self.names] if self.is_state else self.names
        return [(names[number], self.tensors[number]) for number in numbers]

    def shardings(self) -> list[Hashable]:
        """Return `sharding_of` each tensor; empty where all are whole."""
        return list(map(sharding_of, self.tensors, self.locals)) if self.is_sharded else []


class SourceForm:
    """The form of a source, from which its plan follows: sources of one form have one, wherever their tensors lie."""

    def __init__(self, source: Source) -> None:
        self._names = source.names
        shapes: dict[torch.Size, torch.Size] = {}  # equal ones are kept once
        devices: dict[torch.device, torch.device] = {}
        self._kinds = list(map(type, source.tensors))
        self._shapes = [shapes.setdefault(shape, shape) for shape in map(_SHAPE, source.tensors)]
        self._dtypes = list(map(_DTYPE, source.tensors))
        self._devices = [devices.setdefault(device, device) for device in map(_DEVICE, source.locals)]
        self._strides = _strides(source)
        self._ties = _ties(source)
        self._shards = source.shardings()

    def fits(self, source: Source) -> bool:
        """Return whether a source is of this form.

        A few calls of C ask each tensor, and no answer is kept: many objects at a time would call Python's garbage
        collector.
        """
        tensors, here = source.tensors, source.locals
        return (
            self._names == source.names
            and all(map(operator.is_, map(type, tensors), self._kinds))
            and all(map(operator.eq, map(_SHAPE, tensors), self._shapes))
            and all(map(operator.is_, map(_DTYPE, tensors), self._dtypes))
            and all(map(operator.eq, map(_DEVICE, here), self._devices))
            and self._strides == _strides(source)
            and np.array_equal(self._ties, _ties(source))
            and self._shards == source.shardings()
        )


def _strides(source: Source) -> dict[int, tuple[int, ...]]:
    """Return the strides of the tensors that are not contiguous, by number."""
    dense = map(torch.Tensor.is_contiguous, source.locals)
    return {number: source.locals[number].stride() for number, is_dense in enumerate(dense) if not is_dense}


def _ties(source: Source) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of the first tensor at the place of each one, int64 [n]: by address, and by storage of shards,
    as an empty one has no address.

    Only a state has ties: tensors and names of other sources are sent as they are given.
    """
    here = source.locals if source.is_state else []
    count = len(here)
    if source.is_sharded:
        storages = map(operator.attrgetter("_cdata"), map(torch.Tensor.untyped_storage, here))
        offsets = map(torch.Tensor.storage_offset, here)
        places = np.stack([np.fromiter(numbers, np.int64, count) for numbers in (storages, offsets)], 1)
        _, firsts, ties = np.unique(places, axis=0, return_index=True, return_inverse=True)
    else:
        addresses = np.fromiter(map(torch.Tensor.data_ptr, here), np.int64, count)
        _, firsts, ties = np.unique(addresses, return_index=True, return_inverse=True)
    return firsts[ties.reshape(-1)].astype(np.int64)


def sharding_of(tensor: torch.Tensor, here: torch.Tensor) -> Hashable:
    """Return how a tensor of its shape is sharded; None for a whole one.  `here`: what of it lies on this rank.

    Some releases of torch call placements of two types equal.
    """
    if not isinstance(tensor, DTensor):
        return None
    return here.shape, tensor.placements, tuple(map(type, tensor.placements)), tensor.device_mesh
