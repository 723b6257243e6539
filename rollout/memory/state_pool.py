"""Recurrent states by row: the tensors that hold them, and the holders of the rows that are snapshots.

    rows   0 .. requests - 1     requests ..
           of the request in     snapshots: free, of a request that runs, or kept by a node of the prefix tree,
           that row of slots     as the state after a prefix; the tree's are dropped when rows are short

A request that runs has the row of its number in the slot table, so that every admitted request has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from rollout.core.errors import InvariantError, StartupError
from rollout.core.specs.layer_specs import RecurrentState


class StatePool:
    """By hidden layer, `conv[layer]` [R, w - 1, C] in the model's dtype, and `state[layer]` [R, H, dk, dv] in float32.

    States are float64 for a float64 model.  A layer without a recurrent state has empty tensors.  All tensors keep
    their addresses.
    """

    def __init__(
        self,
        num_rows: int,
        layers: Sequence[RecurrentState | None],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_rows = num_rows
        kinds = [layer or RecurrentState(0, 1, 0, 0, 0) for layer in layers]
        work = torch.promote_types(dtype, torch.float32)
        self.conv = [
            torch.empty((num_rows, x.conv_size - 1, x.conv_channels), dtype=dtype, device=device) for x in kinds
        ]
        self.state = [
            torch.empty((num_rows, x.num_heads, x.key_dim, x.value_dim), dtype=work, device=device) for x in kinds
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (*self.conv, *self.state) if tensor.numel()]

    def copy(self, source: int, target: int) -> None:
        """Copy the states of a row to another one."""
        for tensor in self.tensors:
            tensor[target] = tensor[source]


def state_bytes_per_row(layers: Sequence[RecurrentState | None], dtype: torch.dtype) -> int:
    """Return the bytes of the state of one sequence over all layers; 0 if no layer has one."""
    return sum(layer.bytes(dtype) for layer in layers if layer is not None)


def num_state_rows(wanted: int | None, max_running_requests: int, row_bytes: int, available_bytes: int) -> int:
    """Return the number of state rows: `wanted`, or one for each request that may run and as many for snapshots.

    Raises `StartupError` for fewer rows than requests may run, or more than fit into memory.
    """
    rows = 2 * max_running_requests if wanted is None else wanted
    if rows < max_running_requests:
        raise StartupError(
            f"--max-state-rows {rows}: every running request needs one; give at least {max_running_requests} "
            "(--max-running-requests) and some more for snapshots"
        )
    if rows * row_bytes > available_bytes:
        raise StartupError(
            f"{rows} recurrent states of {row_bytes / 2**20:.1f} MiB do not fit into "
            f"{available_bytes / 2**20:.0f} MiB: lower --max-running-requests or --max-state-rows"
        )
    return rows


class Keeper(Protocol):
    """A node of the prefix tree: `states` maps a number of its tokens to the row of the state after them."""

    states: dict[int, int]
    pin_count: int


class SnapshotRows:
    """Owner of the free rows among `first .. first + count - 1`, which neither a request nor a node has.

    `on_drop(keeper)` is called when `take` has dropped a snapshot of `keeper`.
    """

    def __init__(self, first: int, count: int) -> None:
        self.on_drop: Callable[[Any], None] | None = None
        self.first, self.num_rows = first, count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._is_free = bytearray(b"\1") * (first + count)  # by row: a state in two places shows no other error
        self._kept: OrderedDict[int, Keeper] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self, *, drops: bool, but: Collection[int] = (), even_pinned: bool = False) -> int | None:
        """Return a row, or None if there is none.

        With `drops`, the least recently used row of the tree may be dropped, but no row in `but`.  Rows that a session
        pins may be dropped only with `even_pinned`.
        """
        if self._free:
            row = self._free.pop()
            self._is_free[row] = False
            return row
        for row, keeper in self._kept.items() if drops else ():
            if row not in but and (even_pinned or keeper.pin_count == 0):
                offset = next(offset for offset, kept in keeper.states.items() if kept == row)
                del keeper.states[offset], self._kept[row]
                if self.on_drop is not None:
                    self.on_drop(keeper)
                return row
        return None

    def keep(self, row: int, keeper: Keeper, offset: int) -> bool:
        """Give a taken row to `keeper` and return True.

        If `keeper` has a state at `offset` already, returns False, and `row` stays the caller's.  Raises
        `InvariantError` for a row that was not taken, or that a node has.
        """
        if self._is_free[row] or row in self._kept:
            raise InvariantError(f"row {row} of states goes to the prefix cache but belongs to no request")
        if offset in keeper.states:
            return False
        keeper.states[offset] = row
        self._kept[row] = keeper
        return True

    def keeps(self, row: int) -> bool:
        """Return whether a node has `row`."""
        return row in self._kept

    def move(self, keeper: Keeper, other: Keeper, offsets: dict[int, int]) -> None:
        """Move states from `keeper` to `other`: `offsets` maps the old offset of each state to its new one."""
        for offset, new in offsets.items():
            row = keeper.states.pop(offset)
            other.states[new] = row
            self._kept[row] = other

    def use(self, row: int) -> None:
        """Mark a row of the tree as used just now."""
        self._kept.move_to_end(row)

    def free(self, row: int) -> None:
        """Free a row.  Raises `InvariantError` if it is free already."""
        if self._is_free[row]:
            raise InvariantError(f"row {row} of states was freed twice")
        self._kept.pop(row, None)
        self._is_free[row] = True
        self._free.append(row)

    def free_of(self, keeper: Keeper) -> None:
        for row in keeper.states.values():
            self.free(row)
        keeper.states.clear()

    def check(self, of_requests: Collection[int]) -> None:
        """Assert that every row is in exactly one place.  Requests have the rows `of_requests`."""
        placed = [*self._free, *self._kept, *of_requests]
        assert len(placed) == len(set(placed)) == self.num_rows, "a state row is in two places, or in none"
        assert all(row in keeper.states.values() for row, keeper in self._kept.items()), "a node lost a state"
