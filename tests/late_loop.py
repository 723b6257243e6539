"""A loop that finishes every step one turn late, after the launch of the next: what an engine on a GPU will do.

It is made of the same two halves as the real one, so that a test that passes under both shows that nothing depends on
their order.  Every test of a module that imports `loop` runs under both, in the gate under the sequential one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.engine import build
from rollout.scheduler.scheduler import Scheduler
from tests.graph_loop import captured_engines


class LateScheduler(Scheduler):
    """Launches a step while the one before it is in flight, and finishes that one then."""

    def _turn(self) -> bool:
        had_step = self._in_flight is not None
        step = self._launch()
        self.finish_step()
        self._in_flight = step
        return had_step or step is not None


@pytest.fixture(
    params=["sequential", *(pytest.param(name, marks=pytest.mark.full) for name in ("late", "graphs"))], autouse=True
)
def loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which of the loops the engines have that a test builds; "graphs": the late one, over captured steps."""
    if request.param == "graphs":
        with captured_engines() as patch:
            patch.setattr(build, "Scheduler", LateScheduler)
            yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "late":
            patch.setattr(build, "Scheduler", LateScheduler)
        yield request.param
