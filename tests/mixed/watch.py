"""`Watch`: one request from turn to turn, seen from outside.

Of the engine it sees how many positions and tokens there are and how often the request was retracted.  Which weights
and which label were in force comes from the script.  So what the engine says of versions is a claim to be checked.

KV given up in a retraction begins a new life of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.mixed.schedule import Ask
from tests.scheduler_harness import Result

OVER_MASK_LIMIT = (400, 413)
"""Statuses of a request that ends at a token whose mask has too many ids, by itself and with all before it.

The token was computed, and is not returned.
"""


@dataclass(frozen=True)
class InForce:
    """The weights that serve: their epoch, and its label."""

    epoch: int
    label: str


@dataclass(frozen=True)
class Turn:
    """A turn of the loop: what served at the launch of the step that it finished, and at that of the one it launched.

    Late: the step that it finished was launched in the turn before.
    """

    is_late: bool
    sampled_by: InForce
    computed_by: InForce


@dataclass(frozen=True)
class Made:
    """A token: in which life, and what served when its step was launched."""

    life: int
    by: InForce


@dataclass
class Watch:
    """`lives[i][p]`: the weight epoch in which life i computed position p, or found it in the prefix cache.

    `key`: what it shares prefixes under; `may_end`: it was named by an abort, or an abort named all.
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
        """It has finished: take in its last turn."""
        record = result.finished
        assert record is not None
        computed = 0
        if record.reason.type != "abort":
            computed = len(result.prompt_ids) + max(len(result.token_ids) - 1, 0)
        elif record.reason.status_code in OVER_MASK_LIMIT:
            computed = len(result.prompt_ids) + len(result.token_ids)
        self.advance(record.num_retractions, computed, len(result.token_ids), turn)

    def oldest(self) -> int | None:
        """The oldest weight epoch of its tokens and KV."""
        used = [token.by.epoch for token in self.tokens] + [epoch for life in self.lives for epoch in life]
        return min(used, default=None)

    def contents(self, of_epoch: Sequence[int]) -> set[int]:
        """Contents that it has anything of."""
        epochs = {token.by.epoch for token in self.tokens}.union(*map(set, self.lives))
        return {of_epoch[epoch] for epoch in epochs}
