"""One engine as the sender sees it: control calls in threads, the group that both are in, a bucket on its way there."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weight_sync.bucket import cut_pieces
from weight_sync.engine_control import EngineControl, refusal, refusals_of, to_blame, was_not_found
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.process_group import GroupHandle
from weight_sync.receivers.distributed import PIECE_BYTES, PIECES
from weight_sync.sealed_memory import MemoryAddress
from weight_sync.sender.carriers import Carrier
from weight_sync.sender.lists import Manifest, TensorLists
from weight_sync.sender.rank_groups import EngineRanks, RankGroups, RankPiece
from weight_sync.tensor_meta import TensorMeta
from weight_sync.waiting import in_thread

GRACE_S = 2.0
"""Over a deadline, for the engine's own error, which states more than that the deadline passed."""
_SETTLE_S = 0.5


@dataclass(frozen=True, eq=False)
class Bucket:
    """The tensors that one call sends, end to end, in `pieces`, uint8, as `split_pieces` cuts them.

    `pieces`: used once, while the ones before are on their way.  `num_bytes`: of all of them.  `more`: further fields
    of the call.  `memory`: where the pieces lie, which engines may read; None: anywhere.  `filled`: the bytes of the
    first pieces, which lie there already.  `answer_s`: for the answer, once all is sent; it has the bucket's deadline
    at least.
    """

    lists: TensorLists
    pieces: Iterable[torch.Tensor] | Iterable[RankPiece]
    num_bytes: int
    more: Mapping[str, Any] = field(default_factory=dict)
    memory: MemoryAddress | None = None
    filled: int = 0
    answer_s: float = 0.0


def split_pieces(metas: Sequence[TensorMeta], content: torch.Tensor) -> list[torch.Tensor]:
    """Return the content of a bucket, uint8 [bytes], as it is broadcast: views."""
    sizes = [sum(meta.nbytes for meta in piece) for piece in cut_pieces(metas, PIECE_BYTES)]
    return list(content.split(sizes)) if sizes else []


