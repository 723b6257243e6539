"""`Source`: the trainer's tensors of one refresh, and `SourceForm`, by which a plan for them is known again."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from weight_sync.sender.plan import NamedTensors, TensorSource, sent_name, untied


class Source:
    """`names` and `tensors` as they were given; `is_state`: by a model or state dict, of which tied tensors go once.

    `locals`: what of the tensors lies on this rank.
    """

    def __init__(self, source: TensorSource) -> None:
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


@dataclass(frozen=True)
class SourceForm:
    """All that a plan follows from: equal forms have equal plans, wherever the tensors lie.

    `strides`: of the tensors that are not contiguous, by number.  `ties`: the first tensor at the place of each one.
    """

    is_state: bool
    names: list[str]
    kinds: list[type]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    devices: list[torch.device]
    strides: dict[int, tuple[int, ...]]
    ties: bytes
    shards: list[Any]

    @classmethod
    def of(cls, source: Source) -> SourceForm:
        """Ask the tensors for their form, by a few calls of C for each."""
        tensors, here = source.tensors, source.locals
        lying = [number for number, lies in enumerate(map(torch.Tensor.is_contiguous, here)) if not lies]
        return cls(
            source.is_state,
            source.names,
            list(map(type, tensors)),
            list(map(operator.attrgetter("shape"), tensors)),
            list(map(operator.attrgetter("dtype"), tensors)),
            list(map(operator.attrgetter("device"), here)),
            {number: here[number].stride() for number in lying},
            _ties(source).tobytes() if source.is_state else b"",
            [_shard(*pair) for pair in zip(tensors, here)] if source.is_sharded else [],
        )

    def interned(self) -> SourceForm:
        """Return the same form in less memory: equal shapes and devices are one object."""
        shapes: dict[torch.Size, torch.Size] = {}
        devices: dict[torch.device, torch.device] = {}
        return SourceForm(
            **vars(self)
            | {
                "shapes": [shapes.setdefault(shape, shape) for shape in self.shapes],
                "devices": [devices.setdefault(device, device) for device in self.devices],
            }
        )


def _ties(source: Source) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of the first tensor at the place of each one, int64 [n]: by address, and by storage of shards,
    as an empty one has no address.
    """
    here = source.locals
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


def _shard(tensor: torch.Tensor, local: torch.Tensor) -> Any:
    """Return what of a tensor's form only a sharded one has.  Placements of two types may be equal."""
    if not isinstance(tensor, DTensor):
        return None
    return local.shape, tensor.placements, tuple(map(type, tensor.placements)), tensor.device_mesh
