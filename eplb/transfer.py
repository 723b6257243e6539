"""`ExpertTransfer`: moves one rank's part of a migration, chunk by chunk, in step with all other ranks.

    stage    local sources and what other ranks send -> spare buffers            slots untouched
    check    fingerprint of everything staged against its source's; old content of the slots -> kept buffers
             vote                                                                slots untouched
    commit   spare buffers -> slots, read back and compared
             vote: yes, the chunk is done; no, every rank writes the kept content back and proves it

A rank that fails reports it in the next vote and never leaves the others waiting; all ranks then raise the same error.
What a collective itself raises, because a rank is lost, is passed on with this rank's slots as they were before.

The caller publishes the map that describes the new content at once after `run`.  Memory: spare and kept buffers of the
largest chunk, from `prepare` to `close`.

Shapes: B bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from eplb.errors import RebalanceRefused, TornTransferError, TransferError
from eplb.migration import Migration, MigrationChunk, Move, RankWork

DEADLINE_S = 60.0  # of one chunk
_ALIGNMENT = 64  # of every tensor in a buffer: words of any width, and whole cache lines
_MAX_REASON_BYTES = 400
_MASK = (1 << 64) - 1

Content = Sequence[torch.Tensor]  # of one slot: uint8 [B] for each of its tensors
Fingerprint = Callable[[torch.Tensor], int]  # of uint8 [B]: below 2^64, another one for other content


class ExpertSlots(Protocol):
    """The expert slots that one rank stores.  `slot` counts from the rank's own first one."""

    @property
    def slots_per_rank(self) -> int: ...

    @property
    def part_bytes(self) -> Sequence[int]:
        """Bytes of each tensor that makes up a slot; the same in every MoE layer."""

    @property
    def form(self) -> str:
        """The dtype and packing: like sizes, two ranks must agree on them for equal bytes to be the same expert."""

    def read(self, layer: int, slot: int) -> Content:
        """Return the slot's own memory, contiguous; not to be written to."""

    def write(self, layer: int, slot: int, content: Content) -> None:
        """Replace the slot's content, in place, and return when it is there."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory for the same content, uint8 [B]."""


