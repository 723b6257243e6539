"""Engines under both loops: each step finished before the next is launched, and after it, as on a GPU.

On a CPU a launch computes its step, so that the loop that overlaps hides no time there; but what leaves the engine must
be the same.  Every test of a module that imports `loop` runs under both, in the gate under the sequential one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.core.server_args import ServerArgs
from tests.graph_loop import captured_engines


def overlap(patch: pytest.MonkeyPatch) -> None:
    """From now on engines are built with the loop that overlaps, whatever their settings."""
    patch.setattr(ServerArgs, "overlaps", True)


@pytest.fixture(
    params=["sequential", *(pytest.param(name, marks=pytest.mark.full) for name in ("late", "graphs"))], autouse=True
)
def loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which of the loops the engines have that a test builds; "graphs": the late one, over captured steps."""
    if request.param == "graphs":
        with captured_engines() as patch:
            overlap(patch)
            yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "late":
            overlap(patch)
        yield request.param
