"""Engines under both loops: each step finished before the next is launched, and after it, as on a GPU.

    from tests.late_loop import loop              sequential, late
    from tests.late_loop import captured_loop     those, and the late one over captured steps, slow to play here

On a CPU a launch computes its step, so that the loop that overlaps hides no time there; but what leaves the engine must
be the same.  Every test of a module that imports one runs under each of its cases, in the gate under the sequential
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollout.core.args.server_args import ServerArgs
from tests.graph_loop import captured_engines


def overlap(patch: pytest.MonkeyPatch) -> None:
    """Make engines that are built from now on use the loop that overlaps, whatever their settings."""
    patch.setattr(ServerArgs, "overlaps", True)


def _cases(*names: str) -> list[Any]:
    return ["sequential", *(pytest.param(name, marks=pytest.mark.full) for name in names)]


@contextmanager
def engines_of(name: str) -> Iterator[None]:
    """Set the loop of the engines that are built in the block: "sequential", "late" or "graphs"."""
    with captured_engines() if name == "graphs" else pytest.MonkeyPatch.context() as patch:
        if name != "sequential":
            overlap(patch)
        yield


@pytest.fixture(params=_cases("late"), autouse=True)
def loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the loop of the engines that a test builds, and yield its name."""
    with engines_of(request.param):
        yield request.param


@pytest.fixture(params=_cases("late", "graphs"), autouse=True, name="loop")
def captured_loop(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the loop as `loop` does; "graphs": the late one, over captured steps."""
    with engines_of(request.param):
        yield request.param
