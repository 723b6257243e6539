"""`WeightPace`: the rests of the thread that takes weights in, so that on a CPU steps keep most of their speed.

A step waits for the one of its threads that was preempted, and for the interpreter.  Niceness alone does not end that.
How much a step suffers depends on the machine, the model and the tensors, so it is measured:

    work    parts of buckets are taken, one after the other, for some steps
    rest    nothing is taken, so that steps keep their share; their time shows how fast they are alone

If steps lose a share L of their speed in work, and work takes a share f of the time, they keep 1 - f * L.  L comes from
the last windows of work and rest, and f from L.  Time in which the sender is waited for counts as rest.  On CUDA
nothing is paced: staging has a stream of its own there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.stats import StepStats

KEPT = 0.88
"""The share of their speed that steps keep, if the measurement is right; 0.85 is promised."""
_FIRST_SHARE = 0.3
_LEAST_SHARE = 0.1
_STEPS = 3
"""The steps of a window: fewer show too little."""
_MOST_STEPS = 60
"""The steps after which there is a rest even if none is needed, so that the speed of steps alone stays known."""
_MAX_WINDOW_S = 1.0
_DECAY = 0.6
_POLL_S = 0.002


class _Window:
    """The steps that begin and end within some time: it opens with the first end of a step that `note` sees."""

    def __init__(self, stats: StepStats, clock: Callable[[], float]) -> None:
        self._stats, self._clock = stats, clock
        self._start, self._first = clock(), stats.num_steps
        self._opened: tuple[float, float, int, float] | None = None
        self.work_s = 0.0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    @property
    def num_steps(self) -> int:
        return 0 if self._opened is None else self._stats.num_steps - self._opened[2]

    def note(self, work_s: float = 0.0) -> None:
        """Note that time has passed, `work_s` of it in work.  Called often."""
        self.work_s += work_s
        if self._opened is None and self._stats.num_steps != self._first:
            self._opened = self._now()

    def _now(self) -> tuple[float, float, int, float]:
        return self._clock(), sum(self._stats.seconds.values()), self._stats.num_steps, self.work_s

    def measured(self) -> tuple[float, float, float]:
        """Return the seconds of its steps, their number, and their number by the share of work."""
        assert self._opened is not None
        elapsed, seconds, steps, work_s = (now - then for now, then in zip(self._now(), self._opened, strict=True))
        return seconds, steps, steps * work_s / max(elapsed, 1e-9)


class _Mean:
    """Sums over the last windows, which count less with age."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0)

    def add(self, window: _Window) -> None:
        if window.num_steps:
            sums = zip(self._sums, window.measured(), strict=True)
            seconds, steps, work = (_DECAY * old + new for old, new in sums)
            self._sums = seconds, steps, work

    @property
    def step_s(self) -> float:
        """Seconds a step; 0 if none was measured."""
        seconds, steps, _ = self._sums
        return seconds / steps if steps else 0.0

    @property
    def work(self) -> float:
        """The share of work."""
        _, steps, work = self._sums
        return work / steps if steps else 0.0


class WeightPace:
    """Called on the I/O thread with the seconds of each part of a bucket, right after it."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._scheduler, self._clock, self._sleep = scheduler, clock, sleep
        self._alone, self._beside = _Mean(), _Mean()
        self._window = self._new_window()

    @property
    def share(self) -> float:
        """The share of the time that may be work, as far as it is known."""
        if not (self._alone.step_s and self._beside.work):
            return _FIRST_SHARE
        loss = (1 - self._alone.step_s / self._beside.step_s) / self._beside.work
        return 1.0 if loss <= 1 - KEPT else max(_LEAST_SHARE, (1 - KEPT) / loss)

    def __call__(self, seconds: float) -> None:
        if not self._scheduler.has_work:
            self._window = self._new_window()
            return
        window = self._window
        window.note(seconds)
        elapsed, num_steps = window.elapsed, window.num_steps
        is_long = num_steps >= _MOST_STEPS or elapsed >= _MAX_WINDOW_S
        rest_s = window.work_s / self.share - elapsed
        if not is_long and (num_steps < _STEPS or rest_s < _STEPS * self._alone.step_s):
            return  # too short to show anything, or no rest is needed yet
        if 2 * window.work_s >= elapsed:  # else the sender is slow: that is rest enough
            self._beside.add(window)
            self._rest(rest_s)
        self._window = self._new_window()

    def _new_window(self) -> _Window:
        return _Window(self._scheduler.stats, self._clock)

    def _rest(self, seconds: float) -> None:
        """Rest for so long, and for some steps."""
        window = self._new_window()
        while self._scheduler.has_work and (left := max(seconds, self._unseen_s(window)) - window.elapsed) > 0:
            self._sleep(min(left, _POLL_S))
            window.note()
        self._alone.add(window)

    def _unseen_s(self, window: _Window) -> float:
        return 0.0 if window.num_steps >= _STEPS else _MAX_WINDOW_S
