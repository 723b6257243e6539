"""The choice of how many drafted tokens a step verifies: by the tokens that it is expected to give a second.

A step of T tokens takes `base + slope * T` seconds, fitted to the last steps, apart for steps that only decode and for
steps that verify.  A drafted token at depth d of a request whose tokens are kept with probability p adds p ** d tokens.
So the tokens with the highest gain come first, for as long as the rate grows.  The step verifies none where plain
decoding has the higher rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

_DECAY = 0.97  # the weight of a step's time against the one before
_WILD = 4.0  # a step that takes this many times what was expected tells of something else
_PRIOR = 2.0  # weight of the first guess, in steps
_SLOPE_GUESS = 0.15  # a token's share of a step of one token, until it is known
_KEPT_GUESS = 0.6
_CLASSES = 9  # of evidence
_FORGET = 0.98
_TRIES = 3.0  # verified tokens that the guess counts for
_REVISIT = 64  # plain steps after which one verifying step is tried again


class Line:
    """`base + slope * tokens` seconds, fitted to decayed observations."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self._n > 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take in the time of a step; a time that cannot be the step's alone is cut to a limit."""
        if self._n >= _PRIOR:
            seconds = min(seconds, _WILD * self.seconds(tokens))
        self._n = self._n * _DECAY + 1.0
        self._x = self._x * _DECAY + tokens
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + tokens * tokens
        self._xy = self._xy * _DECAY + tokens * seconds

    def parts(self) -> tuple[float, float]:
        """Return base and slope, both at least 0, of the observations so far."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        # a guess that counts as a little spread keeps the slope finite while all steps have one size
        guess = _SLOPE_GUESS * mean_y / (1.0 + _SLOPE_GUESS * mean_x)
        spread = self._xx / self._n - mean_x * mean_x
        together = self._xy / self._n - mean_x * mean_y
        slope = (together + 0.25 * guess) / (spread + 0.25)
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    def seconds(self, tokens: int) -> float:
        base, slope = self.parts()
        return base + slope * tokens


class Kept:
    """Share of drafted tokens that were kept: of one request, or of drafts with one evidence."""

    __slots__ = ("kept", "tried")

    def __init__(self) -> None:
        self.kept = self.tried = 0.0

    def note(self, kept: int, tried: int) -> None:
        self.kept = self.kept * _FORGET + kept
        self.tried = self.tried * _FORGET + tried

    def rate(self, guess: float) -> float:
        """Return the share of tokens that are kept; with few tries, near the guess."""
        return (self.kept + _TRIES * guess) / (self.tried + _TRIES)


class DraftChoice:
    """Decides from the times of steps (`note_step`) and the tokens that were kept (`note_draft`).

    All ranks that share requests tell it the same, times included.
    """

    def __init__(self) -> None:
        self._decoding = Line()
        self._verifying = Line()
        self._by_evidence = [Kept() for _ in range(_CLASSES)]
        self._plain_steps = 0  # since a step verified

    def note_step(self, num_requests: int, num_drafted: int, seconds: float) -> None:
        """Take in the time of a step of `num_requests` requests and `num_drafted` drafted tokens."""
        line = self._verifying if num_drafted else self._decoding
        line.note(num_requests + num_drafted, seconds)

    def note_draft(self, evidence: int, own: Kept, kept: int, tried: int) -> None:
        """Take in that `kept` tokens of a draft were kept; `tried` were kept or were the first that was not."""
        own.note(kept, tried)
        self._class_of(evidence).note(kept, tried)

    def kept_rate(self, evidence: int, own: Kept) -> float:
        """Return the probability that the next token of a draft is kept, if the ones before are."""
        return min(own.rate(self._class_of(evidence).rate(_KEPT_GUESS)), 0.99)

    def choose(self, rates: Sequence[float], lengths: Sequence[int], num_requests: int) -> list[int]:
        """Return how many tokens of each draft the step verifies: all 0 for a step that only decodes.

        `rates` and `lengths` are of the drafts; the step has `num_requests` requests, with drafts or without.
        """
        counts = [0] * len(rates)
        gains = [(-rate, i) for i, rate in enumerate(rates) if lengths[i] and rate > 0.0]
        if not gains:
            return counts
        if not self._decoding.is_known:  # the first steps only decode, so that there is something to compare with
            return counts
        plain_s = self._decoding.seconds(num_requests)
        known = self._verifying if self._verifying.is_known else self._decoding
        base, slope = known.parts()
        heapq.heapify(gains)
        expected, tokens = float(num_requests), num_requests
        while gains:
            gain, i = gains[0]
            if tokens > num_requests and -gain * (base + slope * tokens) <= expected * slope:
                break
            heapq.heappop(gains)
            expected, tokens = expected - gain, tokens + 1
            counts[i] += 1
            if counts[i] < lengths[i]:
                heapq.heappush(gains, (gain * rates[i], i))
        self._plain_steps += 1
        pays = expected * plain_s > num_requests * (base + slope * tokens)
        if pays or self._plain_steps > _REVISIT:
            self._plain_steps = 0
            return counts
        return [0] * len(rates)

    def _class_of(self, evidence: int) -> Kept:
        return self._by_evidence[min(evidence, _CLASSES - 1)]
