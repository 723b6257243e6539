"""What goes wrong inside the engine while it carries out one call: writes that fail, votes that are lost, full disks.

Each is a context: the engine is as it was after it.  Knows the engine's inner parts.  Does not know trainers.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rollout.control import weight_disk
from tests.faults.engines import Engine
from tests.faults.transports import remove_files
from weight_sync.errors import StagingError
from weight_sync.in_model import InPlaceStaging, JournalStaging
from weight_sync.receivers.disk import DiskSource
from weight_sync.shadow import ShadowStaging
from weight_sync.updater import WeightUpdater

_STAGINGS = {"host": ShadowStaging, "device": ShadowStaging, "journal": JournalStaging, "in_place": InPlaceStaging}
BUCKETS = ("first", "middle", "last")
_VOTES = {"verify": "_vote", "commit": "_commit_vote"}
"""On what came, and on what was written."""


class Injected(RuntimeError):
    """Raised where a fault was put."""


def raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """In the middle of a bucket; while the commit is prepared; half-way through the commit."""
    staging = _STAGINGS[engine.staging]
    if point in BUCKETS:
        return _raises_at(staging, "write", _nth_write(engine, point))
    if point == "verify":
        return _raises_at(staging, "prepare", 1)
    if staging is ShadowStaging:
        return _raises_at(staging, "exchange", 2, is_static=True)
    return _raises_at(staging, "commit", 1)


def derived_raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """After all tensors are written, once."""
    return _raises_at(engine.weights, "recompute_derived", 1)


def restore_raising(engine: Engine, point: str) -> Any:
    """Half-way through the commit, and again when the old content is put back."""

    @contextmanager
    def injected() -> Iterator[None]:
        def undo(_: Any) -> None:
            raise StagingError("the old content cannot be put back")

        with raising(engine, point), mock.patch.object(_STAGINGS[engine.staging], "undo", undo):
            yield

    return injected()


def vote_lost(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Another rank is not well."""
    return mock.patch.object(engine.updater, _VOTES[point], lambda mine: False)


def vote_raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Another rank does not answer."""

    def vote(mine: bool) -> bool:
        raise TimeoutError("a rank did not vote")

    return mock.patch.object(engine.updater, _VOTES[point], vote)


def disk_full(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """No file of the engine can grow any further: the journal; for a pull, the files of the next version."""
    receive, pull = WeightUpdater.receive, weight_disk.pull
    checkpoint = engine.zoo.checkpoints[0] / "model.safetensors"
    limit = int(checkpoint.stat().st_size * BUCKETS.index(point) / len(BUCKETS))

    def receive_without_room(self: WeightUpdater, *arguments: Any) -> None:
        transaction = self._transaction
        with _file_limit(10 if transaction is None else transaction._staging.num_bytes + 10):
            receive(self, *arguments)

    def pull_without_room(*arguments: Any, **named: Any) -> Any:
        with _file_limit(limit):
            return pull(*arguments, **named)

    @contextmanager
    def injected() -> Iterator[None]:
        with (
            mock.patch.object(WeightUpdater, "receive", receive_without_room),
            mock.patch.object(weight_disk, "pull", pull_without_room),
        ):
            yield

    return injected()


def files_vanish(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """The folder of tensors that is being read."""
    return mock.patch.object(DiskSource, "receive", _vanishing(DiskSource.receive, lambda disk: disk._path))


def _vanishing(receive: Callable[..., Any], folder_of: Callable[[Any], Path]) -> Callable[..., Any]:
    def wrong(self: Any) -> Iterator[Any]:
        for count, bucket in enumerate(receive(self)):
            if count == 1:
                remove_files(folder_of(self))
            yield bucket

    return wrong


def _nth_write(engine: Engine, point: str) -> int:
    """The second of a bucket; where the call brings everything at once, the first, a middle or the last of all."""
    if engine.updater.is_open:
        return 2
    count = len(engine.weights.metas())
    return {"first": 1, "middle": count // 2, "last": count}[point]


@contextmanager
def _raises_at(owner: Any, name: str, count: int, is_static: bool = False) -> Iterator[None]:
    """The `count`-th call of a method raises, instead of doing anything."""
    original = getattr(owner, name)
    calls = 0

    def wrong(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise Injected(f"{name} was made to fail")
        return original(*arguments)

    with mock.patch.object(owner, name, staticmethod(wrong) if is_static else wrong):
        yield


@contextmanager
def _file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
