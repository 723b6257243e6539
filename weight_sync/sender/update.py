"""`WeightUpdate`: one weight version on its way to all engines at once, as a context manager.

    with sender.update("7") as update:        begin on all engines
        update.send(named_tensors)            any number of buckets, to all
                                              verify on all, commit on all; on any error: abort, never end

What one engine's failure means for the others: `weight_sync/joint_update.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from typing import Any

import torch

from weight_sync.bucket import pack
from weight_sync.engine_control import gave_no_answer, to_blame, was_refused
from weight_sync.errors import TransactionStateError
from weight_sync.joint_update import ABORT_S, JointUpdate, OnEngineFailure
from weight_sync.sender.link import Bucket, EngineLink, Sending, leave_failed, split_pieces, start_pieces
from weight_sync.sender.lists import TensorLists
from weight_sync.sender.rooms import Rooms
from weight_sync.tensor_meta import TensorMeta

Progress = Callable[[int, int], None]

_POLL_S = 0.0005
_MAX_POLL_S = 0.005
CLOSING_S = 1.0
"""The deadline of a bucket on its way once the sender is being closed."""


class WeightUpdate(JointUpdate):
    """A transaction on the engines behind `links`, used once.

    `fields`: of begin, `update_id` among them.  `num_bytes`: how many will be sent, for `progress(done, total)`; None:
    not known.  `closing`: set by another thread that closes the sender; the update is aborted then.  `lost`: the errors
    of engines that were lost before, which take no part and are reported again.  `rooms`: for buckets of the caller, in
    memory that engines map; None: each takes its own.

    An engine of a shared group that fails before all was sent ends the update on all, whatever the policy: the others
    cannot go on in that group.
    """

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        on_engine_failure: OnEngineFailure,
        device: torch.device,
        fields: dict[str, Any],
        num_bytes: int | None = None,
        progress: Progress | None = None,
        closing: threading.Event | None = None,
        lost: Mapping[str, BaseException] | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        links = dict(links)  # an engine that is removed meanwhile stays in it: its update must be ended or dropped
        super().__init__(links, on_engine_failure, fields)
        for name, link in links.items():
            self.engines[name].transport = link.transport
        self._links = links
        self._in_shared = {name for name, link in links.items() if link.group is not None and link.group.is_shared}
        self._is_sent = False
        self._lost_before = lost or {}
        self.lost: dict[str, BaseException] = {}
        """Errors of the engines by which a shared group ended: all other engines of it join the next one again."""
        self._device = device
        self.meanwhile: Callable[[], bool] | None = None
        """Packs a part of the first bucket, while engines begin; returns whether there was one left."""
        self._num_bytes, self._progress = num_bytes, progress
        self._rooms = rooms  # of this update alone
        self._num_packed = 0
        self._closing = closing or threading.Event()
        self._sending: deque[list[Sending]] = deque()  # by group; the oldest bucket first
        self.bytes_sent = 0
        self.buckets_sent = 0

    @property
    def failures(self) -> Mapping[str, BaseException]:
        """The errors of the engines that have failed so far."""
        return self._failures

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send one bucket of tensors in the engine's dtype, on any device.  A copy is sent: they may change afterwards.

        Returns when the bucket before is there, with this one on its way.  Raises `EngineError`, `WeightRequestError`.
        """
        named = [(name, tensor.detach()) for name, tensor in named_tensors]
        named.sort(key=lambda item: -item[1].dtype.itemsize)  # so that it can be packed
        metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        if self._rooms is None:
            content, address, filled = pack(named).to(self._device), None, 0
        else:
            num_bytes = sum(meta.nbytes for meta in metas)
            room = self._rooms.take(self._num_packed, num_bytes, self._device, shared=True)
            self._num_packed += 1  # also of a bucket that was refused: the one behind it may be on its way
            content, address, filled = pack(named, room.content), room.address, num_bytes
        pieces = iter(split_pieces(metas, content))  # which holds nothing once they were sent
        lists = TensorLists.of(metas)
        self.send_bucket(Bucket(lists, pieces, content.numel(), memory=address, filled=filled))

    def send_bucket(self, bucket: Bucket | Mapping[str, Bucket]) -> None:
        """Send a bucket as `send` does, or to each engine its own, by name; one that has none is sent nothing.

        The content of `pieces` must not change until the next call returns.  They are asked for here: the time that
        this takes counts as `pack`.
        """
        if not self._is_entered:
            raise TransactionStateError("the weight update has ended or was not entered")
        with self.parts.timed("send"):
            # So a bucket that is broadcast is taken up before the next one, which the engine then finds waiting.  One
            # that lies in memory may be read after the next one: no message of it could be mixed up.
            await_all(
                [one for sending in self._sending for one in sending],
                lambda one: one.poll() or one.has_begun,
                self._require_open,
            )
            while any(one.failures for sending in self._sending for one in sending):
                self._finish()  # their groups may be gone
            label = self._fields["weight_version"]
            groups = dict.fromkeys(self._links[name].require_group() for name in self._active)
            own = [bucket.get(group.links[0].name) if isinstance(bucket, Mapping) else bucket for group in groups]
            self._sending.append(
                [group.start(each, label, self._update_id) for group, each in zip(groups, own) if each is not None]
            )
            with self.parts.timed("pack"):
                start_pieces(self._sending[-1])
            if len(self._sending) > 1:
                self._finish()

    def flush(self) -> None:
        """Wait until the engines have taken every bucket.  Raises `EngineError`."""
        with self.parts.timed("send"):
            while self._sending:
                self._finish()

    # --- the transaction ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._require_connected()
        super()._begin()

    def _while_begins(self, calls: Collection[Future[Any]]) -> None:
        with self.parts.timed("pack"):
            while self.meanwhile is not None and not all(call.done() for call in calls) and self.meanwhile():
                pass

    def _require_connected(self) -> None:
        failed: dict[str, BaseException] = {
            name: self._lost_before.get(name) or TransactionStateError("not connected; connect first")
            for name, link in self._links.items()
            if link.group is None or name in self._lost_before
        }
        self._settle(failed)  # before anything is asked of the others

    def _finish(self) -> None:
        """Wait for the engines' answers to the oldest bucket on its way.  Raises `EngineError`."""
        sending = self._sending[0]
        failed = self._drain(sending, self._require_open)
        self._sending.popleft()
        self._settle(failed)
        self.bytes_sent += max((one.bucket.num_bytes for one in sending), default=0)
        self.buckets_sent += 1
        if self._progress is not None:
            self._progress(self.bytes_sent, self.bytes_sent if self._num_bytes is None else self._num_bytes)

    def _end(self) -> None:
        self.flush()
        self._is_sent = True
        super()._end()

    def _leave(self, cause: BaseException | None) -> None:
        """Leave the update; an interrupt does not wait for the bucket on its way, whose groups are left then."""
        is_interrupted = cause is not None and not isinstance(cause, Exception)
        if is_interrupted or self._closing.is_set():
            for one in (one for sending in self._sending for one in sending):
                one.shorten_deadline(0.0 if is_interrupted else CLOSING_S)
        while self._sending:
            self._drain(self._sending.popleft(), nothing)
        super()._leave(cause)
        if self._rooms is not None:
            self._rooms.clear()
        # So `connect` takes in what gave no answer, or the engine in its place, and `close` does not wait for it.
        silent = self._silent | {name for name, error in self._failures.items() if gave_no_answer(error)}
        leave_failed(self._links[name] for name in silent | self._failures.keys() & self._in_shared)
        for name in self.lost:
            self._links[name].rejoins = False

    def _settle(self, failed: Mapping[str, BaseException]) -> None:
        """Settle as for single engines; in a shared group only the engines to blame are lost."""
        shared = {name: failed[name] for name in failed.keys() & self._in_shared & set(self._active)}
        if shared:
            self.lost |= shared if self._is_sent else self._to_blame(shared)
            apart = {name: error for name, error in failed.items() if name not in shared}
            failed = apart | ({name: shared[name] for name in shared.keys() & self.lost.keys()} or shared)
        super()._settle(failed)

    def _ends_all(self) -> bool:
        return super()._ends_all() or (not self._is_sent and bool(self._failures.keys() & self._in_shared))

    def begins_again(self) -> bool:
        """Return whether the engines that are left can take all of it again, as a shared group ended too early."""
        rejoin = any(link.rejoins for link in self._links.values())
        return self._policy == "leave_out" and not self._is_sent and rejoin and not self._closing.is_set()

    def _to_blame(self, failed: dict[str, BaseException]) -> dict[str, BaseException]:
        """Return the failures that ended a shared group.  Where that is not clear an abort shows who is silent."""
        if blamed := to_blame(failed):
            return blamed
        asked = self._wait("abort_weight_update", self._call("abort_weight_update", failed), ABORT_S)
        self._open -= failed.keys()
        return {name: failed[name] for name, error in asked.items() if not was_refused(error)}

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise TransactionStateError("the sender is being closed on another thread")

    def _drain(self, sending: Collection[Sending], check: Callable[[], None]) -> dict[str, BaseException]:
        """Wait for a bucket on its way; which engines failed, and with what."""
        await_all(sending, Sending.poll, check)
        wait([leaving for one in sending for leaving in one.leaving])
        failed = {name: error for one in sending for name, error in (one.failures or {}).items()}
        for one in sending:
            for name in one.engines - failed.keys():
                self.engines[name].num_bytes += one.bucket.num_bytes
        return failed


def await_all(everything: Collection[Sending], is_so: Callable[[Sending], bool], check: Callable[[], None]) -> None:
    """Wait until it is so of all.  Looks at once when an engine answers, else less and less often: engines on this
    machine need its cores.  Raises what `check` raises, which is called before each look."""
    has_answered = threading.Event()
    for call in (call for one in everything for call in one.unanswered):
        call.add_done_callback(lambda _: has_answered.set())
    poll_s = _POLL_S
    check()
    while [one for one in everything if not is_so(one)]:
        has_answered.wait(poll_s)
        has_answered.clear()
        poll_s = min(1.1 * poll_s, _MAX_POLL_S)
        check()


def nothing() -> None:
    """Check nothing: the wait goes to its end."""
