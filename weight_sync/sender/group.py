"""A process group of this process, its rank 0, and the ranks of one engine or more; a bucket on its way there.

a group for each engine    one that dies or hangs breaks no other one's
one group for all          a broadcast reaches all; one that fails ends it for all, and the others join a new one
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from weight_sync.engine_control import refusal, to_blame, was_not_found
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group, leave_late
from weight_sync.receivers.distributed import PIECES
from weight_sync.sender.link import GRACE_S, Bucket, EngineLink
from weight_sync.sender.rank_groups import RankGroups, RankPiece, free_ports
from weight_sync.waiting import Patience, in_thread

_SETTLE_S = 0.5
_ANSWER_S = 5.0
"""For engines to answer that a rendezvous has failed: who is silent then has held it up."""


@dataclass(frozen=True)
class MeetingPlace:
    """The place at which engines join this process.

    `port`: of the first group; None: free ones.  `backend`: a resolved one.  `num_ranks`: how many each engine must
    have; None: any number.  `shared`: all engines join one group.
    """

    address: str
    port: int | None
    group_name: str
    backend: str
    num_ranks: int | None
    shared: bool
    _attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def join(self, links: Mapping[str, EngineLink], names: Collection[str]) -> dict[str, BaseException]:
        """Join with the engines of these names, asked all at once; return the errors of the ones that did not come."""
        asked = {name: in_thread(links[name].num_ranks, self.num_ranks) for name in links if name in names}
        wait(asked.values())  # each has a deadline
        failed = _refusals(asked)
        sizes = {name: call.result() for name, call in asked.items() if name not in failed}
        if self.shared:
            return failed | self._join_together(links, sizes)
        ports = {free_port() for _ in sizes}
        while len(ports) < len(sizes):
            ports.add(free_port())
        joining = []
        for position, name in enumerate(links):
            if name in sizes:
                port = ports.pop() if self.port is None else self.port + position
                group_name = self.group_name if len(links) == 1 else f"{self.group_name}-{name}"
                place = replace(self, port=port, group_name=group_name)
                joining.append(in_thread(_join, {links[name]: sizes[name]}, place))
        wait(joining)  # each has a deadline
        return failed | {name: error for call in joining for name, error in call.result().items()}

    def _join_together(self, links: Mapping[str, EngineLink], sizes: Mapping[str, int]) -> dict[str, BaseException]:
        """Join one group; again without engines by which an attempt failed.  Each attempt's group has another name."""
        failed: dict[str, BaseException] = {}
        while coming := {links[name]: size for name, size in sizes.items() if name not in failed}:
            attempt = next(self._attempts)
            port = free_port() if self.port is None else self.port
            name = self.group_name if attempt == 1 else f"{self.group_name}#{attempt}"
            if not (lost := _join(coming, replace(self, port=port, group_name=name))):
                break
            failed |= lost
        return failed


