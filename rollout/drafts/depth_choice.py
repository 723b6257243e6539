"""`DepthChoice`: how many tokens a model drafts, by the tokens that this is expected to give a second.

A step that drafts to depth d takes d forwards of the draft and one that verifies T tokens: `base_d + slope_d * T`
seconds, fitted for each depth to the last steps of that depth, the draft's forwards included.  A depth that was not
measured yet is guessed from the nearest one that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rollout.drafts.costs import DraftChoice, Line

_FORWARD_GUESS = 0.25  # a draft's forward, as a share of a plain step, until a depth was measured
_REVISIT = 64  # plain steps after which one drafted step is tried again


class DepthChoice(DraftChoice):
    """Decides from the same facts as `DraftChoice`, and takes a step to be as deep as the last choice."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, Line] = {}  # by depth
        self._depth = 0  # of the last choice
        self._plain = 0  # steps since one that drafted was timed

    def note_step(self, num_requests: int, num_drafted: int, seconds: float) -> None:
        if num_drafted and self._depth:  # 0: this choice did not make the step
            self._lines.setdefault(self._depth, Line()).note(num_requests + num_drafted, seconds)
            self._plain = 0
        elif not num_drafted:
            self._decoding.note(num_requests, seconds)

    def choose(self, rates: Sequence[float], lengths: Sequence[int], num_requests: int) -> list[int]:
        none = [0] * len(rates)
        if not self._decoding.is_known or not any(lengths):
            return none
        best, counts = 0.0, none
        for depth in range(1, max(lengths) + 1):
            base, slope = self._parts(depth)
            a_second, chosen = _best(rates, [min(depth, length) for length in lengths], num_requests, base, slope)
            if a_second > best:
                best, counts = a_second, chosen
        self._plain += 1
        if best * self._decoding.seconds(num_requests) <= num_requests and self._plain <= _REVISIT:
            return none
        self._depth = max(counts)  # a step whose time is not known teaches nothing, and the next is tried, too
        return counts

    def _parts(self, depth: int) -> tuple[float, float]:
        """Return base and slope of the steps that draft to this depth."""
        if (known := self._lines.get(depth)) is not None:
            return known.parts()
        base, slope = self._decoding.parts()
        forward = _FORWARD_GUESS * (base + slope)
        if self._lines:
            nearest = min(self._lines, key=lambda other: (abs(other - depth), other))
            its_base, slope = self._lines[nearest].parts()
            forward = max(its_base - base, 0.0) / nearest
        return base + forward * depth, slope


def _best(
    rates: Sequence[float], lengths: Sequence[int], num_requests: int, base: float, slope: float
) -> tuple[float, list[int]]:
    """Return the highest tokens a second, and how many tokens of each draft give them: at least one of the best one.

    The token at depth d of a draft whose tokens are kept with probability p adds p ** d tokens.
    """
    gains = sorted(
        ((rate**d, i) for i, (rate, length) in enumerate(zip(rates, lengths)) for d in range(1, length + 1)),
        key=lambda gain: -gain[0],
    )
    sums = accumulate((gain for gain, _ in gains), initial=float(num_requests))
    a_second = [expected / (base + slope * (num_requests + m)) for m, expected in enumerate(sums)]
    most = max(range(1, len(a_second)), key=a_second.__getitem__)
    counts = [0] * len(rates)
    for _, i in gains[:most]:
        counts[i] += 1
    return a_second[most], counts
