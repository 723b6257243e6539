"""`WeightPace`: the rests of the thread that takes weights in, so that on a CPU steps keep most of their speed.

A step waits for the one of its threads that was preempted, and for the interpreter.  Niceness alone does not end that.
How much steps suffer depends on the machine, the model, the tensors, and on a trainer that computes next to them.  So
it is measured:

    before  the seconds of a step in the last second
    work    parts of buckets are taken, one after the other, for some steps
    rest    nothing is taken; the time of these steps shows how fast they are alone now

What steps took longer than alone is lost.  A rest is as long as it takes until no more than `1 - KEPT` of all time is
lost.  Time in which a sender is waited for counts, too: a refresh that costs steps nothing never rests.  On CUDA
nothing is paced: staging has a stream of its own there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from rollout.scheduler.scheduler import Scheduler
from weight_sync.waiting import Patience

KEPT = 0.88
"""The share of their speed that steps are to keep; 0.85 is promised."""
_MAX_REST = 9.0
"""The longest rest, as a multiple of the work before it: long prompts that come are no reason to stand still."""
_STEPS = 3
"""The steps that show something."""
_MAX_STEPS = 60
"""The steps after which there is a rest even if none is needed, so that the speed of steps alone stays known."""
_MAX_WINDOW_S = 1.0
_DECAY = 0.6
_NUM_BEFORE = 20.0
"""The weight of the steps before a refresh, as a number of steps of rests."""
_POLL_S = 0.002


class _Mark(NamedTuple):
    """A moment, and what steps had taken by then."""

    at: float
    seconds: float
    num_steps: int


class WeightPace:
    """Called on the I/O thread with the seconds of each part of a bucket, right after it; at a call's start with 0.

    `give_way`: called once there are steps; it may be called again.  `patience`: of the call; a rest ends once it has
    ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        give_way: Callable[[], None],
        patience: Patience,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scheduler, self._clock, self._sleep = scheduler, clock, sleep
        self._give_way = give_way
        self.patience = patience
        self._alone = (0.0, 0.0)  # seconds and number of steps in the last rests, which count less with age
        self._debt = 0.0  # seconds lost, less the allowance
        self._work_s = 0.0  # since the last rest
        self._mark = self._rested = self._now()
        self._called_at = self._mark.at

    def __call__(self, seconds: float) -> None:
        now = self._now()
        gap_s, self._called_at = now.at - seconds - self._called_at, now.at
        has_work = self._scheduler.has_work
        if has_work:
            self._give_way()
        else:
            self._scheduler.rest_helpers()  # what brings the next part needs the cores
        if gap_s > _MAX_WINDOW_S or not has_work:
            self._begin(now)
            return
        self._work_s += seconds
        num_steps = now.num_steps - self._rested.num_steps
        is_long = num_steps >= _MAX_STEPS or now.at - self._rested.at >= _MAX_WINDOW_S
        if not is_long and num_steps < _STEPS:
            return
        self._count(now)
        rest_s = min(self._debt / (1 - KEPT), _MAX_REST * self._work_s)
        if rest_s >= _STEPS * self._step_s or is_long:
            self._rest(rest_s)
            self._work_s, self._rested = 0.0, self._now()
            self._called_at = self._rested.at

    @property
    def _step_s(self) -> float:
        """Seconds of a step alone; 0 if none was measured."""
        seconds, steps = self._alone
        return seconds / steps if steps else 0.0

    def _now(self) -> _Mark:
        stats = self._scheduler.stats
        return _Mark(self._clock(), stats.total_s, stats.num_steps)

    def _begin(self, now: _Mark) -> None:
        """Note that a refresh begins, or that nothing runs."""
        before_s = self._scheduler.stats.recent_step_s
        if before_s:
            self._alone = before_s * _NUM_BEFORE, _NUM_BEFORE
        self._debt = self._work_s = 0.0
        self._mark = self._rested = now

    def _count(self, now: _Mark) -> None:
        """Count the steps that ended since the last count; they wait until the time of a step alone is known."""
        if not self._step_s:
            return
        at, seconds, steps = (new - old for new, old in zip(now, self._mark, strict=True))
        lost = seconds - steps * self._step_s
        self._debt = max(self._debt + lost - (1 - KEPT) * at, -(1 - KEPT) * _MAX_WINDOW_S)
        self._mark = now

    def _rest(self, seconds: float) -> None:
        """Sleep for so long, and for some steps; no longer than the call may wait."""
        start, first, last = self._now(), None, None
        while self._scheduler.has_work and (last is None or last.at - start.at < seconds):
            if self.patience.has_ended:
                break
            self._sleep(_POLL_S)
            now = self._now()
            if first is None and now.num_steps != start.num_steps:
                first = now  # the step that began before is over
            if now.at - start.at >= _MAX_WINDOW_S or (first is not None and now.num_steps - first.num_steps >= _STEPS):
                last = now
        if first is not None and last is not None and last.num_steps > first.num_steps:
            self._note_alone(last.seconds - first.seconds, last.num_steps - first.num_steps)
        self._count(self._now())

    def _note_alone(self, seconds: float, steps: int) -> None:
        before, count = self._alone
        self._alone = _DECAY * before + seconds, _DECAY * count + steps
