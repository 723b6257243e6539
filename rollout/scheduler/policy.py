"""The choice of the requests that run in the next step, and of the ones retracted to make room.

First come, first served within a priority; the oldest request is never retracted, so that it always makes progress.
At most one request is partly prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollout.drafts.base import Draft
from rollout.memory.cache_manager import CacheManager
from rollout.model.adapters import ServedAdapter
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.req import Extend, Req
from rollout.scheduler.waiting_queue import WaitingQueue

MAX_PREFILL_TOKENS = 16384  # prompt tokens of one step when prompts are not split
_SLOTS_KEPT_PER_RUNNING = 4  # decode steps of headroom that an admission leaves to running requests


@dataclass(slots=True)
class StepPlan:
    """One step: prompts (or parts) to compute, the batch that decodes one token, and the retracted requests.

    `drafts`: what each request of the batch may get in addition; empty if the step verifies nothing.  `is_placed`: the
    tokens of the batch and of its drafts have their KV slots already, as a draft has its KV there, too.
    """

    decodes: DecodeBatch
    extends: list[Extend] = field(default_factory=list)
    retracted: list[Req] = field(default_factory=list)
    drafts: Sequence[Draft] = ()
    is_placed: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.extends and not self.decodes

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.extends) + len(self.decodes) + self.num_drafted

    @property
    def num_drafted(self) -> int:
        return sum(len(draft.token_ids) for draft in self.drafts)

    @property
    def num_read_again(self) -> int:
        """The tokens whose KV is read again, where each drafted token reads its sequence by itself."""
        if not self.drafts:
            return 0
        lens = self.decodes.inputs.seq_lens.tolist()
        return sum(len(draft.token_ids) * seq_len for draft, seq_len in zip(self.drafts, lens, strict=True))


@dataclass(frozen=True, slots=True)
class _Misfit:
    """The request with this `arrival` needed `num_slots` and did not get them.

    It needs as many until the prefix cache grows.
    """

    arrival: int
    num_slots: int
    num_inserts: int  # of the prefix cache, at the time


@dataclass(slots=True)
class RequestQueues:
    """The unfinished requests: each is in exactly one of the four queues.

    `ending`: requests whose last token a step in flight samples; they end when it is finished.
    """

    running: DecodeBatch
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    partial: Req | None = None
    ending: list[Req] = field(default_factory=list)

    def enqueue(self, req: Req) -> None:
        """Add `req` behind the requests that came before it, and ahead of those with a higher `priority` value."""
        self.waiting.append(req)

    def all(self) -> list[Req]:
        return [*self.holding_kv(), *self.waiting]

    def adapters(self) -> list[ServedAdapter | None]:
        """Return the adapter that each unfinished request holds."""
        return [req.adapter for req in self.all()]

    def holding_kv(self) -> list[Req]:
        return [*self.running, *([self.partial] if self.partial else []), *self.ending]

    def enter_launch(self, completed: Iterable[Req], ending: Sequence[Req]) -> None:
        """Enter the launch of a step.

        It computes all known tokens of the requests `completed`.  Of these, `ending` get no further token.
        """
        if ending:
            self.running.remove(*ending)
            self.ending += ending
        self.running.join(req for req in completed if req not in ending)

    def drop_finished(self) -> None:
        """Drop the requests that have finished, after a step."""
        self.running.drop_finished()
        self.ending = [req for req in self.ending if not req.finished]


class Policy:
    """Plans steps over `queues` and takes the slots they need from `cache`."""

    def __init__(
        self, queues: RequestQueues, cache: CacheManager, *, chunked_prefill_size: int, max_running_requests: int
    ) -> None:
        self._queues = queues
        self._cache = cache
        self._splits_prompts = chunked_prefill_size > 0
        self._budget = chunked_prefill_size if self._splits_prompts else MAX_PREFILL_TOKENS
        self._max_running = max_running_requests
        self._misfit: _Misfit | None = None

    def plan(
        self,
        weight_epoch: int,
        retract: Callable[[Req], None],
        finish_step: Callable[[], bool] = lambda: False,
        *,
        begins: bool = True,
    ) -> StepPlan:
        """Plan the next step.  `retract(req)` frees the memory of a request and keeps its record.

        `finish_step()` finishes the step in flight, and returns True if there was one.  It is called before any request
        is retracted, as it may end some.  `begins`: whether requests that never ran may begin.
        """
        plan = self._plan(weight_epoch, retract, finish_step, begins)
        while plan.is_empty and self._lacks_slots and self._cache.pins.drop_oldest():
            # pinned prefixes that no request uses must not block all requests
            plan = self._plan(weight_epoch, retract, finish_step, begins)
        return plan

    @property
    def _lacks_slots(self) -> bool:
        queues, misfit = self._queues, self._misfit
        return bool(
            queues.partial or (queues.waiting and misfit is not None and misfit.arrival == queues.waiting[0].arrival)
        )

    def _plan(
        self, weight_epoch: int, retract: Callable[[Req], None], finish_step: Callable[[], bool], begins: bool
    ) -> StepPlan:
        queues = self._queues
        plan = StepPlan(queues.running)
        self._make_room_for_decode(plan, retract, finish_step)
        budget = self._continue_partial(plan, self._budget, len(queues.running))
        if queues.waiting and queues.partial is None:
            self._admit(plan, budget, len(queues.running), weight_epoch, begins)
        return plan

    def _make_room_for_decode(
        self, plan: StepPlan, retract: Callable[[Req], None], finish_step: Callable[[], bool]
    ) -> None:
        queues = self._queues
        while queues.running and self._cache.num_available < len(queues.running):
            if self._cache.pins.drop_oldest() or finish_step():
                continue
            victim = max(queues.holding_kv(), key=lambda req: req.arrival)
            if victim is queues.partial:
                queues.partial = None
            else:
                queues.running.remove(victim)
            retract(victim)
            queues.waiting.appendleft(victim)
            plan.retracted.append(victim)

    def _continue_partial(self, plan: StepPlan, budget: int, reserved: int) -> int:
        """Plan one more chunk of the request that is partly prefilled; return the budget that is left."""
        req = self._queues.partial
        if req is None:
            return budget
        count = min(req.extend_len, budget, self._cache.num_available - reserved)
        if count <= 0:
            return 0
        self._take(plan, req, count)
        return budget - count

    def _admit(self, plan: StepPlan, budget: int, reserved: int, weight_epoch: int, begins: bool) -> None:
        queues, cache = self._queues, self._cache
        if plan.retracted:
            return  # the requests that were just retracted would be admitted again
        passed: list[Req] = []
        in_prefill = {_prompt_key(item.req): item.req.cached_len for item in plan.extends}
        while queues.waiting and budget > 0 and queues.partial is None and len(passed) < self._max_running:
            if len(plan.decodes) + len(plan.extends) >= self._max_running or cache.pool.num_free == 0:
                break
            req = queues.waiting[0]
            if not (begins or req.has_begun):
                break  # retracted requests come first in the queue
            key = _prompt_key(req)
            if in_prefill.get(key, req.prompt_len) < cache.shareable_len(req) and cache.prefix_cache.keeps_prefixes:
                passed.append(queues.waiting.popleft())  # its twin computes a prefix in this step that both can use
                continue
            kept = reserved + _SLOTS_KEPT_PER_RUNNING * len(plan.decodes)
            if self._is_known_misfit(req, cache.num_available - kept):
                break
            cache.attach(req, (req.cache_key, weight_epoch))
            if not req.has_begun:
                req.cached_tokens = req.cached_len
            count = min(req.extend_len, budget) if self._splits_prompts else req.extend_len
            fits = cache.num_available - kept >= req.extend_len
            if not fits:
                self._misfit = _Misfit(req.arrival, req.extend_len, cache.prefix_cache.num_inserts)
            if not fits or (count > budget and plan.extends):
                cache.detach(req, weight_epoch)
                break
            queues.waiting.popleft()
            in_prefill.setdefault(key, req.cached_len)
            budget -= count
            self._take(plan, req, count)
        for req in reversed(passed):
            queues.waiting.appendleft(req)

    def _is_known_misfit(self, req: Req, num_slots: int) -> bool:
        """Return whether the last attempt shows that `num_slots` are too few.  This saves a prefix match a step."""
        known = self._misfit
        return (
            known is not None
            and known.arrival == req.arrival
            and known.num_slots > num_slots
            and known.num_inserts == self._cache.prefix_cache.num_inserts
        )

    def _take(self, plan: StepPlan, req: Req, count: int) -> None:
        if req.times.admitted is None:
            req.times.admitted = time.monotonic()
        completes = count == req.extend_len
        self._cache.extend(req, count)
        plan.extends.append(Extend(req, req.device_len, count, completes))
        self._queues.partial = None if completes else req


def _prompt_key(req: Req) -> tuple[str | None, int]:
    return req.cache_key, req.prompt.key
