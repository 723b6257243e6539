"""Faults inside the engine while it carries out a call: writes that fail, votes that are lost, full disks.

Each is a context, after which the engine is as it was.  The matrix puts each at one point of a refresh.
Histories (`FAILURES`) put it around a whole refresh.  There it happens once and is noted in `RefreshHarness.failed`.
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
from rollout.model.adapter_places import LinearPlace
from tests.faults.engines import Engine
from tests.faults.harness import RefreshHarness
from tests.faults.transports import remove_files
from weight_sync.errors import StagingError
from weight_sync.in_model import ApartStaging, InPlaceStaging, JournalStaging
from weight_sync.plan import BucketPlan
from weight_sync.receivers.disk import DiskSource
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import Staging
from weight_sync.updater import WeightUpdater

_STAGINGS: dict[str, Any] = {
    "host": ShadowStaging,
    "device": ShadowStaging,
    "journal": JournalStaging,
    "in_place": InPlaceStaging,
    "apart": ApartStaging,  # of an adapter, in every mode
}
BUCKETS = ("first", "middle", "last")
# The votes on received buckets and on written weights.
_VOTES = {"verify": "_vote", "commit": "_commit_vote"}


class Injected(RuntimeError):
    """Raised where a fault was put."""


@dataclass(frozen=True)
class Place:
    """A method that carries out a step of a refresh.  At its `call`-th call, part of the step is done."""

    owner: Any
    name: str
    call: int = 1


def place_of(step: str, staging: str) -> Place:
    """Return the method that carries out a step in this mode; the step is a bucket, "verify" or "commit"."""
    of_mode = _STAGINGS[staging]
    if step in BUCKETS:
        return Place(of_mode, "write", 2)
    if step == "verify":
        return Place(of_mode, "prepare")
    if of_mode is ApartStaging:
        return Place(LinearPlace, "write", 2)
    return Place(of_mode, "exchange", 2) if of_mode is ShadowStaging else Place(of_mode, "commit")


def hook(
    owner: Any, name: str, before: Callable[[int], Any] = lambda _: None, after: Callable[[], Any] = lambda: None
) -> Any:
    """Wrap a method in calls of `before` and `after`; `before` gets the number of the call, from 1.

    Tensors of a planned bucket count as one write each.
    """
    original = getattr(owner, name)
    numbers = itertools.count(1)

    def hooked(*arguments: Any, **named: Any) -> Any:
        before(next(numbers))
        result = original(*arguments, **named)
        after()
        return result

    def spans_hooked(staging: Staging, plan: BucketPlan, content: Any, accept: Any) -> None:
        spans(staging, plan, content, accept)
        for _ in plan.numbers:
            before(next(numbers))

    if name == "write" and hasattr(owner, "write_spans"):  # one by one, or all of a planned bucket in one call
        spans = owner.write_spans
        return mock.patch.multiple(owner, write=hooked, write_spans=spans_hooked)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    hooks = {name: staticmethod(hooked) if is_static else hooked}
    if (owner, name) == (ShadowStaging, "exchange"):
        hooks["commit"] = _commit_part_by_part(owner.commit)
    return mock.patch.multiple(owner, **hooks)


def _commit_part_by_part(commit: Callable[[ShadowStaging], None]) -> Callable[[ShadowStaging], None]:
    """Exchange each part by a call of its own: the small parts of a test's model are all exchanged by one."""

    def part_by_part(staging: ShadowStaging) -> None:
        together = staging._to_exchange
        staging._to_exchange = [([one], [other]) for parts in together for one, other in zip(*parts, strict=True)]
        commit(staging)

    return part_by_part


def raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Raise in the middle of a bucket, while the commit is prepared, or half-way through the commit."""
    place = place_of(point, engine.staging)
    return _raises_at(replace(place, call=_nth_write(engine, point)) if point in BUCKETS else place)


def derived_raising(engine: Engine, point: str) -> AbstractContextManager[Any]:
    """Raise after all tensors are written, once."""
    return _raises_at(Place(engine.weights, "recompute_derived"))


def restore_raising(engine: Engine, point: str) -> Any:
    """Raise half-way through the commit, and again when the old content is put back."""

    @contextmanager
    def injected() -> Iterator[None]:
        def undo(_: Any) -> None:
            raise StagingError("the old content cannot be put back")

        with raising(engine, point), mock.patch.object(_STAGINGS[engine.staging], "undo", undo):
            yield

    return injected()


def vote_lost(engine: RefreshHarness, point: str) -> AbstractContextManager[Any]:
    """Lose the first vote in favour, as if another rank had failed."""
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
    """Raise in the vote, as if another rank did not answer."""

    def vote(mine: bool) -> bool:
        raise TimeoutError("a rank did not vote")

    return mock.patch.object(engine.updater, _VOTES[point], vote)


@contextmanager
def second_write_raising(engine: RefreshHarness, *, restoring_too: bool) -> Iterator[None]:
    """Raise at the second write into the model, or exchange with it.

    `restoring_too`: until the verb is answered, restoring fails as well.
    """
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

    of_mode = _STAGINGS[engine.staging]
    with (
        hook(of_mode, "exchange" if of_mode is ShadowStaging else "write", write),
        hook(of_mode, "undo", restore),
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
        with _file_limit(10 if self.update is None else self.update.transaction._staging.num_bytes + 10):
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
    """Remove the files of a folder of tensors while it is read."""
    return mock.patch.object(DiskSource, "receive", _vanishing(DiskSource.receive, lambda disk: disk._path))


def _vanishing(receive: Callable[..., Any], folder_of: Callable[[Any], Path]) -> Callable[..., Any]:
    def wrong(self: Any) -> Iterator[Any]:
        for count, bucket in enumerate(receive(self)):
            if count == 1:
                remove_files(folder_of(self))
            yield bucket

    return wrong


def _nth_write(engine: Engine, point: str) -> int:
    """Return the number of the write that fails: the second of a bucket, or one of all where one call brings them."""
    if engine.updater.is_open:
        return 2
    count = len(engine.weights.metas())
    return {"first": 1, "middle": count // 2, "last": count}[point]


def _raises_at(place: Place) -> AbstractContextManager[Any]:
    """Raise instead of making the `call`-th call of the method."""

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
