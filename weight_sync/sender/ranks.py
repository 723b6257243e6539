"""Collectives of the ranks of a sharded trainer, each with a deadline.

All ranks take part in the same order; rank 0 of the group is the one that talks to engines.  Before bytes move, the
ranks agree that none of them has failed, so that a rank that failed never leaves the others waiting in a collective.
Every collective is sized by numbers on which the ranks have agreed before: gloo ends a process where sizes differ.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.fingerprint_words import signed
from weight_sync.sender.meshes import SendingMeshes
from weight_sync.sender.statement import RefreshStatement

T = TypeVar("T")

_POLL_S = 0.0005
_MASK = (1 << 64) - 1
_MAX_SAID = 512
"""Bytes of a rank's own words on a failure, as the others get them."""
_OTHERS_DEADLINES = 4
"""Deadlines of the sender that another rank waits for it: the sender asks the engines up to three things in a row."""
_ASKING_S = 40.0
"""On top of these: for the sender to ask engines why, to have them abort, and to leave the ones that are silent."""


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
        self.meshes = SendingMeshes(self._global_ranks)
        self._timeout_s = timeout_s if self.is_sender else _OTHERS_DEADLINES * timeout_s + _ASKING_S
        self._broken: str | None = None
        self._is_over = False  # a failure has been agreed on: no rank waits any more

    @property
    def is_sender(self) -> bool:
        return self.rank == 0

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks, by rank in the group; and this one's rank there, at the end."""
        return (*self._global_ranks, self.rank)

    def rank_of(self, global_rank: int) -> int:
        """Return the rank in the group.  Raises `WeightRequestError` for a rank outside."""
        if global_rank not in self._global_ranks:
            raise WeightRequestError(f"a tensor is sharded over trainer rank {global_rank}, which is not in the group")
        return self._global_ranks.index(global_rank)

    def jointly(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, once it succeeded on all ranks.

        Raises what it raised here, or `TransportError` if another rank failed or did not come in time.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            failures = self._failures(failure)
        except TransportError as error:
            raise (failure or error) from None
        if failure is not None:
            raise failure
        if failures:
            rank, said = next(iter(failures.items()))
            raise TransportError(f"another trainer rank failed: rank {rank}: {said}")
        return result

    def require_equal(self, digest: int, state: Callable[[], RefreshStatement]) -> None:
        """Compare 64 bits of each rank that differ where statements differ; `state` makes this rank's statement.

        Raises `WeightRequestError` on every rank unless they are equal, with the first difference; `TransportError`.
        """
        if len(set(self._from_all(digest))) == 1:
            return
        mine = state()
        first = self.from_sender(mine.encoded())
        said = self._texts(mine.difference(self.rank, RefreshStatement.decoded(first)))
        others = [rank for rank, text in enumerate(said) if text]
        self._is_over = True
        more = f"; {len(others) - 1} more ranks differ from rank 0" if len(others) > 1 else ""
        raise WeightRequestError(f"{said[others[0]]}{more}")

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report how the block ends to the ranks that wait in `jointly`, on the sending rank; of others, a failure."""
        try:
            yield
        except BaseException as error:
            self._report(error)
            raise
        if self.is_sender:
            self._report(None)

    def _report(self, failure: BaseException | None) -> None:
        """Report to the others; one that has left is no error."""
        if self._broken is None and not self._is_over:
            with contextlib.suppress(TransportError):
                self._failures(failure)

    def to_sender(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Return the bytes of every rank on the sending rank; None on the others.

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

    def sum_over_ranks(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Sum uint64 [n] over the ranks, modulo 2^64; equally many on every rank."""
        parts = self._all_gather(torch.from_numpy(values.view(np.int64)))
        return torch.stack(parts).sum(0).numpy().view(np.uint64)  # wraps

    def gather(self, content: bytes) -> list[bytes]:
        """Return the contents of all ranks, by rank."""
        sizes = self._from_all(len(content))
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(content)] = _bytes_tensor(content)
        return [part[:size].numpy().tobytes() for part, size in zip(self._all_gather(mine), sizes, strict=True)]

    def _failures(self, mine: BaseException | None) -> dict[int, str]:
        """Return what failed, by rank; empty where all succeeded."""
        failed = torch.tensor([0 if mine is None else 1], dtype=torch.int32, device=self.device)
        self._wait(lambda: dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group, async_op=True))
        self._is_over = bool(failed.item())
        if not self._is_over:
            return {}
        said = self._texts("" if mine is None else f"{type(mine).__name__}: {mine}")
        return {rank: text for rank, text in enumerate(said) if text}

    def _texts(self, mine: str) -> list[str]:
        """Return each rank's message, by rank, cut to `_MAX_SAID` bytes."""
        said = torch.zeros(_MAX_SAID, dtype=torch.uint8)
        content = mine.encode(errors="replace")[:_MAX_SAID]
        said[: len(content)] = _bytes_tensor(content)
        return [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in self._all_gather(said)]

    def _from_all(self, value: int) -> list[int]:
        """Return the number, in [0, 2^64), of every rank."""
        return [int(part) & _MASK for part in self._all_gather(torch.tensor([signed(value)], dtype=torch.int64))]

    def from_sender(self, content: bytes) -> bytes:
        """Return the content that the sending rank gives.  Raises `TransportError`."""
        (size, *_) = self._from_all(len(content))
        shared = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.is_sender:
            shared.copy_(_bytes_tensor(content))
        self._wait(lambda: dist.broadcast(shared, self._global_ranks[0], group=self._group, async_op=True))
        return shared.cpu().numpy().tobytes()

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which are of one size, on the CPU."""
        mine = mine.to(self.device)
        everyone = [torch.empty_like(mine) for _ in self._global_ranks]
        self._wait(lambda: dist.all_gather(everyone, mine, group=self._group, async_op=True))
        return [part.cpu() for part in everyone]

    def _wait(self, start: Callable[[], dist.Work | None]) -> None:
        """Run a collective within the deadline.  Raises `TransportError`; every later call then raises it at once."""
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
            self._broken = f"the trainer ranks lost contact: {str(error).strip().splitlines()[0][:300]}"
            raise TransportError(self._broken) from error
        except BaseException:  # an interrupt: the others are in this collective, and the next one would meet it
            self._broken = "the trainer ranks lost contact: this one was interrupted"
            raise


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which a group's collectives want tensors."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _bytes_tensor(content: bytes) -> torch.Tensor:
    """Return a copy of `content`, uint8 [bytes]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
