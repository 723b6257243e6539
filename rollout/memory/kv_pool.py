"""KV by slot: the tensors that hold it, the free list of slots, and the table of each request's slots.

A slot holds the keys and values of one token in all layers.  The pool also keeps, per slot, the weight epoch that wrote
it, so that the age of KV is always known.

Shapes: S slots, T tokens of a step, H_kv key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollout.core.errors import InvariantError, StartupError
from rollout.core.host_copy import to_device
from rollout.core.specs.layer_specs import KVKind, LatentKV, WindowKV


class KVScale(NamedTuple):
    """The factors of what a layer's pools hold in FP8: keys are k times it, values v times it.  Numbers of float32."""

    k: float = 1.0
    v: float = 1.0


class KVPool:
    """`k[layer]`: [S + 1, H_kv, key size], `v[layer]`: [S + 1, H_kv, value size].  They keep their addresses.

    Values may be a part of the keys, in the same memory.  A layer that keeps no KV has empty tensors.  With
    `num_window_slots`, layers with a window have that many slots of their own instead.  The last slot, `padding_slot`
    or `window_padding_slot`, belongs to no request: padding rows of a captured step write there.

    `layers` are as given.  `dtype` is the dtype of queries and of results.  Keys and values are held in `stored`, by
    default the same.
    `scales` are of the layers, by default 1.  They never change: slots that were written keep their meaning, and
    captured steps the numbers that they were captured with.
    """

    def __init__(
        self,
        num_slots: int,
        layers: Sequence[KVKind | None],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_window_slots: int | None = None,
        stored: torch.dtype | None = None,
        scales: Sequence[KVScale] | None = None,
    ) -> None:
        self.dtype, self.stored, self.layers = dtype, stored or dtype, tuple(layers)
        self.scales = (KVScale(),) * len(layers) if scales is None else tuple(scales)
        assert len(self.scales) == len(layers), "a scale for each layer"
        assert scales is None or self.stored == torch.float8_e4m3fn or set(self.scales) <= {KVScale()}, "not in FP8"
        self.padding_slot = num_slots
        self.window_padding_slot = apart = num_slots if num_window_slots is None else num_window_slots
        counts = [1 + (apart if isinstance(x, WindowKV) else num_slots) for x in layers]
        both = [_empty(x, count, self.stored, device) for x, count in zip(layers, counts, strict=True)]
        self.k, self.v = [keys for keys, _ in both], [values for _, values in both]
        self._epoch = np.empty(num_slots, dtype=np.int32)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that take memory, each once."""
        apart = [v for k, v in zip(self.k, self.v, strict=True) if v.data_ptr() != k.data_ptr()]
        return [tensor for tensor in (*self.k, *apart) if tensor.numel()]

    def stamp(self, slots: torch.Tensor, weight_epoch: int) -> None:
        """Note that the step being launched writes `slots` [T], on the host, under `weight_epoch`."""
        self._epoch[slots.numpy()] = weight_epoch

    def epochs(self, slots: np.ndarray) -> np.ndarray:
        """Return the weight epochs int32 that wrote `slots`."""
        epochs: np.ndarray = self._epoch[slots]
        return epochs


def _empty(
    layer: KVKind | None, num_slots: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    if layer is None:
        nothing = torch.empty((num_slots, 0, 0), dtype=dtype, device=device)
        return nothing, nothing
    keys = torch.empty((num_slots, layer.num_heads, layer.key_size), dtype=dtype, device=device)
    if layer.values_in_keys:
        return keys, keys[..., : layer.value_size]
    return keys, torch.empty((num_slots, layer.num_heads, layer.value_size), dtype=dtype, device=device)


def stored_dtype(setting: str, dtype: torch.dtype, layers: Sequence[KVKind | None]) -> torch.dtype:
    """Return the dtype in which the KV of a model of `dtype` is held, by the setting `--kv-cache-dtype`.

    Raises `StartupError` for another dtype than the model's that is not FP8, and for FP8 with latents.
    """
    if setting == "auto":
        return dtype
    if setting == "fp8_e4m3":
        if any(isinstance(layer, LatentKV) for layer in layers):
            raise StartupError(
                "--kv-cache-dtype fp8_e4m3: this model keeps latents, which are held in the model's dtype only"
            )
        return torch.float8_e4m3fn
    if getattr(torch, setting) != dtype:
        raise StartupError(f"--kv-cache-dtype {setting}: KV has the model's dtype, {str(dtype)[6:]}, or is fp8_e4m3")
    return dtype


def kv_bytes_per_token(layers: Sequence[KVKind | None], dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token over all `layers`, held in `dtype`."""
    return sum(layer.elements_per_token for layer in layers if layer is not None) * dtype.itemsize


def slot_table_bytes(max_requests: int, max_context: int, num_tables: int) -> int:
    """Return the bytes of slot tables on a device, and the most that attention takes for the slots in them.

    A table has int64 slots.  Attention takes int32 ones twice, for prompts and for captured steps: at most a row of the
    longest context for each request.
    """
    return num_tables * max_requests * max_context * (torch.int64.itemsize + 2 * torch.int32.itemsize)


_FREE, _HELD, _CACHED = 0, 1, 2  # holder of a slot: none, a request, the prefix cache
_ONE_BYTE = (b"\0", b"\1", b"\2")  # each of them


