"""`Watch`: one request from turn to turn, seen from outside.

From the engine it takes only the numbers of positions, tokens and retractions.  The script states which weights and
which label were in force.  So each version that the engine names is a claim to be checked.

A retraction gives up KV and begins a new life of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.mixed.schedule import Ask
from tests.scheduler_harness import Result

OVER_MASK_LIMIT = (400, 413)
"""Statuses of a request that ends at a token whose mask has too many ids, alone (400) or with earlier masks (413).

The token was computed, and is not returned.
"""


@dataclass(frozen=True)
class InForce:
    """The weights that serve: their epoch, and the epoch's label."""

    epoch: int
    label: str


@dataclass(frozen=True)
class Turn:
    """A turn of the loop: the weights at the launch of the step that it finished, and at the launch that it made.

    `is_late`: the finished step was launched in the turn before.
    """

    is_late: bool
    sampled_by: InForce
    computed_by: InForce


@dataclass(frozen=True)
class Made:
    """A token: the life that sampled it, and the weights that served when its step was launched."""

    life: int
    by: InForce


@dataclass
class Watch:
    """`lives[i][p]`: the weight epoch in which life i computed position p, or found it in the prefix cache.

    `key`: the key under which it shares prefixes; `may_end`: an abort named it, or all requests.
    """

    ask: Ask
    seed: int
    key: str | None
    lives: list[list[int]] = field(default_factory=lambda: [[]])
    tokens: list[Made] = field(default_factory=list)
    streamed: list[tuple[int, int, str]] = field(default_factory=list)  # new tokens, tokens so far, label
    may_end: bool = False
    must_be_refused: bool = False

    def advance(self, retractions: int, computed: int, tokens: int, turn: Turn) -> None:
        """Take in a turn.  `computed`: positions with KV; `tokens`: tokens so far."""
        if turn.is_late:
            self._count(tokens, turn.sampled_by)
        while len(self.lives) <= retractions:
            self.lives.append([])
        self._count(tokens, turn.sampled_by)
        life = self.lives[-1]
        life += [turn.computed_by.epoch] * (computed - len(life))

    def _count(self, tokens: int, by: InForce) -> None:
        while len(self.tokens) < tokens:
            self.tokens.append(Made(len(self.lives) - 1, by))

    def end(self, result: Result, turn: Turn) -> None:
        """Take in the last turn of a request that has finished."""
        record = result.finished
        assert record is not None
        computed = 0
        if record.reason.type != "abort":
            computed = len(result.prompt_ids) + max(len(result.token_ids) - 1, 0)
        elif record.reason.status_code in OVER_MASK_LIMIT:
            computed = len(result.prompt_ids) + len(result.token_ids)
        self.advance(record.num_retractions, computed, len(result.token_ids), turn)

    def oldest(self) -> int | None:
        """Return the oldest weight epoch of the request's tokens and KV."""
        used = [token.by.epoch for token in self.tokens] + [epoch for life in self.lives for epoch in life]
        return min(used, default=None)

    def contents(self, of_epoch: Sequence[int]) -> set[int]:
        """Return the contents that made any token or KV of the request."""
        epochs = {token.by.epoch for token in self.tokens}.union(*map(set, self.lives))
        return {of_epoch[epoch] for epoch in epochs}