class RankGroup(Protocol):
    """The ranks of an engine.  Every call has a deadline of its own and raises when a rank is lost."""

    rank: int
    size: int

    def send_receive(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None: ...

    def all_agree(self, mine: bool) -> bool: ...

    def gather_bytes(self, data: bytes) -> list[bytes]: ...


class ExpertTransfer:
    """`peers[r]`: the rank in `group` that stores the same shard of the experts of expert-parallel rank r.

    `clock` is in seconds.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        group: RankGroup,
        *,
        ep_rank: int,
        peers: Sequence[int],
        fingerprint: Fingerprint,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert peers[ep_rank] == group.rank
        self._slots, self._group, self._fingerprint = slots, group, fingerprint
        self._ep_rank, self._peers = ep_rank, peers
        self._deadline_s, self._clock = deadline_s, clock
        self._late_at = 0.0
        self._buffers: tuple[_Buffers, _Buffers] | None = None

    def prepare(self, migration: Migration, placement_epoch: int) -> None:
        """Agree on what will be moved, and get the memory for it.

        Raises, on all ranks: `RebalanceRefused` where they do not have the same migration and placement epoch,
        `TransferError` where one stores experts in another form or has no memory.
        """
        assert migration.slot_bytes == sum(self._slots.part_bytes)
        self._late_at = self._clock() + self._deadline_s
        stated = f"migration {migration.digest()} of placement epoch {placement_epoch}"
        form = f"{self._slots.form} {list(self._slots.part_bytes)}"
        answers = [answer.decode().split("\0") for answer in self._group.gather_bytes(f"{stated}\0{form}".encode())]
        migrations = {theirs for theirs, _ in answers}
        if migrations != {stated}:
            raise RebalanceRefused(f"the ranks plan different moves: {sorted(migrations)}")
        self._together(lambda: self._allocate(migration, {answers[peer][1] for peer in self._peers}))

    def close(self) -> None:
        """Free the buffers."""
        self._buffers = None

    def _allocate(self, migration: Migration, forms: set[str]) -> None:
        if len(forms) > 1:
            raise TransferError(f"the ranks store experts in different forms: {sorted(forms)}")
        work = [chunk.work_of(self._ep_rank) for chunk in migration.chunks]
        self._buffers = (
            _Buffers(self._slots, max(len(item.staged) for item in work)),
            _Buffers(self._slots, max(item.num_changed_slots for item in work)),
        )

    def run(self, chunk: MigrationChunk, placement_epoch: int) -> float:
        """Fill this rank's slots of the chunk's layers by the new map.  Returns the seconds that it took.

        `placement_epoch`: of the map in force, which describes what is sent.  Raises, on all ranks: `TransferError`
        with every slot as it was, `TornTransferError` where one could not be restored.
        """
        assert self._buffers is not None, "prepare() comes first"
        started = self._clock()
        self._late_at = started + self._deadline_s
        work = chunk.work_of(self._ep_rank)
        mine = _ChunkOnRank(self._slots, work, *self._buffers, self._fingerprint, placement_epoch)
        self._together(mine.stage_local)
        mine.exchange(self._group, self._peers)
        self._together(mine.check)
        self._commit(mine)
        return self._clock() - started

    def _commit(self, mine: _ChunkOnRank) -> None:
        failure = _failure_of(mine.write_new)
        try:
            all_written = self._group.all_agree(failure is None)
        except Exception:
            _failure_of(mine.write_old)  # the error of the lost rank is the one to report
            raise
        if all_written:
            return
        torn = _failure_of(mine.write_old)
        all_restored = self._group.all_agree(torn is None)
        reasons = self._reasons(failure if torn is None else f"{failure or 'written'}; not restored: {torn}")
        if not all_restored:
            raise TornTransferError(f"experts are torn: {reasons}")
        raise TransferError(f"experts could not be written, so the old ones were restored: {reasons}")

    # --- votes ------------------------------------------------------------------------------------------------------

    def _together(self, action: Callable[[], None]) -> None:
        """Run `action` on every rank, or raise the same `TransferError` on every rank."""
        failure = _failure_of(action)
        if failure is None and self._clock() > self._late_at:
            failure = f"not done within {self._deadline_s:g} s"
        if not self._group.all_agree(failure is None):
            raise TransferError(f"no expert was moved: {self._reasons(failure)}")

    def _reasons(self, mine: str | None) -> str:
        """Return the reasons of all ranks that failed, the same on every rank."""
        reasons = self._group.gather_bytes((mine or "").encode()[:_MAX_REASON_BYTES])
        texts = [text.decode(errors="ignore") for text in reasons]
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


class _Buffers:
    """Memory for the content of some slots, side by side."""

    def __init__(self, slots: ExpertSlots, num_slots: int) -> None:
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in slots.part_bytes]
        self._places = [(sum(padded[:index]), size) for index, size in enumerate(slots.part_bytes)]
        self._stride = sum(padded)
        self._memory = slots.empty(num_slots * self._stride)

    def content(self, index: int) -> Content:
        start = index * self._stride
        return [self._memory[start + offset : start + offset + size] for offset, size in self._places]

    def keep(self, index: int, content: Content) -> None:
        for to, source in zip(self.content(index), content, strict=True):
            to.copy_(source)


class _ChunkOnRank:
    """The work of one rank in one chunk, step by step.  Only `exchange` waits for others.

    A staged expert goes with a header of int64: placement epoch, layer, logical expert, fingerprints of its tensors.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        work: RankWork,
        spare: _Buffers,
        kept: _Buffers,
        fingerprint: Fingerprint,
        placement_epoch: int,
    ) -> None:
        self._slots, self._work, self._spare, self._kept = slots, work, spare, kept
        self._fingerprint, self._placement_epoch = fingerprint, placement_epoch
        self._changed = [(move.layer, slot) for move in work.staged for slot in move.target_slots]
        self._outgoing: list[tuple[Content, torch.Tensor]] = []
        self._headers: list[list[int]] = []  # of the staged experts

    def stage_local(self) -> None:
        """Stage copies within the rank, and what is to be sent."""
        for index, move in enumerate(self._work.local):
            source = self._read(move.layer, move.source_slot)
            self._headers.append(self._header(move, source))
            self._spare.keep(index, source)
        for move in self._work.sends:
            source = self._read(move.layer, move.source_slot)
            header = [_signed(number) for number in self._header(move, source)]
            self._outgoing.append((source, torch.tensor(header).to(source[0].device)))

    def exchange(self, group: RankGroup, peers: Sequence[int]) -> None:
        """Send what is to be sent, receive into spare buffers.  Fails only where a rank is lost."""
        sends, receives, headers = [], [], []
        for (content, header), move in zip(self._outgoing, self._work.sends, strict=True):
            sends += [(tensor, peers[move.target_rank]) for tensor in (*content, header)]
        for index, move in enumerate(self._work.receives, start=len(self._work.local)):
            content = self._spare.content(index)
            headers.append(torch.empty(3 + len(content), dtype=torch.int64, device=content[0].device))
            receives += [(tensor, peers[move.source_rank]) for tensor in (*content, headers[-1])]
        group.send_receive(sends, receives)
        self._outgoing.clear()
        self._headers += [[number & _MASK for number in header.tolist()] for header in headers]

    def check(self) -> None:
        """Check that everything staged is what its source sent; then keep what will be overwritten.

        Raises `TransferError`.
        """
        for index, (move, header) in enumerate(zip(self._work.staged, self._headers, strict=True)):
            expected = self._header(move, self._spare.content(index))
            if header != expected:
                raise TransferError(_difference(move, header, expected))
        for index, (layer, slot) in enumerate(self._changed):
            self._kept.keep(index, self._read(layer, slot))

    def write_new(self) -> None:
        """Write the staged experts to their slots.

        Raises `TransferError` where a slot does not hold the written content afterwards.
        """
        for index, (move, header) in enumerate(zip(self._work.staged, self._headers, strict=True)):
            for slot in move.target_slots:
                self._write(move.layer, slot, self._spare.content(index), header[3:])

    def write_old(self) -> None:
        """Write the content that `check` kept.  Raises `TransferError`, having written what could be written."""
        failures = []
        for index, (layer, slot) in enumerate(self._changed):
            try:
                old = self._kept.content(index)
                self._write(layer, slot, old, self._prints(old))
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        if failures:
            raise TransferError(f"{len(failures)} of {len(self._changed)} slots: {failures[0]}")

    def _write(self, layer: int, slot: int, content: Content, prints: list[int]) -> None:
        self._slots.write(layer, self._local(slot), content)
        if self._prints(self._read(layer, slot)) != prints:
            raise TransferError(f"layer {layer}: slot {slot} does not hold the written content")

    def _read(self, layer: int, slot: int) -> Content:
        return self._slots.read(layer, self._local(slot))

    def _local(self, slot: int) -> int:
        return slot % self._slots.slots_per_rank

    def _header(self, move: Move, content: Content) -> list[int]:
        return [self._placement_epoch, move.layer, move.logical_expert, *self._prints(content)]

    def _prints(self, content: Content) -> list[int]:
        return [self._fingerprint(tensor) for tensor in content]


def _difference(move: Move, header: list[int], expected: list[int]) -> str:
    who = f"layer {move.layer}, expert {move.logical_expert} from rank {move.source_rank}"
    if header[0] != expected[0]:
        return f"{who} has placement epoch {header[0]}, but {expected[0]} is in force"
    if header[1:3] != expected[1:3]:
        return f"{who} came as layer {header[1]}, expert {header[2]}"
    return f"{who} arrived damaged: its fingerprint differs"


def _failure_of(action: Callable[[], None]) -> str | None:
    """Run `action`: why it failed, None if it did not."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}" if not isinstance(error, TransferError) else str(error)
    return None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
