"""`Communicator`: the collectives of one group of ranks, each with a deadline, each counted.

    tensors on the device     over the group's device transport, NCCL: in the order of the stream
    tensors on the host,      over its host transport, gloo: done when the call returns
    integers, votes, bytes

Sums run in rank order, in float32 or better, for every message size.  So all ranks get the same bits, and a token's
sum does not depend on the rest of the batch.  A group of one does nothing.  After a failure the ranks' contents no
longer agree, so the group is broken: every later call raises at once, before anything is sent.

A communicator is not thread-safe, and all ranks make their calls in one order: each communicating thread has its own.

Shapes: N ranks of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rollout.core.errors import FatalError
from rollout.distributed.transport import Transport
from rollout.kernels.operators import OPERATORS

_GATHERED_SUM_BYTES = 64 << 10  # up to this size, one round of whole tensors is quicker than two rounds of shares
_SUM: Callable[[torch.Tensor], torch.Tensor] = OPERATORS["sum_in_order"].registered
_SPIN_S = 0.002  # a wait for the device polls without a pause for this long
_PAUSE_S = 0.0002


class RankLostError(FatalError):
    """A collective failed or was late: another rank is lost, and may or may not have completed its part."""


@dataclass
class CollectiveCount:
    """Calls so far, and the bytes that this rank sent to others."""

    calls: int = 0
    num_bytes: int = 0


class DeviceEvent(Protocol):
    """A point in the work of a device: `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has passed this event."""

    def synchronize(self) -> None: ...


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor goes over the device transport: the one place that decides it."""
    return tensor.is_cuda


class PeerSums(Protocol):
    """Sums of small tensors in memory that all ranks see: `rollout.distributed.peer_memory.PeerMemory`."""

    def takes(self, tensor: torch.Tensor) -> bool: ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Communicator:
    """The collectives of one group: `host` is None for a group of one, `device` serves tensors in device memory.

    `peers`: sums small tensors in device memory in the place of `device`, where it is set.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        host: Transport | None = None,
        device: Transport | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        assert (host is None) == (size == 1)
        self.name, self.rank, self.size = name, rank, size
        self.timeout_s = timeout_s
        self.counts: dict[str, CollectiveCount] = {}
        self.broken: RankLostError | None = None  # the first failure
        self.host, self.device = host, device
        self.peers: PeerSums | None = None

    # --- tensors ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Replace the content of the contiguous `tensor` with rank `root`'s on every rank, and return it."""
        if self.size == 1:
            return tensor
        sent = tensor.nbytes * (self.size - 1) if self.rank == root else 0
        flat = tensor.view(-1).view(torch.uint8)
        self._run("broadcast", sent, tensor, lambda transport: transport.broadcast(flat, root, self.timeout_s))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, which have one shape and dtype: [N, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if tensor.numel() == 0:
            return tensor.new_empty(self.size, *tensor.shape)
        mine = _as_bytes(tensor)
        out = mine.new_empty(self.size * mine.numel())
        sent = tensor.nbytes * (self.size - 1)
        self._run("all_gather", sent, tensor, lambda transport: transport.all_gather(out, mine, self.timeout_s))
        return out.view(tensor.dtype).view(self.size, *tensor.shape)

    def all_gather_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks, rank by rank: [sum of counts, ...].  `tensor` has `counts[rank]` rows."""
        if self.size == 1:
            return tensor
        assert tensor.shape[0] == counts[self.rank]
        most = max(counts)
        if most == 0:
            return tensor
        if min(counts) == most:
            return self.all_gather(tensor).flatten(0, 1)
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = self.all_gather(padded)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts)])

    def all_gather_parts(self, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the rows of all ranks of several tensors, each as `all_gather_rows` does, in one exchange.

        The tensors [T, n] have `counts[rank]` rows, and may have different dtypes and widths.  On devices nothing is
        copied before or after the exchange if all ranks have equally many rows.
        """
        if self.size == 1:
            return list(tensors)
        if min(counts) != max(counts) or max(counts) == 0 or not is_on_device(tensors[0]):
            return unpack_rows(self.all_gather_rows(pack_rows(tensors), counts), tensors)
        assert all(tensor.shape[0] == counts[self.rank] for tensor in tensors)
        mine = [_as_bytes(tensor) for tensor in tensors]
        outs = [part.new_empty(self.size * part.numel()) for part in mine]
        sent = sum(part.numel() for part in mine) * (self.size - 1)
        self._run(
            "all_gather", sent, tensors[0], lambda transport: transport.all_gather_several(outs, mine, self.timeout_s)
        )
        return [out.view(like.dtype).view(-1, *like.shape[1:]) for out, like in zip(outs, tensors, strict=True)]

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Send the next `send_counts[r]` of `rows` to each rank r; return the rows from all ranks, in rank order."""
        if self.size == 1:
            return rows
        rows = rows.contiguous()
        width = rows[0].nbytes if rows.shape[0] else rows.new_empty(1, *rows.shape[1:]).nbytes
        out = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        if width == 0:
            return out
        send, receive = _as_bytes(rows).view(-1, width), _as_bytes(out).view(-1, width)
        sent = width * (sum(send_counts) - send_counts[self.rank])
        self._run(
            "all_to_all",
            sent,
            rows,
            lambda transport: transport.all_to_all(receive, send, receive_counts, send_counts, self.timeout_s),
        )
        return out

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, added in rank order, as a new tensor; a group of one returns `tensor`."""
        if self.size == 1:
            return tensor
        if self.peers is not None and is_on_device(tensor) and self.peers.takes(tensor):
            self._require_whole("all_reduce")
            self._count("all_reduce", tensor.nbytes)  # the others read it where it is
            return self.peers.sum(tensor)
        if tensor.nbytes <= _GATHERED_SUM_BYTES or tensor.shape[0] < self.size:
            return _SUM(self.all_gather(tensor))
        counts = share_sizes(tensor.shape[0], self.size)
        return self.all_gather_rows(self.reduce_scatter_rows(tensor, counts), counts)

    def reduce_scatter_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return this rank's `counts[rank]` rows of the sum over all ranks in order; `counts` cover all rows."""
        if self.size == 1 or tensor.numel() == 0:
            return tensor
        mine = counts[self.rank]
        received = self.all_to_all(tensor, counts, [mine] * self.size)
        return _SUM(received.view(self.size, mine, *tensor.shape[1:]))

    def send_receive(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Exchange tensors between pairs of ranks: `sends` (tensor, to) and `receives` (tensor, from).

        The tensors of two ranks are in one order on both.  They are contiguous, all on the device or all on the host,
        and nothing else touches them until this returns.
        """
        assert self.size > 1 or not (sends or receives)
        given = [(_as_bytes(tensor), peer) for tensor, peer in sends if tensor.numel()]
        wanted = [(_as_bytes(tensor), peer) for tensor, peer in receives if tensor.numel()]
        if not (given or wanted):
            return
        parcels = given + wanted
        assert len({is_on_device(tensor) for tensor, _ in parcels}) == 1
        self._run(
            "send_receive",
            sum(tensor.nbytes for tensor, _ in given),
            parcels[0][0],
            lambda transport: transport.send_receive(given, wanted, self.timeout_s),
        )

    # --- host values ------------------------------------------------------------------------------------------------

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, by rank.  All ranks send the same number of them."""
        if self.size == 1:
            return [list(values)]
        return self.all_gather(torch.tensor(values, dtype=torch.int64)).tolist()

    def all_agree(self, mine: bool) -> bool:
        """Return whether all ranks vote yes."""
        return mine if self.size == 1 else all(flag for (flag,) in self.gather_ints([int(mine)]))

    def any_of(self, mine: bool) -> bool:
        """Return whether any rank votes yes."""
        return mine if self.size == 1 else any(flag for (flag,) in self.gather_ints([int(mine)]))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the message of every rank, by rank."""
        if self.size == 1:
            return [data]
        sizes = [size for (size,) in self.gather_ints([len(data)])]
        mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        gathered = self.all_gather_rows(mine, sizes).numpy().tobytes()
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [gathered[end - size : end] for size, end in zip(sizes, ends)]

    def reset_counts(self) -> None:
        self.counts.clear()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait_for(self, event: DeviceEvent) -> None:
        """Wait on the host until the device has passed `event`.

        If the group has a device transport, raises `RankLostError` after `timeout_s`.
        """
        if self.device is None:
            event.synchronize()
            return
        self._require_whole("wait_for")
        start = time.monotonic()
        while not event.query():
            waited = time.monotonic() - start
            if waited > self.timeout_s:
                raise self._lost("wait_for", f"the device did not finish within {self.timeout_s:g} s")
            if waited > _SPIN_S:
                time.sleep(_PAUSE_S)

    def _run(self, verb: str, num_bytes: int, tensor: torch.Tensor, call: Callable[[Transport], None]) -> None:
        """Count the collective and run `call` with the transport for `tensor`.  Raises `RankLostError` if it fails."""
        self._require_whole(verb)
        self._count(verb, num_bytes)
        transport = self.device if is_on_device(tensor) else self.host
        assert transport is not None, f"group {self.name!r} has no transport for tensors on {tensor.device}"
        try:
            call(transport)
        except RuntimeError as error:
            raise self._lost(verb, str(error)) from error

    def _count(self, verb: str, num_bytes: int) -> None:
        count = self.counts.setdefault(verb, CollectiveCount())
        count.calls += 1
        count.num_bytes += num_bytes

    def _require_whole(self, verb: str) -> None:
        if self.broken is not None:
            raise RankLostError(f"{verb} after a failure: {self.broken}") from self.broken

    def _lost(self, verb: str, error: str) -> RankLostError:
        reason = error.strip().split("\n", 1)[0][:200]
        lost = RankLostError(f"rank {self.rank} of group {self.name!r}: {verb} failed, a rank is lost: {reason}")
        self.broken = self.broken or lost
        return self.broken


def share_sizes(total: int, parts: int) -> list[int]:
    """Divide `total` rows among `parts` ranks as evenly as possible; the first ranks get one more."""
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]


def pack_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack tensors [T, n] of any dtypes side by side into uint8 [T, bytes of a row]."""
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors], dim=1)


def unpack_rows(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that `pack_rows` packed, with any number of rows; `like` has the dtypes and widths."""
    widths = [tensor.shape[1] * tensor.dtype.itemsize for tensor in like]
    parts = packed.split(widths, dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
