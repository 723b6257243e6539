"""The record of an episode, built from what the server returns: no token is ever made from text again.

    turn 1   prompt_token_ids | token_ids
    turn 2   prompt_token_ids = turn 1's ids + ids of the tool's answer | token_ids
    record   one sequence: which ids were sampled, with which log-probabilities and experts, by which weights

A text may have several spellings in tokens.  A model samples any of them, and a tokenizer returns one.  A trainer that
tokenises a conversation again then learns from tokens that were never sampled.  `Record.add` refuses such a turn.

Shapes: S positions of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from capture.errors import CaptureError
from capture.routed_experts import RoutedExperts, concat
from rollout.client import VersionSpan
from rollout.core.errors import LockstepError

NOT_SAMPLED = -1


class RecordError(LockstepError):
    """A turn does not continue the record of its episode: training on it would be wrong without any sign."""


@dataclass(frozen=True)
class Turn:
    """A turn as the server returned it.  `routes`: of the positions that the record has no routes of yet."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    routes: RoutedExperts
    cached_tokens: int


@dataclass
class Record:
    """One sequence of all turns.  Of each position: whether its id was sampled, its log-probability, its version."""

    ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _routes: list[RoutedExperts] = field(default_factory=list)

    @property
    def num_routed(self) -> int:
        """Positions whose routes are recorded: all but the last one, which nothing consumed yet."""
        return max(0, len(self.ids) - 1)

    @property
    def routes(self) -> RoutedExperts:
        return concat(self._routes)

    def add(self, turn: Turn) -> None:
        """Append a turn.  Raises `RecordError` if it is not the continuation of the turns before; nothing changes then.

        The prompt must repeat every id of the record, and routes must begin where the record has none.
        """
        self._require_extension(turn.prompt_ids)
        sampled_by = _version_of_each(turn)
        first, end = turn.routes.start, turn.routes.start + len(turn.routes)
        if (first, end) != (self.num_routed, len(turn.prompt_ids) + len(turn.output_ids) - 1):
            raise RecordError(f"turn {self.num_turns + 1} has routes of positions {first} to {end}; others are missing")
        try:
            concat([*self._routes, turn.routes])
        except CaptureError as error:
            raise RecordError(f"the routes of turn {self.num_turns + 1} do not join those before: {error}") from None
        self._extend(turn.prompt_ids[len(self.ids) :])
        self._extend(turn.output_ids, turn.logprobs, sampled_by)
        self._routes.append(turn.routes)
        self.num_turns += 1
        self.prompt_tokens += len(turn.prompt_ids)
        self.cached_tokens += turn.cached_tokens

    def _extend(
        self, ids: Sequence[int], logprobs: Sequence[float] | None = None, versions: Sequence[int] | None = None
    ) -> None:
        self.ids.extend(ids)
        self.is_sampled.extend([logprobs is not None] * len(ids))
        self.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)
        self.versions.extend([NOT_SAMPLED] * len(ids) if versions is None else versions)

    def _require_extension(self, prompt_ids: Sequence[int]) -> None:
        known = self.ids
        for position, (old, new) in enumerate(zip(known, prompt_ids, strict=False)):
            if old != new:
                raise RecordError(
                    f"turn {self.num_turns + 1} has id {new} at position {position}, where the record has {old}: "
                    "its prompt was tokenised again"
                )
        if len(prompt_ids) <= len(known) and known:
            raise RecordError(
                f"turn {self.num_turns + 1} has a prompt of {len(prompt_ids)} ids, the record {len(known)}: "
                "a turn must add ids to it"
            )


def _version_of_each(turn: Turn) -> list[int]:
    """Return the version of every output id.  Raises `RecordError` if an id lacks one, or a log-probability."""
    if len(turn.logprobs) != len(turn.output_ids):
        raise RecordError(f"{len(turn.logprobs)} log-probabilities for {len(turn.output_ids)} sampled ids")
    found = [int(span.version) for span in turn.versions for _ in range(span.start, span.end)]
    if len(found) != len(turn.output_ids):
        raise RecordError(f"versions for {len(found)} of {len(turn.output_ids)} sampled ids")
    return found