class EngineLink:
    """`timeout_s`: deadline of the rendezvous, of each bucket and of each call.

    `per_rank`: what each rank of the engine keeps, which is what it is sent; None: all ranks are sent all.
    """

    def __init__(
        self, name: str, control: EngineControl, timeout_s: float, per_rank: EngineRanks | None = None
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.per_rank = per_rank
        self.group: SenderGroup | None = None
        self.transport = ""
        """The way by which buckets reach it since it joined, for the report."""
        self.rejoins = False
        """Its group ended through the failure of another engine: it joins the next one by itself."""
        self.leaving: Future[None] | None = None
        """Done once this process has left the last group with it that broke: its name is in use until then."""
        self._control = control

    def require_group(self) -> SenderGroup:
        """Return the joined group.  Raises `TransactionStateError`."""
        if self.group is None:
            raise TransactionStateError(f"engine {self.name} is not connected; connect first")
        return self.group

    def num_ranks(self, expected: int | None) -> int:
        """Ask the engine for the number of its ranks.

        Raises `WeightRequestError` if others are expected, or if it does not state what its ranks keep and has to.
        """
        if self.per_rank is not None and getattr(self._control, "weight_parts", None) is None:
            raise WeightRequestError("per_rank needs an engine with weight_parts")
        if getattr(self._control, "get_world_size", None) is None:
            return 1 if expected is None else expected
        asked = self.call("get_world_size")
        wait([asked], timeout=self.timeout_s + GRACE_S)
        if not asked.done():
            raise TransportError(f"the engine did not report its number of ranks within {self.timeout_s:g} s")
        if isinstance(asked.exception(), AttributeError):  # a wrapper of a control that has no such call
            return 1 if expected is None else expected
        num_ranks = int(asked.result())
        if expected not in (None, num_ranks):
            raise WeightRequestError(
                f"engine_world_size is {expected}, but the engine has {num_ranks} ranks; leave it out"
            )
        return num_ranks

    def takes_whole_updates(self, joined: Any) -> bool:
        """Return whether a bucket's call may begin and end its update, by the engine's answer when it joined."""
        states_it = isinstance(joined, Mapping) and joined.get("whole_updates") is True
        bucket = getattr(self._control, "update_weights_from_distributed", None)
        return states_it and bucket is not None and "whole_update" in inspect.signature(bucket).parameters

    def call(self, verb: str, **fields: Any) -> Future[Any]:
        """Start a control call.  An engine that does not take `prepared_s` does not get it; one that does not take
        lists gets the entries of a manifest.
        """
        control = getattr(self._control, verb)
        manifest = fields.get("manifest")
        if isinstance(manifest, Manifest):
            takes_lists = getattr(self._control, "takes_lists", False) is True  # a wrapper may have any attribute
            fields["manifest"] = manifest.as_lists() if takes_lists else manifest.as_entries()
        if verb == "begin_weight_update" and self.per_rank is not None:
            fields |= self.per_rank.begin_fields
        if "prepared_s" in fields and not self.takes(verb, "prepared_s"):
            del fields["prepared_s"]
        return in_thread(control, **fields)

    def takes(self, verb: str, field: str) -> bool:
        """Return whether a control call has this field."""
        return field in inspect.signature(getattr(self._control, verb)).parameters


class SenderGroup:
    """A joined group, with the engines whose ranks are in it.

    `takes_whole_updates`: a call for a bucket may begin its update, and end it.
    """

    def __init__(
        self,
        handle: GroupHandle | RankGroups,
        links: Sequence[EngineLink],
        carrier: Carrier,
        *,
        takes_whole_updates: bool = False,
    ) -> None:
        self.handle = handle
        self.carrier = carrier
        self.links = links
        self.takes_whole_updates = takes_whole_updates
        self.has_ended = False
        self._leaving: Future[None] = Future()
        self._leaving.set_result(None)

    @property
    def timeout_s(self) -> float:
        return max(link.timeout_s for link in self.links)

    @property
    def is_shared(self) -> bool:
        return len(self.links) > 1

    def start(self, bucket: Bucket, weight_version: str | None, update_id: str) -> Sending:
        """Announce a bucket, whose pieces `start_pieces` sends.  Returns without waiting."""
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
                **self.carrier.fields(bucket.memory, bucket.filled),
                **bucket.more,
            )
            for link in self.links
        }
        return Sending(self, calls, bucket)

    def leave(self) -> dict[str, BaseException]:
        """Leave the group and have the engines leave it, unless they have; return what they refused."""
        return leave_all([self])

    def leave_failed(self) -> Future[None]:
        """Begin to leave a group that broke, on both sides; return what is done some seconds later.

        A broadcast pending here ends when an engine closes its end.  Engines of a shared group join the next one
        again, unless the caller decides otherwise.
        """
        if not self.has_ended:
            self.handle.broken = True
            # An engine may have left, hang, or have died.  If it hangs, leaving waits for the broadcast's deadline.
            self._leaving = in_thread(_leave, [self], self.end().values(), GRACE_S)
            for link in self.links:
                link.leaving = self._leaving
        return self._leaving

    def end(self) -> dict[str, Future[Any]]:
        """Take the group from the engines, and ask them to leave it."""
        self.has_ended = True
        for link in self.links:
            link.group, link.rejoins = None, self.is_shared
        name = self.handle.name
        return {link.name: link.call("destroy_weights_update_group", group_name=name) for link in self.links}


def leave_all(groups: Collection[SenderGroup]) -> dict[str, BaseException]:
    """Leave groups as `SenderGroup.leave`, at the same time: many engines that hang cost one deadline."""
    timeout_s = max((group.timeout_s for group in groups), default=0.0)
    calls = {name: call for group in groups for name, call in group.end().items()}
    _leave(groups, calls.values(), timeout_s)
    late = TransportError(f"the engine did not leave the group within {timeout_s:g} s")
    refused = {name: refusal(call) if call.done() else late for name, call in calls.items()}
    return {name: error for name, error in refused.items() if error is not None and not was_not_found(error)}


def leave_failed(links: Iterable[EngineLink]) -> None:
    """Leave the groups of engines as `SenderGroup.leave_failed`, at the same time; wait for it."""
    wait([link.group.leave_failed() for link in links if link.group is not None])


def _leave(groups: Collection[SenderGroup], calls: Collection[Future[Any]], within_s: float) -> None:
    try:
        wait(calls, timeout=within_s)
    finally:  # an interrupt must not keep it: no later call knows the groups, and their names are in use until then
        wait([in_thread(group.handle.destroy) for group in groups], timeout=GRACE_S)


