"""The pace of a refresh next to steps, on a simulated engine whose steps suffer by a known factor."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.control.weight_pace import WeightPace
from rollout.scheduler.stats import StepStats
from tests.device_engine import device_engine, stand_in_device
from tests.local_refresh import updater_of
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness
from weight_sync.waiting import Patience


@dataclass
class Engine:
    """Steps of `step_s` seconds, which take `1 + k` times as long while a part is taken."""

    k: float
    step_s: float = 0.01
    has_work: bool = True
    now: float = 0.0
    rested_s: float = 0.0
    stats: StepStats = field(default_factory=StepStats)
    before_s: float = 0.0  # what is known of steps before a refresh
    done: float = 0.0  # of the step that runs
    spent_s: float = 0.0
    num_sleeps: int = 0  # of the threads that help operators
    gave_way: bool = False

    def __post_init__(self) -> None:
        scheduler = SimpleNamespace(has_work=True, stats=self.stats)
        self.pace = WeightPace(scheduler, self.give_way, Patience(), lambda: self.now, self.rest)  # type: ignore[arg-type]
        self.pace._scheduler = self  # type: ignore[assignment]

    def advance(self, seconds: float, factor: float) -> None:
        """Let time pass, in which steps take `factor` times as long."""
        while seconds > 0 and self.has_work:
            part = min(seconds, (1 - self.done) * self.step_s * factor)
            seconds, self.now = seconds - part, self.now + part
            self.done, self.spent_s = self.done + part / (self.step_s * factor), self.spent_s + part
            if self.done > 1 - 1e-9:
                self.stats.seconds["forward"] += self.spent_s
                self.stats.num_steps += 1
                if factor == 1.0:
                    self.stats.recent_step_s = self.before_s
                self.done = self.spent_s = 0.0
        self.now += max(0.0, seconds)

    def rest(self, seconds: float) -> None:
        self.rested_s += seconds
        self.advance(max(seconds, 1e-6), 1.0)  # a clock never stands still

    def rest_helpers(self) -> None:
        self.num_sleeps += 1

    def give_way(self) -> None:
        self.gave_way = True

    def refresh(self, parts: int = 300, part_s: float = 0.004, gap_s: float = 0.0) -> tuple[float, float]:
        """Take the parts; return the share of their speed that steps kept, and the time by that of the parts."""
        start, steps = self.now, self.stats.num_steps
        self.pace(0.0)
        for _ in range(parts):
            self.advance(gap_s, 1.0)
            self.advance(part_s, 1 + self.k)
            self.pace(part_s)
        elapsed = self.now - start
        return (self.stats.num_steps - steps) * self.step_s / elapsed, elapsed / (parts * part_s)


@pytest.mark.parametrize("has_work", [True, False])
def test_helpers_sleep_between_parts_unless_steps_run(has_work: bool) -> None:
    """Without steps the transport needs the cores; a step has its helpers wait for the next operator."""
    engine = Engine(1.0, has_work=has_work)
    engine.refresh(parts=5)
    assert engine.num_sleeps == (0 if has_work else 6)
    assert engine.gave_way is has_work


@pytest.mark.parametrize("step_s", [0.002, 0.01, 0.08])
@pytest.mark.parametrize("k", [0.3, 0.7, 1.5, 4.0])
def test_steps_keep_their_share_whatever_they_suffer(k: float, step_s: float) -> None:
    engine = Engine(k, step_s)
    engine.refresh()
    kept, times = engine.refresh()
    assert 0.85 <= kept <= 0.93
    assert times <= 1.3 * max(1.0, (k / (1 + k)) / 0.12), "no longer than that takes"


def test_steps_before_a_refresh_show_how_fast_they_are_alone() -> None:
    """So a short refresh keeps the share too; one that comes first has nothing else to go by."""
    engine = Engine(1.5, before_s=0.01)
    engine.advance(1.5, 1.0)
    assert engine.refresh(parts=20)[0] >= 0.85


def test_steps_that_suffer_little_cost_no_rest() -> None:
    """Some rests are always measured, so a change is noticed in either direction."""
    engine = Engine(0.05)
    engine.refresh()
    kept, times = engine.refresh()
    assert kept >= 0.94 and times <= 1.15
    engine.k = 3.0
    engine.refresh()
    assert engine.refresh()[0] >= 0.85
    engine.k = 0.05
    engine.refresh()
    assert engine.refresh()[1] <= 1.15


def test_a_slow_sender_s_gaps_count_as_rests() -> None:
    engine = Engine(0.7)
    engine.refresh()
    start, rested_s = engine.now, engine.rested_s
    engine.refresh(gap_s=0.04)
    assert engine.rested_s - rested_s < 0.06 * (engine.now - start), "those that keep the measurement fresh"


def test_nothing_is_paced_while_no_request_runs() -> None:
    engine = Engine(4.0, has_work=False)
    assert engine.refresh()[1] == pytest.approx(1.0)


def test_a_rest_ends_with_the_last_request() -> None:
    engine = Engine(0.7)
    advance = engine.advance

    def until_the_last(seconds: float, factor: float) -> None:
        advance(seconds, factor)
        engine.has_work = engine.now < 0.05

    engine.advance = until_the_last  # type: ignore[method-assign]
    engine.refresh(parts=20)
    assert engine.rested_s < 0.06


def test_a_rest_ends_once_its_call_is_to_give_up() -> None:
    """An abort that came waits for no rest, and the rests of the next call are whole."""
    engine = Engine(4.0, step_s=0.1)
    engine.refresh(parts=50)
    advance, given_up_at = engine.advance, engine.now + 1.0

    def until_given_up(seconds: float, factor: float) -> None:
        advance(seconds, factor)
        if engine.now >= given_up_at:
            engine.pace.patience.give_up("an abort came")

    engine.advance = until_given_up  # type: ignore[method-assign]
    rested_s = engine.rested_s
    engine.refresh(parts=50, part_s=0.1)
    assert given_up_at - 1.0 < engine.now and engine.rested_s - rested_s < 1.0
    engine.advance = advance  # type: ignore[method-assign]
    engine.pace.patience.renew()
    rested_s = engine.rested_s
    engine.refresh(parts=50, part_s=0.1)
    assert engine.rested_s - rested_s > 5.0


def test_an_engine_paces_on_a_cpu_and_never_on_a_device(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe")
    updater = updater_of(Harness(folder))
    assert isinstance(updater._pace, WeightPace) and updater._pace.patience is updater.patience
    with stand_in_device():
        assert updater_of(device_engine(folder))._pace is None
