"""Receives one bucket over a process group: a broadcast per tensor in list order, or one `flattened_bucket`.

gloo does not compare the two ends of a broadcast.  A message shorter than the receiver's buffer counts as received
and leaves the rest of the buffer untouched; a longer one ends the receiving process.  So with gloo every message is
received into a larger area, and marks tell afterwards how long it was:

    |<------------- announced ------------->|<----------------- slack ----------------->|
    |                            canary 16 B| 0xFF x 4096 |    (memory never touched)    |
         still there: the message was short   changed: the message was long

The slack is address space, not memory, until a message runs into it.  With more than two members gloo passes whole
receive areas on from member to member, so the slack is kept small, and a message that is longer still ends the
process.

Knows groups and bytes.  Does not know models or transactions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from weight_sync.bucket import check_alignment, unpack
from weight_sync.errors import ContentError, TransportError, WeightRequestError
from weight_sync.process_group import GroupHandle
from weight_sync.tensor_meta import TensorMeta
from weight_sync.wire import parse_metas

FLATTENED_BUCKET = "flattened_bucket"

_SLACK_PAIR = 512 << 20  # as much as trainers put into a bucket, should one arrive where a single tensor was announced
_SLACK_TREE = 64 << 10
_MARK_BYTES = 4096
_CANARY_BYTES = 16
_ALIGNMENT = 64
_DRAIN_S = 5.0


class DistributedSource:
    """One bucket over a group: `lists` are the names, dtypes and shapes of the call.

    `join` gives the group, or raises `UnknownGroupError`; `leave` is called when the group broke.
    """

    must_drain = True

    def __init__(
        self,
        lists: tuple[Sequence[str], Sequence[str], Sequence[Sequence[int]]],
        load_format: str | None,
        *,
        join: Callable[[], GroupHandle],
        leave: Callable[[], None],
        device: torch.device | str,
        timeout_s: float,
    ) -> None:
        self._lists = lists
        self._load_format = load_format
        self._join = join
        self._leave = leave
        self._device = device
        self._timeout_s = timeout_s
        self._metas: Sequence[TensorMeta] = ()

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        """The call's tensors.  Raises `WeightRequestError`, `UnknownGroupError`."""
        self._metas = parse_metas(*self._lists)
        check_announced(self._metas, self._load_format, max_bytes)
        self._join()
        return self._metas

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        """One bucket.  Raises as `receive_distributed`."""
        group = self._join()
        try:
            yield receive_distributed(group, self._metas, self._load_format, self._device, self._timeout_s)
        finally:
            if group.broken:
                self._leave()


def check_announced(metas: Sequence[TensorMeta], load_format: str | None, max_bytes: int) -> None:
    """Whether a bucket can be received at all.  Raises `WeightRequestError`."""
    if load_format not in (None, FLATTENED_BUCKET):
        raise WeightRequestError(f"unknown load_format {load_format!r}; known: null, {FLATTENED_BUCKET!r}")
    total = sum(meta.nbytes for meta in metas)
    if total > max_bytes:
        raise WeightRequestError(f"the bucket has {total} bytes; at most {max_bytes} are taken in one call")
    if load_format == FLATTENED_BUCKET:
        check_alignment(metas)


def receive_distributed(
    group: GroupHandle,
    metas: Sequence[TensorMeta],
    load_format: str | None,
    device: torch.device | str,
    timeout_s: float,
) -> list[tuple[str, torch.Tensor]]:
    """Take part in the broadcasts of one checked bucket; returns (name, tensor) in list order.

    The tensors are views of one receive area, on the CPU with gloo and on `device` with NCCL.  `timeout_s` is the
    deadline of the whole bucket.  Raises `ContentError` when a message was shorter or longer than announced (the group
    stays usable), `TransportError` when a broadcast failed or was late (the group is broken).
    """
    deadline = time.monotonic() + timeout_s
    if load_format == FLATTENED_BUCKET:
        total = check_alignment(metas)
        # Marks are judged by the last tensor that has bytes.
        last = next((meta for meta in reversed(metas) if meta.nbytes), None)
        area = _ReceiveArea(group, total, device)
        return unpack(area.receive(0, total, last, "the bucket", deadline), metas)

    area = _ReceiveArea(group, sum(_aligned(meta.nbytes) for meta in metas), device)
    named = []
    offset = 0
    wrong: ContentError | None = None
    for meta in metas:
        try:
            received = area.receive(offset, meta.nbytes, meta, meta.name, deadline)
            named.append((meta.name, received.view(meta.dtype).view(meta.shape)))
        except ContentError as error:
            # The sender may be waiting in the rest of the list: take it, but not for long, as there may be no rest.
            wrong = wrong or error
        except TransportError as error:
            if wrong is None:
                raise
            raise wrong from error
        if wrong is not None:
            deadline = min(deadline, time.monotonic() + _DRAIN_S)
        offset += _aligned(meta.nbytes)
    if wrong is not None:
        raise wrong
    return named


class _ReceiveArea:
    """Memory for the messages of one call, in order.  The part that is not yet received serves as slack."""

    def __init__(self, group: GroupHandle, total: int, device: torch.device | str) -> None:
        self._group = group
        self._marked = group.backend == "gloo"  # NCCL needs equal counts on both ends
        self._message_slack: int | None = None if group.world_size == 2 else _SLACK_TREE
        slack = 0
        if self._marked:
            slack = max(_SLACK_PAIR, total) if group.world_size == 2 else _SLACK_TREE
        self._bytes = torch.empty(total + slack, dtype=torch.uint8, device="cpu" if self._marked else device)

    def receive(self, offset: int, nbytes: int, last: TensorMeta | None, what: str, deadline: float) -> torch.Tensor:
        """The message's bytes, uint8 [nbytes]."""
        end = offset + nbytes
        message = self._bytes[offset:end]
        timeout_s = max(deadline - time.monotonic(), 0.001)
        if not self._marked:
            self._group.finish(self._group.start_broadcast(message, timeout_s), deadline)
            return message
        canary, mark = self._set_marks(offset, end, last)
        limit = None if self._message_slack is None else end + self._message_slack
        self._group.finish(self._group.start_broadcast(self._bytes[offset:limit], timeout_s), deadline)
        if bool((mark != 0xFF).any()):
            raise ContentError(f"{what}: the message is longer than the {nbytes} bytes announced")
        if canary is not None and torch.equal(message[-canary.numel() :], canary):
            raise ContentError(f"{what}: the message is shorter than the {nbytes} bytes announced")
        return message

    def _set_marks(self, offset: int, end: int, last: TensorMeta | None) -> tuple[torch.Tensor | None, torch.Tensor]:
        mark = self._bytes[end : end + _MARK_BYTES]
        mark.fill_(0xFF)
        canary = _canary(last)
        if canary is not None:
            tail = self._bytes[max(offset, end - _CANARY_BYTES) : end]
            tail.fill_(0xFF)
            tail[-canary.numel() :] = canary
        return canary, mark


def _canary(last: TensorMeta | None) -> torch.Tensor | None:
    """Bytes at the end of a message that no right message ends in; None where there are none.

    All bits set is NaN in every float type, and NaN is refused anyway, so one element is enough.  Integers have no such
    value: 16 random bytes, if there are as many.
    """
    if last is None or last.nbytes == 0:
        return None
    if last.dtype.is_floating_point:
        return torch.full((last.dtype.itemsize,), 0xFF, dtype=torch.uint8)
    if last.nbytes < _CANARY_BYTES:
        return None
    return torch.frombuffer(bytearray(os.urandom(_CANARY_BYTES)), dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