class Sending:
    """One bucket on its way to a group: the broadcasts, and `calls`, the engines' answers.  `poll` until it is over."""

    def __init__(self, group: SenderGroup, calls: dict[str, Future[Any]], bucket: Bucket) -> None:
        self.bucket = bucket
        self.failures: dict[str, BaseException] | None = None
        """Once it is over, the errors of engines; the others have the bucket."""
        self._group, self._calls = group, calls
        self._works: list[dist.Work] = []
        self._deadline = time.monotonic() + group.timeout_s
        self._answer_s = bucket.answer_s
        self._broke: TransportError | None = None
        self._reason_deadline = 0.0
        self._is_sent = False
        self._sent_at = 0.0
        self._num_started = 0  # bytes
        self._filled = bucket.filled if group.carrier.reads_memory else 0
        for call in calls.values():
            call.add_done_callback(self._end_connecting)

    def start_piece(self, piece: torch.Tensor | RankPiece) -> None:
        """Start to send the next piece, unless it was there before the call, or an earlier one failed."""
        start = self._num_started
        self._num_started += piece.numel()
        if self._broke is not None or start < self._filled:
            return
        try:
            self._works.append(self._group.carrier.start(piece, start, self.bucket.memory, self._group.timeout_s))
        except TransportError as error:
            self._break(error)

    @property
    def leaving(self) -> list[Future[None]]:
        """Return, if the group broke, what is done once this process has left it."""
        return [self._group.leave_failed()] if self._group.has_ended else []

    def give_up(self) -> None:
        """Leave the group: pieces that the engines wait for will not come."""
        self._group.leave_failed()

    @property
    def engines(self) -> Collection[str]:
        return self._calls.keys()

    @property
    def unanswered(self) -> list[Future[Any]]:
        return [call for call in self._calls.values() if not call.done()]

    @property
    def is_sent(self) -> bool:
        """True once nothing is left to broadcast, as `poll` found; the answers may still be missing."""
        return self._is_sent

    def answers(self) -> dict[str, Any]:
        """Return the answers of the engines that have the bucket, once the sending is over."""
        return {name: call.result() or {} for name, call in self._calls.items() if name not in (self.failures or ())}

    def poll(self) -> bool:
        """Return whether the sending is over.  Waits for nothing; a group that broke is being left then."""
        if self.failures is not None:
            return True
        is_under_way = not (self._group.has_ended or self._is_sent or self._broke is not None)
        if is_under_way and all(work.is_completed() for work in self._works):
            self._finish_broadcast()  # before the answers are looked at: the last of them may be there
        has_unanswered = bool(self.unanswered)  # before the refusals are read, so that none is overlooked
        now, refused = time.monotonic(), refusals_of(self._calls)
        if self._group.has_ended:
            self.failures = self._all(TransportError("the group ended with an earlier bucket"))
        elif self._broke is not None:
            # An engine's own reason is the better one, if it has one.
            if to_blame(refused) or not has_unanswered or now > self._reason_deadline:
                self._fail(self._all(self._broke) | refused, self._broke)
        elif self._is_sent:
            if not has_unanswered and any(map(was_not_found, refused.values())):
                self._fail(refused)  # an engine has lost the group: of a bucket without notices no broadcast fails
            elif not has_unanswered:
                self.failures = refused
            elif now > max(self._deadline, self._sent_at + self._answer_s) + GRACE_S:
                within = f"within {self._group.timeout_s:g} s"
                silent = TransportError(f"the engine took a bucket, but did not answer {within}")
                self._fail({name: silent for name, call in self._calls.items() if not call.done()} | refused)
        elif now > self._deadline:
            self._break(TransportError(f"the engine did not take a bucket within {self._group.timeout_s:g} s"))
        elif refused:
            self.shorten_deadline(_SETTLE_S)  # refused after it was received: soon done then
        return self.failures is not None

    @property
    def has_begun(self) -> bool:
        """True once the next bucket may be announced.

        With one engine in the group: if the first piece was taken, or if it answered.  A bucket that lay in memory
        before its call counts as taken at the first poll, as nothing of it is sent.  With several: if all answered, as
        a broadcast ends here before all of them have begun.
        """
        is_taken = self._is_sent or any(work.is_completed() for work in self._works[:1])
        return self.failures is not None or not self.unanswered or (is_taken and not self._group.is_shared)

    def shorten_deadline(self, within_s: float) -> None:
        """Give the bucket no longer than `within_s` seconds from now."""
        self._answer_s = 0.0
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
            self._is_sent, self._sent_at = True, time.monotonic()
            self._works.clear()  # with the pieces, which they hold
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


def start_pieces(sendings: Sequence[Sending]) -> None:
    """Start to send the pieces of announced buckets: each is packed once, and goes to every group.

    What the pieces hold must not change until the sendings are over.  Raises what packing raises: all groups are left.
    """
    by_bucket: dict[Bucket, list[Sending]] = {}
    for sending in sendings:
        by_bucket.setdefault(sending.bucket, []).append(sending)
    try:
        for bucket, some in by_bucket.items():
            for piece in bucket.pieces:
                for sending in some:
                    sending.start_piece(piece)
    except BaseException:
        for sending in sendings:
            sending.give_up()
        raise
