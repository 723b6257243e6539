"""Faults inside the engine while it carries out a call: writes that fail, votes that are lost, full disks.

Each is a context, after which the engine is as it was.  The matrix puts each at one point of a refresh; histories
(`FAILURES`) put it around a whole one, in which it happens once and is noted in `RefreshHarness.failed`.
"""

from __future__ import annotations

import inspect
import itertools
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rollout.control import weight_disk
from tests.faults.engines import Engine
from tests.faults.harness import RefreshHarness
from tests.faults.transports import remove_files
from weight_sync.errors import StagingError
from weight_sync.in_model import InPlaceStaging, JournalStaging
from weight_sync.receivers.disk import DiskSource
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode
from weight_sync.updater import WeightUpdater

_STAGINGS = {"host": ShadowStaging, "device": ShadowStaging, "journal": JournalStaging, "in_place": InPlaceStaging}
BUCKETS = ("first", "middle", "last")
# On what came, and on what was written.
_VOTES = {"verify": "_vote", "commit": "_commit_vote"}


class Injected(RuntimeError):
    """Raised where a fault was put."""


@dataclass(frozen=True)
class Place:
    """A method that carries out a step of a refresh.  From its `call`-th call on something has been done already."""

    owner: Any
    name: str
    call: int = 1


def place_of(step: str, staging: StagingMode) -> Place:
    """`step`: a bucket, "verify" or "commit"."""
    of_mode = _STAGINGS[staging]
    if step in BUCKETS:
        return Place(of_mode, "write", 2)
    if step == "verify":
        return Place(of_mode, "prepare")
    return Place(of_mode, "exchange", 2) if of_mode is ShadowStaging else Place(of_mode, "commit")


def hook(
    owner: Any, name: str, before: Callable[[int], Any] = lambda _: None, after: Callable[[], Any] = lambda: None
) -> Any:
    """A patch of a method; `before` is given the number of the call, from 1."""
    original = getattr(owner, name)
    numbers = itertools.count(1)

    def hooked(*arguments: Any, **named: Any) -> Any:
        before(next(numbers))
        result = original(*arguments, **named)
        after()
        return result

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    return mock.patch.object(owner, name, staticmethod(hooked) if is_static else hooked)


def raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Raise in the middle of a bucket, while the commit is prepared, or half-way through the commit."""
    place = place_of(point, engine.staging)
    return _raises_at(replace(place, call=_nth_write(engine, point)) if point in BUCKETS else place)


def derived_raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Raise after all tensors are written, once."""
    return _raises_at(Place(engine.weights, "recompute_derived"))


def restore_raising(engine: Engine, point: str) -> Any:
    """Half-way through the commit, and again when the old content is put back."""

    @contextmanager
    def injected() -> Iterator[None]:
        def undo(_: Any) -> None:
            raise StagingError("the old content cannot be put back")

        with raising(engine, point), mock.patch.object(_STAGINGS[engine.staging], "undo", undo):
            yield

    return injected()


def vote_lost(engine: RefreshHarness, point: str) -> AbstractContextManager[Any]:
    """Another rank is not well, once."""
    name = _VOTES[point]
    vote = getattr(engine.updater, name)
    is_lost = False

    def lost(mine: bool) -> bool:
        nonlocal is_lost
        if is_lost or not mine:
            return vote(mine)
        is_lost, engine.failed = True, f"vote_{point}"
        return False

    return mock.patch.object(engine.updater, name, lost)


def vote_raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Another rank does not answer."""

    def vote(mine: bool) -> bool:
        raise TimeoutError("a rank did not vote")

    return mock.patch.object(engine.updater, _VOTES[point], vote)


@contextmanager
def second_write_raising(engine: RefreshHarness, *, restoring_too: bool) -> Iterator[None]:
    """The second write into the model, or exchange with it.  `restoring_too`: until the verb is answered nothing that
    was written can be put back either."""
    name = "restore" if restoring_too else "write"
    numbers = itertools.count(1)

    def restore(_: int) -> None:
        if restoring_too and engine.failed == name:
            raise Injected("restoring was made to fail")

    def write(_: int) -> None:
        restore(0)
        if next(numbers) == 2:
            engine.failed = name
            raise Injected("a write was made to fail")

    with (
        hook(ShadowStaging, "exchange", write),
        hook(engine.weights, "write", write),
        hook(engine.weights, "restore", restore),
    ):
        yield


FAILURES: dict[str, Callable[[RefreshHarness], AbstractContextManager[Any]]] = {
    "vote_verify": lambda engine: vote_lost(engine, "verify"),
    "vote_commit": lambda engine: vote_lost(engine, "commit"),
    "write": lambda engine: second_write_raising(engine, restoring_too=False),
    "restore": lambda engine: second_write_raising(engine, restoring_too=True),
}


def disk_full(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Keep the files of the engine from growing further: the journal; for a pull, the files of the next version."""
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


def _raises_at(place: Place) -> AbstractContextManager[Any]:
    """The `call`-th call of the method raises, instead of doing anything."""

    def before(number: int) -> None:
        if number == place.call:
            raise Injected(f"{place.name} was made to fail")

    return hook(place.owner, place.name, before)


@contextmanager
def _file_limit(num_bytes: int) -> Iterator[None]:
    """Keep every file of this process from growing beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