def _join(coming: Mapping[EngineLink, int], place: MeetingPlace) -> dict[str, BaseException]:
    """Join one group with engines, given with their numbers of ranks.

    Returns the errors of the engines that prevented it: then none has joined.
    """
    assert place.port is not None
    timeout_s, world_size = max(link.timeout_s for link in coming), 1 + sum(coming.values())
    ends_at, patience = time.monotonic() + timeout_s, Patience()
    fields: dict[str, Any] = {"master_port": place.port, "world_size": world_size}
    joins: Callable[..., GroupHandle | RankGroups] = init_process_group
    where: tuple[Any, ...] = place.port, 0, world_size
    if any(link.per_rank is not None for link in coming):
        ports = free_ports(world_size - 1)
        fields, joins, where = (
            {"master_port": ports[0], "world_size": 2, "rank_ports": ports},
            RankGroups.join,
            (ports,),
        )
    calls = {
        link.name: link.call(
            "init_weights_update_group",
            master_address=place.address,
            rank_offset=offset,
            group_name=place.group_name,
            backend=place.backend,
            **fields,
        )
        for link, offset in zip(coming, itertools.accumulate(coming.values(), initial=1))
    }
    joining = in_thread(joins, place.address, *where, place.group_name, place.backend, timeout_s, patience)
    everything = [*calls.values(), joining]
    wait(everything, timeout=timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
    if all(call.done() and refusal(call) is None for call in everything):
        group = SenderGroup(joining.result(), list(coming))
        for link in coming:
            link.group, link.rejoins = group, False
        return {}
    own = refusal(joining) if time.monotonic() < ends_at else None
    joining.add_done_callback(leave_late)
    early = _refusals(calls)
    patience.give_up("an engine did not join")  # the others fail at once
    for link in coming:
        if link.name not in early:  # one that has not come yet would wait for us
            link.call("destroy_weights_update_group", group_name=place.group_name)
    wait(calls.values(), timeout=_ANSWER_S if len(calls) > 1 else 0.0)
    did_not = own or TransportError(f"the engine did not join within {timeout_s:g} s")
    silent = {name: did_not for name, call in calls.items() if not call.done()}
    late = _refusals(calls)
    return to_blame(late) or silent or early or late or dict.fromkeys(calls, did_not)


def _refusals(calls: Mapping[str, Future[Any]]) -> dict[str, BaseException]:
    return {name: error for name, call in calls.items() if (error := refusal(call)) is not None}


class SenderGroup:
    """A joined group, with the engines whose ranks are in it."""

    def __init__(self, handle: GroupHandle | RankGroups, links: Sequence[EngineLink]) -> None:
        self.handle = handle
        self.links = links
        self.has_ended = False

    @property
    def timeout_s(self) -> float:
        return max(link.timeout_s for link in self.links)

    @property
    def is_shared(self) -> bool:
        return len(self.links) > 1

    def start(self, bucket: Bucket, weight_version: str | None, update_id: str) -> Sending:
        """Send a bucket without waiting.  What `bucket.pieces` hold must not change until it is done."""
        boxes = {} if bucket.lists.boxes is None else {"boxes": bucket.lists.boxes}
        calls = {
            link.name: link.call(
                "update_weights_from_distributed",
                **boxes,
                names=bucket.lists.names,
                dtypes=bucket.lists.dtypes,
                shapes=bucket.lists.shapes,
                group_name=self.handle.name,
                load_format=PIECES,
                weight_version=weight_version,
                update_id=update_id,
                **bucket.more,
            )
            for link in self.links
        }
        return Sending(self, calls, bucket)

    def start_piece(self, piece: torch.Tensor | RankPiece) -> dist.Work:
        """Start to broadcast a piece of a bucket.  Raises as `GroupHandle.start_broadcast`."""
        if isinstance(self.handle, RankGroups):
            assert isinstance(piece, RankPiece), "a piece for a rank goes to its group"
            return self.handle.start_broadcast(piece, self.timeout_s)
        assert isinstance(piece, torch.Tensor), "all ranks of a group get the same"
        return self.handle.start_broadcast(piece, self.timeout_s)

    def leave(self) -> dict[str, BaseException]:
        """Leave the group and have the engines leave it, unless they have; return what they refused."""
        calls = self._end()
        wait(calls.values(), timeout=self.timeout_s)
        self.handle.destroy()
        late = TransportError(f"the engine did not leave the group within {self.timeout_s:g} s")
        refused = {name: refusal(call) if call.done() else late for name, call in calls.items()}
        return {name: error for name, error in refused.items() if error is not None and not was_not_found(error)}

    def leave_failed(self) -> None:
        """Leave a group that broke, on both sides: a broadcast pending here ends when an engine closes its end.

        Engines of a shared group join the next one again, unless the caller decides otherwise.
        """
        if self.has_ended:
            return
        self.handle.broken = True
        # An engine may have left, hang, or have died.  If it hangs, leaving waits for the broadcast's deadline.
        wait(self._end().values(), timeout=GRACE_S)
        wait([in_thread(self.handle.destroy)], timeout=GRACE_S)

    def _end(self) -> dict[str, Future[Any]]:
        """Take the group from the engines, and ask them to leave it."""
        self.has_ended = True
        for link in self.links:
            link.group, link.rejoins = None, self.is_shared
        name = self.handle.name
        return {link.name: link.call("destroy_weights_update_group", group_name=name) for link in self.links}


class Sending:
    """One bucket on its way to a group: the broadcasts, and `calls`, the engines' answers.  `poll` until it is over."""

    def __init__(self, group: SenderGroup, calls: dict[str, Future[Any]], bucket: Bucket) -> None:
        self.bucket = bucket
        self.failures: dict[str, BaseException] | None = None
        """Once it is over, the errors of engines; the others have the bucket."""
        self._group, self._calls = group, calls
        self._works: list[dist.Work] = []
        self._deadline = time.monotonic() + group.timeout_s
        self._broke: TransportError | None = None
        self._reason_deadline = 0.0
        self._is_sent = False
        for call in calls.values():
            call.add_done_callback(self._end_connecting)
        try:
            for piece in bucket.pieces:
                self._works.append(group.start_piece(piece))
        except TransportError as error:
            self._break(error)

    @property
    def engines(self) -> Collection[str]:
        return self._calls.keys()

    @property
    def unanswered(self) -> list[Future[Any]]:
        return [call for call in self._calls.values() if not call.done()]

    def poll(self) -> bool:
        """Return whether the sending is over.  Waits only to leave a group that broke, and not for long."""
        if self.failures is not None:
            return True
        now, refused = time.monotonic(), _refusals(self._calls)
        if self._group.has_ended:
            self.failures = self._all(TransportError("the group ended with an earlier bucket"))
        elif self._broke is not None:
            # An engine's own reason is the better one, if it has one.
            if to_blame(refused) or not self.unanswered or now > self._reason_deadline:
                self._fail(self._all(self._broke) | refused, self._broke)
        elif self._is_sent:
            if not self.unanswered:
                self.failures = refused
            elif now > self._deadline + GRACE_S:
                within = f"within {self._group.timeout_s:g} s"
                silent = TransportError(f"the engine took a bucket, but did not answer {within}")
                self._fail({name: silent for name, call in self._calls.items() if not call.done()} | refused)
        elif all(work.is_completed() for work in self._works):
            self._finish_broadcast()
        elif now > self._deadline:
            self._break(TransportError(f"the engine did not take a bucket within {self._group.timeout_s:g} s"))
        elif refused:
            self.shorten_deadline(_SETTLE_S)  # refused after it was received: soon done then
        return self.failures is not None

    @property
    def has_begun(self) -> bool:
        """True once every engine has taken up this bucket.

        The only one has if the first piece is there or if it answered.  A broadcast to several ends here before all of
        them have begun.
        """
        is_taken = not self._group.is_shared and any(work.is_completed() for work in self._works[:1])
        return self.failures is not None or not self.unanswered or is_taken

    def shorten_deadline(self, within_s: float) -> None:
        """Give the bucket no longer than `within_s` seconds from now."""
        self._deadline = min(self._deadline, time.monotonic() + within_s)

    def _end_connecting(self, call: Future[Any]) -> None:
        if (error := refusal(call)) is not None:
            self._group.handle.end_connecting(str(error))

    def _all(self, error: BaseException) -> dict[str, BaseException]:
        return dict.fromkeys(self._calls, error)

    def _finish_broadcast(self) -> None:
        try:
            for work in self._works:
                self._group.handle.finish(work, self._deadline)
            self._is_sent = True
        except TransportError as error:
            self._break(error)

    def _break(self, error: TransportError) -> None:
        self._broke = error
        self._reason_deadline = time.monotonic() + GRACE_S

    def _fail(self, failures: dict[str, BaseException], cause: TransportError | None = None) -> None:
        """Give up the group, which is of no use any more."""
        for error in failures.values():
            if cause is not None and cause is not error:
                error.__cause__ = cause
        self.failures = failures
        self._group.leave_failed()
