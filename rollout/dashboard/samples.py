"""`Sample`, the server at one moment, and `SampleTiers`: an hour of samples, thinned beyond the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

RECENT_KEPT = 600
MERGED = 10
"""Samples that become one, once they are older than the recent ones."""
MERGED_KEPT = 300
LAST_OF_MERGED = frozenset({"at", "weight_epoch"})
LARGEST_OF_MERGED = frozenset({"paused"})

Triple = tuple[float, float, float]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The server at one moment.  `at`: seconds since 1970.  Rates cover the time since the sample before.

    `balance`: by MoE layer, None where no loads were recorded since the sample before.
    `first_token_s`, `per_token_s`, `latency_s`: the 50th, 95th and 99th percentile of the last minute.
    `age_running`, `age_returned`: mean and largest age in weight versions.
    `logprob`, `entropy`: means over the tokens of the samples that ended, in nats.
    `memory_bytes`, `cpus`: resident memory and busy cores of this process and of the engine's.
    """

    at: float
    generated_per_s: float
    prefilled_per_s: float
    reused_per_s: float
    running: int | float
    waiting: int | float
    used_tokens: int | float
    used_state_rows: int | float
    paused: bool
    weight_epoch: int
    balance: list[float | None] | None = None
    finished_per_s: float = 0.0
    aborted_per_s: float = 0.0
    retracted_per_s: float = 0.0
    first_token_s: Triple | None = None
    per_token_s: Triple | None = None
    latency_s: Triple | None = None
    age_running: tuple[float, float] | None = None
    age_returned: tuple[float, float] | None = None
    logprob: float | None = None
    entropy: float | None = None
    memory_bytes: tuple[int | float, int | float] | None = None
    cpus: float | None = None


class SampleTiers:
    """The last `RECENT_KEPT` samples, and `MERGED_KEPT` means of `MERGED` older ones.  Each has a number."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, Sample]] = deque()
        self._merged: deque[tuple[int, Sample]] = deque(maxlen=MERGED_KEPT)

    def append(self, number: int, sample: Sample) -> None:
        """Add the newest sample.  Numbers rise."""
        self._recent.append((number, sample))
        if len(self._recent) == RECENT_KEPT + MERGED:
            old = [self._recent.popleft() for _ in range(MERGED)]
            self._merged.append((old[-1][0], merged([sample for _, sample in old])))

    def newer(self, number: int) -> list[Sample]:
        """Return the samples after this number, oldest first."""
        return [sample for tier in (self._merged, self._recent) for found, sample in tier if found > number]

    @property
    def last(self) -> Sample | None:
        return self._recent[-1][1] if self._recent else None


def merged(samples: Sequence[Sample]) -> Sample:
    """Return the mean of `samples`, without missing numbers.  Time and epoch are taken from the last one."""
    found: dict[str, Any] = {}
    for name in Sample.__struct_fields__:
        values = [getattr(sample, name) for sample in samples]
        if name in LAST_OF_MERGED:
            found[name] = values[-1]
        elif name in LARGEST_OF_MERGED:
            found[name] = max(values)
        else:
            found[name] = mean(values)
    return Sample(**found)


def mean(values: Sequence[Any]) -> Any:
    """Return the mean of the values that are not None, place by place where they are lists; None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list | tuple):
        parts = [mean(place) for place in zip(*known)]
        return tuple(parts) if isinstance(known[0], tuple) else parts
    return round(sum(known) / len(known), 4)
