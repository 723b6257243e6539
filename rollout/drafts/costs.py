"""The choice of how many drafted tokens a step verifies: by the tokens that it is expected to give a second.

A step of T tokens takes `base + slope * T` seconds, fitted to the last steps, apart for steps that only decode and for
steps that verify.  A drafted token at depth d of a request whose tokens are kept with probability p adds p ** d tokens.
So the tokens with the highest gain come first, for as long as the rate grows.  The step verifies none where plain
decoding has the higher rate.  From time to time a step does the other thing, to learn whether that still holds: such
steps may lose a small share of the time of all steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

_DECAY = 0.97  # the weight of a step's time against the one before
_WILD = 4.0  # a step that takes this many times what was expected tells of something else
_PRIOR = 2  # steps before a line is relied on
_SLOPE_GUESS = 0.05  # a token's share of a step of one token, until it is known
_KEPT_GUESS = 0.6
_CLASSES = 9  # of evidence
_FORGET = 0.98
_TRIES = 3.0  # verified tokens that the guess counts for
_OWN_TRIES = 1.0  # the same for one request: a text that does not repeat should show soon
_ALIKE = 8  # steps that do the better thing before one does the other
_MAX_LOST_STEPS = 8.0  # plain steps that learning may cost in a row, however long nothing was lost
_LEARNING = 0.01  # the share of all time that steps may lose to learn from them


class Line:
    """`base + slope * tokens` seconds, fitted to decayed observations."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_steps > _PRIOR

    def note(self, tokens: int, seconds: float) -> None:
        """Take in the time of a step.

        A time that cannot be the step's alone is cut to a limit.  After a much shorter one the times before are.
        """
        if self._n > 0.0:
            expected = self.seconds(tokens)
            if self._num_steps >= _PRIOR:
                seconds = min(seconds, _WILD * expected)
            if _WILD * seconds < expected:
                self._y, self._xy = (each * _WILD * seconds / expected for each in (self._y, self._xy))
        self._num_steps += 1
        self._scale(_DECAY)
        self._n += 1.0
        self._x += tokens
        self._y += seconds
        self._xx += tokens * tokens
        self._xy += tokens * seconds

    def age(self) -> None:
        """Let the next time count for more, as the last one was a while ago."""
        if self._n > 1.0:
            self._scale(_DECAY)

    def _scale(self, factor: float) -> None:
        self._n *= factor
        self._x *= factor
        self._y *= factor
        self._xx *= factor
        self._xy *= factor

    def parts(self) -> tuple[float, float]:
        """Return base and slope, both at least 0, of the observations so far."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        # a guess that counts as a little spread keeps the slope finite while all steps have one size
        guess = _SLOPE_GUESS * mean_y / (1.0 + _SLOPE_GUESS * mean_x)
        spread = self._xx / self._n - mean_x * mean_x
        together = self._xy / self._n - mean_x * mean_y
        weight = 1.0 / self._n
        slope = (together + weight * guess) / (spread + weight)
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

    def note(self, kept: float, tried: float) -> None:
        self.kept = self.kept * _FORGET + kept
        self.tried = self.tried * _FORGET + tried

    def rate(self, guess: float, tries: float) -> float:
        """Return the share of tokens that are kept; the guess counts as `tries` tokens."""
        return (self.kept + tries * guess) / (self.tried + tries)


class DraftChoice:
    """Decides from the times of steps (`note_step`) and the tokens that were kept (`note_draft`).

    All ranks that share requests tell it the same, times included.
    """

    def __init__(self) -> None:
        self._decoding = Line()
        self._verifying = Line()
        self._by_evidence = [Kept() for _ in range(_CLASSES)]
        self._times: deque[tuple[int, int, float]] = deque(maxlen=64)
        self._may_lose_s = 0.0
        self._steps_alike = 0  # steps in a row that did the better thing

    def note_step(self, num_requests: int, num_drafted: int, seconds: float) -> None:
        """Take in the time of a step of `num_requests` requests and `num_drafted` drafted tokens."""
        self._times.append((num_requests, num_drafted, seconds))

    def _note_times(self) -> None:
        """Take in the last times, which is done when they are needed: it takes longer than to keep them."""
        for num_requests, num_drafted, seconds in self._times:
            self._note_time(num_requests, num_drafted, seconds)
        self._times.clear()

    def _note_time(self, num_requests: int, num_drafted: int, seconds: float) -> None:
        lines = (self._verifying, self._decoding) if num_drafted else (self._decoding, self._verifying)
        lines[0].note(num_requests + num_drafted, seconds)
        lines[1].age()

    def note_draft(self, evidence: int, own: Kept, kept: int, tried: int) -> None:
        """Take in that `kept` tokens of a draft were kept; `tried` were kept or were the first that was not."""
        everyone = self._class_of(evidence)
        own.note(kept, tried * everyone.rate(_KEPT_GUESS, _TRIES))  # against what was expected
        everyone.note(kept, tried)

    def kept_rate(self, evidence: int, own: Kept) -> float:
        """Return the probability that the next token of a draft is kept, if the ones before are.

        It is the share of all requests for this evidence, times the kept tokens of this request over the expected ones.
        """
        return min(self._class_of(evidence).rate(_KEPT_GUESS, _TRIES) * own.rate(1.0, _OWN_TRIES), 0.99)

    def choose(self, rates: Sequence[float], lengths: Sequence[int], num_requests: int) -> list[int]:
        """Return how many tokens of each draft the step verifies: all 0 for a step that only decodes.

        `rates` and `lengths` are of the drafts; the step has `num_requests` requests, with drafts or without.
        """
        self._note_times()
        nothing = [0] * len(rates)
        if not any(lengths) or not self._decoding.is_known:
            return nothing  # the first steps only decode, so that there is something to compare with
        plain_s = self._decoding.seconds(num_requests)
        known = self._verifying if self._verifying.is_known else self._decoding
        base, slope = known.parts()

        def loss(counts: Sequence[int]) -> float:
            """Return the seconds by which plain steps would give the expected tokens sooner."""
            gained = sum(rate * (1.0 - rate**count) / (1.0 - rate) for rate, count in zip(rates, counts) if count)
            return base + slope * (num_requests + sum(counts)) - plain_s * (1.0 + gained / num_requests)

        self._may_lose_s = min(self._may_lose_s + _LEARNING * plain_s, _MAX_LOST_STEPS * plain_s)
        counts = _highest_rate(rates, lengths, num_requests, base, slope)
        lost_s = loss(counts)
        if lost_s < 0.0:
            return nothing if self._learns(-lost_s) else counts
        best = max(range(len(rates)), key=lambda i: (counts[i] > 0, rates[i]))
        counts = [count if i == best else 0 for i, count in enumerate(counts)]
        return counts if self._learns(max(loss(counts), 0.0)) else nothing

    def _learns(self, lost_s: float) -> bool:
        """Return whether the next step does the worse thing and loses `lost_s`, as the last ones did not."""
        if self._steps_alike < _ALIKE or lost_s > self._may_lose_s:
            self._steps_alike += 1
            return False
        self._may_lose_s -= lost_s
        self._steps_alike = 0
        return True

    def _class_of(self, evidence: int) -> Kept:
        return self._by_evidence[min(evidence, _CLASSES - 1)]


def _highest_rate(
    rates: Sequence[float], lengths: Sequence[int], num_requests: int, base: float, slope: float
) -> list[int]:
    """Return how many tokens of each draft give the most tokens a second, at least one in all.

    A step of T tokens takes `base + slope * T` seconds.
    """
    counts = [0] * len(rates)
    gains = [(-rate, i) for i, rate in enumerate(rates) if lengths[i]]
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
    return counts
