"""`RankRefresh`: a refresh in which engines state what their ranks keep, and each rank is sent that.

asked      once for the same tensors (`weight_parts`)
planned    once for the same answers (`rank_plan`)
begun      with the placement epoch of the answer: an engine whose experts have moved since refuses
again      what it keeps now is asked and planned, once in a refresh
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from typing import Any, TypeVar

from weight_sync.engine_control import EngineError, gave_no_answer, refusal, was_refused
from weight_sync.errors import TransactionStateError, TransportError, WeightRequestError
from weight_sync.rank_boxes import RankBoxes
from weight_sync.sender.gather import Gatherer
from weight_sync.sender.layout import Layout
from weight_sync.sender.link import Bucket, EngineLink, leave_failed
from weight_sync.sender.rank_groups import EngineRanks
from weight_sync.sender.rank_plan import RankPlan
from weight_sync.sender.refresh import Refresh
from weight_sync.sender.refresh_plan import RefreshPlan
from weight_sync.sender.rooms import Room
from weight_sync.sender.update import WeightUpdate

T = TypeVar("T")


class _MovedError(TransactionStateError):
    """Engines have moved experts since they were asked what their ranks keep."""


class RankRefresh:
    """The sending of `refresh` to the engines behind `links`.

    All trainer ranks make one and call `run`.  Ranks that do not send have no links.  `room(number, bytes)`: for what
    call `number` sends.  `leaves_out`: an engine that does not answer is left out.
    """

    def __init__(
        self,
        links: Mapping[str, EngineLink],
        refresh: Refresh,
        room: Callable[[int, int], Room],
        *,
        leaves_out: bool,
    ) -> None:
        self._leaves_out = leaves_out
        self._links = {name: link for name, link in links.items() if link.group is not None}
        assert isinstance(refresh.plan, RefreshPlan), "shards go to all ranks of an engine alike"
        self._refresh, self._plan, self._ranks = refresh, refresh.plan, refresh.ranks
        self._room, self._parts = room, refresh.parts
        self._plans: dict[str, RankPlan] = {}
        self._lost: dict[str, BaseException] = {}
        """Errors of engines that did not state their parts: they are not asked again, nor sent anything."""

    def run(self, new_update: Callable[[int, Mapping[str, BaseException]], WeightUpdate]) -> None:
        """Send everything in one update, which `new_update(bytes to send, errors of engines left out)` makes.

        Raises as `WeightSender.refresh`, and `TransactionStateError` where experts move a second time.
        """
        try:
            self._run(new_update)
        except _MovedError:
            self._run(new_update)

    def _run(self, new_update: Callable[[int, Mapping[str, BaseException]], WeightUpdate]) -> None:
        with self._parts.timed("plan"):
            self._prepare()
        update = None
        if self._refresh.is_sender:
            update = new_update(max((plan.num_bytes for plan in self._plans.values()), default=0), self._lost)
            self._refresh.engines = update.engines
        try:
            with contextlib.ExitStack() as stack:
                self._begin(update, stack)
                self._send(update)
        finally:
            self._parts.add(update.parts if update is not None else {})
        if update is None and self._ranks is not None:
            with self._parts.timed("end"):
                self._ranks.jointly(lambda: None)  # the engines' final answers

    def _prepare(self) -> None:
        """Ask the engines that were not asked about these tensors, and plan."""
        self._plans = {
            name: self._plan.for_ranks(RankBoxes(**stated), self._refresh.source, self._ranks)
            for name, stated in self._agreed(self._stated).items()
        }

    def _begin(self, update: WeightUpdate | None, stack: contextlib.ExitStack) -> None:
        """Begin the update, which ends with `stack`.  Raises `_MovedError`, and as the update does."""

        def begin() -> list[str]:
            assert update is not None, "only the sending rank begins"
            try:
                stack.enter_context(update)
            except EngineError:
                if moved := self._moved(update.failures):
                    return moved
                raise
            return self._moved(update.failures)

        moved = self._agreed(begin)
        if moved:
            raise _MovedError(f"experts moved on {', '.join(moved)} after it stated the parts that its ranks keep")

    def _send(self, update: WeightUpdate | None) -> None:
        gatherers = {plan: self._gatherer(plan.layout) for plan in dict.fromkeys(self._plans.values())}
        self._refresh.num_buckets = max((len(plan.calls) for plan in gatherers), default=0)
        for number in range(self._refresh.num_buckets):
            calls = {plan: plan.calls[number] for plan in gatherers if number < len(plan.calls)}
            with self._parts.timed("pack"):
                flat = (
                    self._room(number, sum(call.room for call in calls.values())).content
                    if self._refresh.is_sender
                    else None
                )
                made: dict[RankPlan, Bucket] = {}
                start = 0
                for plan, call in calls.items():
                    area = None if flat is None else flat[start : start + call.room]
                    made[plan] = call.gather(gatherers[plan], area)
                    start += call.room
            if update is not None:
                update.send_bucket({name: made[plan] for name, plan in self._plans.items() if plan in made})

    def _gatherer(self, layout: Layout) -> Gatherer:
        return self._plan.gatherer(self._refresh.source, self._ranks, layout)

    # --- what engines state --------------------------------------------------------------------------------------

    def _stated(self) -> dict[str, dict[str, Any]]:
        """Return the parts that each engine states.  Raises `EngineError` where one does not, or all are left out."""
        lists = self._plan.contents.lists
        left = {name: link for name, link in self._links.items() if name not in self._lost}
        self._lost |= self._ask([name for name, link in left.items() if _ranks_of(link).asked_for is not lists])
        if self._lost and not (self._leaves_out and len(self._lost) < len(self._links)):
            leave_failed(self._links[name] for name, error in self._lost.items() if gave_no_answer(error))
            raise EngineError(self._lost) from next(iter(self._lost.values()))
        return {name: vars(_ranks_of(link).boxes) for name, link in left.items() if name not in self._lost}

    def _moved(self, failures: Mapping[str, BaseException]) -> list[str]:
        """Ask engines again that have refused the begin; return the ones whose experts have moved."""
        before = {
            name: _ranks_of(self._links[name]).placement_epoch
            for name, error in failures.items()
            if name in self._links and name not in self._lost and was_refused(error)
        }
        failed = self._ask(before)
        return [
            name
            for name, epoch in before.items()
            if name not in failed and _ranks_of(self._links[name]).placement_epoch != epoch
        ]

    def _ask(self, names: Collection[str]) -> dict[str, BaseException]:
        """Ask engines which parts their ranks keep; return the errors of engines that did not answer."""
        lists = self._plan.contents.lists
        fields = {"names": lists.names, "dtypes": lists.dtypes, "shapes": lists.shapes}
        asked = {name: self._links[name].call("weight_parts", **fields) for name in names}
        wait(asked.values(), timeout=max((self._links[name].timeout_s for name in asked), default=0))
        failed: dict[str, BaseException] = {}
        for name, call in asked.items():
            error = refusal(call) if call.done() else TransportError("no answer to weight_parts")
            if error is not None:
                failed[name] = error
                continue
            try:
                boxes = RankBoxes.parsed(call.result(), len(lists.names))
            except WeightRequestError as wrong:
                failed[name] = wrong
                continue
            ranks = _ranks_of(self._links[name])
            ranks.asked_for, ranks.boxes, ranks.placement_epoch = lists, boxes, call.result()["placement_epoch"]
        return failed

    def _agreed(self, work: Callable[[], T]) -> T:
        """Return the result of `work` on the sending rank, on all trainer ranks; a value that JSON has."""
        if self._ranks is None:
            return work()
        mine = self._ranks.jointly(lambda: json.dumps(work()).encode() if self._refresh.is_sender else b"")
        agreed: T = json.loads(self._ranks.from_sender(mine))
        return agreed


def _ranks_of(link: EngineLink) -> EngineRanks:
    assert link.per_rank is not None, "the links of a sender are per rank, all or none"
    return link.per_rank
