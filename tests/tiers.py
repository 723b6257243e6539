"""The tests that every change must pass, and the ones that run with everything else: docs/testing.md.

    gate    no marker, or `@pytest.mark.gate` in a module of another tier: what `make test` runs
    full    `@pytest.mark.full`: for `make test-full` alone, except the cases of `full(but="tp2")`
    mutant  `@pytest.mark.mutant`: an engine or a source that is wrong on purpose must be noticed; as `full`

The marker that stands closest to a test decides.  `serial`, in addition to any of them: no other test runs meanwhile.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from hypothesis import settings

TIERS = ("gate", "full", "mutant")
GATE_EXAMPLES = 20
settings.register_profile("gate", max_examples=GATE_EXAMPLES, derandomize=True, deadline=None)


def examples(everything: int, gate: int = GATE_EXAMPLES) -> int:
    """Return how many examples hypothesis plays: `everything`, or in the gate at most `gate`."""
    return min(everything, gate) if in_the_gate() else everything


def in_the_gate() -> bool:
    """Return whether tests play as few examples as the gate does."""
    return settings.get_current_profile_name() == "gate"


def tier_of(item: pytest.Item) -> str:
    for marker in item.iter_markers():
        if marker.name in TIERS:
            return "gate" if any(_is_case(item, name) for name in _cases(marker)) else marker.name
    return "gate"


def unknown_cases(items: list[pytest.Item]) -> list[str]:
    """Return what `full(but=...)` names although no test has such an id: after a renaming the gate would miss it."""
    unknown: dict[tuple[str, int], set[str]] = {}
    for item in items:
        for marker in item.iter_markers("full"):
            names = unknown.setdefault((item.location[0], id(marker)), set(_cases(marker)))
            names -= {name for name in names if _is_case(item, name)}
    return sorted(f"{file}: {name}" for (file, _), names in unknown.items() for name in names)


def _cases(marker: pytest.Mark) -> tuple[str, ...]:
    but = marker.kwargs.get("but", ())
    return (but,) if isinstance(but, str) else tuple(but)


def _is_case(item: pytest.Item, name: str) -> bool:
    """Return whether the id of a parametrized test is `name`, or starts with it."""
    case = item.name.partition("[")[2].removesuffix("]")
    return case == name or case.startswith(f"{name}-")


class Turns:
    """The lock that lets the processes of a run play tests side by side, and a serial test alone.

    A process that waits to be alone holds the door, so that no other goes in meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")
        self._room = (folder / "room").open("w")

    @contextmanager
    def enter(self, *, alone: bool) -> Iterator[None]:
        with _locked(self._door, fcntl.LOCK_EX):
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)


@contextmanager
def _locked(file: IO[str], how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
