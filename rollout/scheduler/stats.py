"""Counters of the step loop: throughput, cache hits, and the time of each phase of a step."""

from __future__ import annotations

import time
from itertools import accumulate

from rollout.core.messages.req_output import DraftTally

PHASES = ("plan", "build", "forward", "process", "messages")


class DraftCounts(DraftTally):
    """Sums over all requests since the start."""

    def kept_per_place(self) -> list[int]:
        """Return how often the first token of a draft was kept, the second, and so on."""
        kept = list(accumulate(reversed(self.steps_by_kept)))[::-1]  # [n]: drafts of which n tokens or more were kept
        return kept[1:]

    def accept_length(self, num_tokens: int) -> float:
        """Return the tokens that a step gave a request on average, of `num_tokens` in all."""
        return num_tokens / max(num_tokens - self.num_kept, 1) if num_tokens else 1.0


class StepStats:
    """Sums since start; a generation throughput and the seconds of a step over the last second or more of work."""

    def __init__(self, drafts: DraftCounts | None = None) -> None:
        self.drafts = drafts or DraftCounts()
        self.num_steps = 0
        self.num_generated = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_retractions = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.gen_throughput = 0.0
        self.recent_step_s = 0.0  # 0: not known
        self._window_start = time.monotonic()
        self._window_tokens = 0
        self._window_first = (0, 0.0)  # steps and their seconds before the window
        self._mark = 0.0

    def start_step(self) -> None:
        self._mark = time.perf_counter()

    def phase(self, name: str) -> None:
        """Count the time since the last mark for `name`."""
        now = time.perf_counter()
        self.seconds[name] += now - self._mark
        self._mark = now

    def end_step(self, generated: int) -> None:
        self.num_steps += 1
        self.num_generated += generated
        self._window_tokens += generated
        elapsed = time.monotonic() - self._window_start
        if elapsed >= 1.0:
            self.gen_throughput = self._window_tokens / elapsed
            steps, seconds = self._window_first
            self._window_first = self.num_steps, self.total_s
            self.recent_step_s = (self.total_s - seconds) / (self.num_steps - steps)
            self._window_start, self._window_tokens = time.monotonic(), 0

    def idle(self) -> None:
        """Note that nothing runs: the throughput is zero, and a new window starts with the next work."""
        self.gen_throughput = 0.0
        self._window_start, self._window_tokens = time.monotonic(), 0

    @property
    def total_s(self) -> float:
        """The seconds of all steps."""
        return sum(self.seconds.values())

    def step_time_ms(self) -> dict[str, float]:
        """Return the mean milliseconds a step of each phase, and the number of steps."""
        steps = max(1, self.num_steps)
        return {name: 1000.0 * total / steps for name, total in self.seconds.items()} | {"steps": float(self.num_steps)}

    @property
    def cache_hit_rate(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)
