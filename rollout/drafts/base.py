"""`Drafter`: the interface of what proposes the next tokens of requests.

A proposal may be wrong, and changes the speed alone: the step that verifies it samples every position as plain decoding
does, and keeps the tokens that are equal to the proposed ones (`rollout.scheduler.verify`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from rollout.core.prompt import Prompt


class Draft(NamedTuple):
    """Proposed token ids, in order.  `evidence` tells drafts of one drafter apart that are kept more or less often."""

    token_ids: Sequence[int]
    evidence: int = 0


NO_DRAFT = Draft(())


class DraftedSequence(Hashable, Protocol):
    """The tokens of a request as a drafter reads them: its prompt, and the live list of its output."""

    prompt: Prompt
    output_ids: list[int]


class Drafter(ABC):
    """The interface of a drafter.  All ranks that share a request call it in the same order, and get the same."""

    @abstractmethod
    def propose(self, asks: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Return a draft for each ask: a sequence, whose tokens are all known, and the most tokens of its draft.

        One step asks for all its sequences at once, and for none twice.
        """

    @abstractmethod
    def forget(self, sequence: DraftedSequence) -> None:
        """Drop what is kept of `sequence`, which has ended."""
