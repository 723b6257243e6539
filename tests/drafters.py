"""Drafters of known worth for tests: always right, always wrong, hostile, and at random right or wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollout.drafts.base import Draft, DraftedSequence, Drafter


class KnownDrafter(Drafter):
    """Proposes from the known outputs of requests, by prompt; `kind` is how it changes them.

    Kinds: "right"; "wrong": each token is another one; "hostile": ids outside the vocabulary among right ones, and more
    tokens than asked for; "mixed": a token is wrong at random.
    """

    def __init__(self, outputs: dict[tuple[int, ...], Sequence[int]], vocab_size: int, kind: str) -> None:
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._kind = kind
        self._random = random.Random(0)
        self.num_proposed = 0

    def propose(self, asks: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        return [self._propose(sequence, most) for sequence, most in asks]

    def _propose(self, sequence: DraftedSequence, most: int) -> Draft:
        known = list(self._outputs[tuple(sequence.prompt.ids)])
        begin = len(sequence.output_ids)
        proposed = known[begin : begin + self._random.randint(0, most)] if most > 0 else []
        if self._kind == "wrong":
            proposed = [(token_id + 1) % self._vocab_size for token_id in proposed]
        elif self._kind == "mixed":
            proposed = [(t + (self._random.random() < 0.3)) % self._vocab_size for t in proposed]
        elif self._kind == "hostile" and proposed:
            alien = self._random.choice((-1, self._vocab_size, 2**62))
            proposed.insert(self._random.randrange(len(proposed) + 1), alien)
        self.num_proposed += len(proposed)
        return Draft(proposed)

    def forget(self, sequence: DraftedSequence) -> None:
        pass
