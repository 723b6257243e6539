"""Collectives of the ranks of a sharded trainer, each with a deadline.

All ranks take part in the same order; rank 0 of the group is the one that talks to engines.  Before bytes move, the
ranks agree that none of them has failed, so that a rank that failed never leaves the others waiting in a collective.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from weight_sync.block_sums import signed
from weight_sync.errors import TransportError, WeightRequestError

T = TypeVar("T")

_POLL_S = 0.0005
_OTHERS_DEADLINES = 4
"""How many of the sender's own deadlines another rank waits for it: it asks the engines up to three things in a row."""


class TrainerRanks:
    """`group`: of all trainer ranks; None: the default group.  `device`: where collectives of that group want tensors.

    After a failed collective the object can only report that: the group cannot be trusted to be in step any more.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise WeightRequestError("sharded tensors need torch.distributed to be initialized on every trainer rank")
        self._group = group
        self.device = torch.device(device)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise WeightRequestError("this process is not in the given group of trainer ranks")
        self._global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.world_size = len(self._global_ranks)
        self._timeout_s = timeout_s if self.is_sender else _OTHERS_DEADLINES * timeout_s
        self._broken: str | None = None
        self._is_over = False  # a failure has been agreed on: no rank waits any more

    @property
    def is_sender(self) -> bool:
        return self.rank == 0

    def rank_of(self, global_rank: int) -> int:
        """Rank in the group.  Raises `WeightRequestError` for a rank outside."""
        if global_rank not in self._global_ranks:
            raise WeightRequestError(f"a tensor is sharded over trainer rank {global_rank}, which is not in the group")
        return self._global_ranks.index(global_rank)

    def jointly(self, work: Callable[[], T]) -> T:
        """The result of `work`, once it succeeded on all ranks.

        Raises what it raised here, or `TransportError` if another rank failed or did not come in time.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            all_ok = self._agree(failure is None)
        except TransportError as error:
            raise (failure or error) from None
        if failure is not None:
            raise failure
        if not all_ok:
            raise TransportError("another trainer rank failed; its own error says why")
        return result

    def report_status(self, ok: bool) -> None:
        """Report to the ranks that wait in `jointly` whether this one succeeded.  One that has left is no error."""
        if self._broken is None and not self._is_over:
            with contextlib.suppress(TransportError):
                self._agree(ok)

    def to_sender(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Bytes of every rank on the sending rank; None on the others.

        `mine`: uint8 [sizes[rank]]; `sizes`: bytes of every rank, the same list everywhere, 0 for the sending rank.
        """
        received = torch.empty(sum(sizes) if self.is_sender else 0, dtype=torch.uint8, device=self.device)
        sent = [mine.numel()] + [0] * (len(sizes) - 1)
        expected = list(sizes) if self.is_sender else [0] * len(sizes)
        self._wait(
            lambda: dist.all_to_all_single(
                received, mine.to(self.device), expected, sent, group=self._group, async_op=True
            )
        )
        return list(received.split(list(sizes))) if self.is_sender else None

    def sum_over_ranks(self, values: Sequence[int]) -> list[int]:
        """Sums modulo 2^64, over the ranks, of numbers in [0, 2^64); equally many on every rank."""
        mine = torch.tensor([signed(value) for value in values], dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in self._global_ranks]
        self._wait(lambda: dist.all_gather(everyone, mine, group=self._group, async_op=True))
        total = torch.zeros_like(mine)
        for part in everyone:
            total += part  # wraps
        return [value & ((1 << 64) - 1) for value in total.tolist()]

    def _agree(self, ok: bool) -> bool:
        failed = torch.tensor([0 if ok else 1], dtype=torch.int32, device=self.device)
        self._wait(lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group, async_op=True))
        self._is_over = bool(failed.item())
        return not self._is_over

    def _wait(self, start: Callable[[], dist.Work | None]) -> None:
        """Raises `TransportError`, from then on at once."""
        if self._broken is not None:
            raise TransportError(self._broken)
        deadline = time.monotonic() + self._timeout_s
        try:
            work = start()
            assert work is not None, "asynchronous collectives return their work"
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not within {self._timeout_s:g} s")
                time.sleep(_POLL_S)
            work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            self._broken = f"the trainer ranks lost one another: {str(error).strip().splitlines()[0][:300]}"
            raise TransportError(self._broken) from error