class SlotAllocator:
    """A stack of free slot numbers, preallocated.  Slots are handed out, kept and returned on the host.

    Every slot is at any time in exactly one place: here, in the prefix cache, or private to one request.  Each change
    of place is checked, as KV in two places makes wrong tokens without an error.  The check is one pass over the moved
    slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = num_slots
        self._place = np.full(num_slots, _FREE, dtype=np.uint8)
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        """The number of slots that requests hold."""
        return self.num_slots - self._num_free - self.num_cached

    def alloc(self, count: int) -> torch.Tensor:
        """Take `count` free slots [count] int64.  The caller has checked `count <= num_free`."""
        assert 0 <= count <= self._num_free, (count, self._num_free)
        slots = self._stack[self._num_free - count : self._num_free].copy()
        self._move(slots, _FREE, _HELD)
        self._num_free -= count
        return torch.from_numpy(slots)

    def keep(self, slots: torch.Tensor) -> None:
        """Move `slots` [n] int64 from a request to the prefix cache.  Raises `InvariantError`."""
        self._move(slots.numpy(), _HELD, _CACHED)
        self.num_cached += slots.shape[0]

    def free(self, slots: torch.Tensor) -> None:
        """Return slots [n] int64 of a request to the free list.  Raises `InvariantError`."""
        self._move(slots.numpy(), _HELD, _FREE)
        self._push(slots)

    def free_cached(self, slots: torch.Tensor) -> None:
        """Return slots [n] int64 of the prefix cache to the free list.  Raises `InvariantError`."""
        self._move(slots.numpy(), _CACHED, _FREE)
        self.num_cached -= slots.shape[0]
        self._push(slots)

    def free_slots(self) -> torch.Tensor:
        """Copy the free slots, for integrity checks."""
        return torch.from_numpy(self._stack[: self._num_free].copy())

    def _push(self, slots: torch.Tensor) -> None:
        count = slots.shape[0]
        self._stack[self._num_free : self._num_free + count] = slots.numpy()
        self._num_free += count

    def _move(self, slots: np.ndarray, source: int, target: int) -> None:
        places = self._place.take(slots)
        if places.tobytes() != _ONE_BYTE[source] * len(slots):
            misplaced = np.count_nonzero(places != source)
            names = ("free", "a request's", "the prefix cache's")
            raise InvariantError(
                f"{misplaced} of {len(slots)} KV slots are not {names[source]}, but change to {names[target]}"
            )
        self._place[slots] = target


class NewestTokens:
    """The token that was sampled last for each request row, which the next step reads without a copy to the host.

    The tokens that were put last are written to the table only when other rows are put or read.  So while the same
    requests decode, the tokens of one step are the input of the next one, without a copy.
    """

    def __init__(self, max_requests: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._table = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._tokens = self._rows

    def put(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Enter a token for each of the distinct rows [n].  The caller changes neither tensor later."""
        if rows is not self._rows:
            self._table.index_copy_(0, self._rows, self._tokens)
        self._rows, self._tokens = rows, token_ids

    def get(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tokens of `rows` [n], which the caller must not change."""
        if rows is self._rows:
            return self._tokens
        self._table.index_copy_(0, self._rows, self._tokens)
        return self._table.index_select(0, rows)


class ReqToTokenPool:
    """The slot table: each row belongs to one request while it holds KV.

    `table` [max_requests + 1, max_context] int64: the KV slot of each position, as a step on the device reads it.
    `host_table` is a copy for the host, which never reads the device's; on a CPU both are one tensor.  The last row,
    `padding_row`, belongs to no request: its one token has the KV slot `padding_slot`.
    """

    def __init__(
        self, max_requests: int, max_context: int, padding_slot: int, device: torch.device | str = "cpu"
    ) -> None:
        # empty, not zeros: rows that are never used never take memory
        self.host_table = torch.empty((max_requests + 1, max_context), dtype=torch.int64)
        self._host_array = self.host_table.numpy()  # the same memory: an index by numpy takes a fifth of the time
        self.is_apart = torch.device(device).type != "cpu"
        self.table = torch.empty_like(self.host_table, device=device) if self.is_apart else self.host_table
        self.padding_row = max_requests
        self._padding_slot = padding_slot
        self.enter_padding()
        self.newest_tokens = NewestTokens(max_requests, device)
        self._free_rows = list(range(max_requests - 1, -1, -1))
        self._is_free = bytearray(b"\1") * max_requests

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def alloc(self) -> int:
        """Take a free row.  The caller has checked `num_free`."""
        row = self._free_rows.pop()
        self._is_free[row] = False
        return row

    def enter_padding(self) -> None:
        """Set the slot of the padding row.  Called at first, and after the table's memory was released."""
        self.enter_span(self.padding_row, 0, torch.tensor([self._padding_slot]))

    def span(self, row: int, start: int, end: int) -> np.ndarray:
        """Return a view of the slots of positions `start .. end - 1` of a row, in the host's table."""
        slots: np.ndarray = self._host_array[row, start:end]
        return slots

    def enter_span(self, row: int, start: int, slots: torch.Tensor) -> None:
        """Set the slots [n] of the positions `start ..` of a row, on the host and on the device."""
        end = start + slots.shape[0]
        self._host_array[row, start:end] = slots.numpy()
        if self.is_apart and end > start:
            self.table[row, start:end] = to_device(slots, self.device)

    def enter_ahead(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Set the slots of later steps on the host; each step copies its own slots to the device.

        All tensors are int64, and the shapes of `rows` and `positions` broadcast to the shape of `slots`.
        """
        self.host_table.index_put_((rows, positions), slots)

    def enter_each(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Set one slot for each pair of a row and a position, on the host and on the device: all int64 [n]."""
        self.host_table.index_put_((rows, positions), slots)
        if self.is_apart:
            rows, positions, slots = to_device(torch.stack([rows, positions, slots]), self.device).unbind()
            self.table.index_put_((rows, positions), slots)

    def free(self, row: int) -> None:
        """Free a row.  Raises `InvariantError` if it is free already."""
        if self._is_free[row]:
            raise InvariantError(f"row {row} of the slot table was freed twice")
        self._is_free[row] = True
        self._free_rows.append(row)
