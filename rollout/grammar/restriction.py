"""`Restriction`: the tokens that one request may sample next, by its grammar and its lists.

    allowed = grammar's tokens & allowed_token_ids & ~last tokens of bad words & ~end tokens below min_new_tokens

End tokens of the model are allowed where the grammar may end.  A request that ignores them never samples one.
`RestrictedRows` puts the parts together, for all rows of a step.

Shapes: W words of 32 bits, one bit for each token of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np

from rollout.core.sampling_params import SamplingParams
from rollout.grammar.matcher import Matcher
from rollout.grammar.token_set import ALL, TokenSet


class Restriction:
    """Follows the tokens of one request, each of them once, in order.

    `ends_alone`: it has a grammar, and no token of the model ends it.  `failure` is set where no token is allowed: the
    index of the token that cannot be sampled, and the reason.  From there on every token is allowed, as the request
    ends.  `has_lists`: `narrow` may change a set.
    """

    __slots__ = (
        "_allowed",
        "_bad",
        "_ends",
        "_eos",
        "_matcher",
        "_min_new",
        "_num_recent",
        "_num_words",
        "_recent",
        "_removed",
        "_stops",
        "ends_alone",
        "failure",
        "has_lists",
        "num_fed",
    )

    def __init__(
        self,
        vocab_size: int,
        params: SamplingParams,
        *,
        eos_ids: Collection[int],
        end_ids: Collection[int],
        matcher: Matcher | None = None,
    ) -> None:
        """Begin before the first token.  `end_ids`: what ends this request; `eos_ids`: what ends any, by the model."""
        self._matcher = matcher
        self._stops = frozenset(end_ids)
        self._eos = TokenSet(eos_ids, vocab_size)
        self._ends = TokenSet(end_ids, vocab_size)
        self._removed = TokenSet({*eos_ids, *end_ids}, vocab_size)
        allowed_ids = params.allowed_token_ids
        self._allowed = None if allowed_ids is None else TokenSet(allowed_ids, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._bad = params.bad_word_ids
        self._min_new = params.min_new_tokens
        self.has_lists = allowed_ids is not None or bool(self._bad) or self._min_new > 0
        self.ends_alone = matcher is not None and self._stops.isdisjoint(eos_ids)
        self._num_recent = max(map(len, self._bad), default=1) - 1  # as the longest bad word needs
        self._recent: list[int] = []  # the latest tokens
        self.num_fed = 0
        self.failure: tuple[int, str] | None = None

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take those tokens of the whole output so far that are new."""
        if self.num_fed < len(output_ids):
            self.feed(output_ids[self.num_fed :])

    def feed(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        for token_id in token_ids:
            matcher = None if self._is_over or self._ends_with(token_id) else self._matcher
            self.num_fed += 1  # first, as this token is in the output, and a failure is about the next one
            if matcher is not None and not matcher.advance(token_id):
                self._fail(f"the grammar does not take token {token_id}: {matcher.error}")
        if self._num_recent:
            self._recent = [*self._recent, *token_ids][-self._num_recent :]

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens may come next, one after the other.  A token that ends the request is none."""
        if self._is_over:
            return 0
        recent, count = list(self._recent), 0
        for token_id in token_ids:
            is_listed = self._allowed is None or self._allowed.holds(token_id)
            if self._removed.holds(token_id) or not is_listed or self._is_bad(recent, token_id):
                break
            recent.append(token_id)
            count += 1
        return count if self._matcher is None else self._matcher.num_fitting(token_ids[:count])

    def copy(self, *, for_proposals: bool = False) -> Restriction:
        """Return a restriction in the same place, which goes on by itself.

        One for proposals, which other tokens may replace, does not compile its grammar again where tables are full: it
        fails, and allows every token.  The request's own one may compile it in the same step.
        """
        other = copy.copy(self)
        other._matcher = None if self._matcher is None else self._matcher.copy(may_renew=not for_proposals)
        return other

    def go_to(self, place: Restriction) -> None:
        """Go to the place of a copy, which is given up."""
        self._matcher, self._recent = place._matcher, place._recent
        self.num_fed, self.failure = place.num_fed, place.failure

    def write_texts(self, address: int, num_bytes: int, out_W: np.ndarray) -> bool:
        """Write the tokens that the grammar's texts go on with into `out_W`, which is at `address`; else all.

        End tokens in it mean nothing.  Returns whether they may be added: the grammar may end.
        """
        matcher = self._matcher
        if matcher is None or self._is_over:
            out_W[:] = ALL
            return False
        if not matcher.allowed_at(address, num_bytes):
            out_W[:] = 0
            return False
        return bool(self._stops) and matcher.may_end

    @property
    def removed_from_texts(self) -> TokenSet:
        """The tokens that are in no text, as they are an end: a `stop_token_ids` may be one of the grammar's tokens."""
        return _NONE if self._matcher is None else self._removed

    @property
    def added_at_ends(self) -> TokenSet:
        """The tokens that end this request."""
        return _NONE if self._matcher is None else self._ends

    def narrow(self, out_W: np.ndarray) -> None:
        """Remove the tokens that the lists forbid next."""
        if self._allowed is not None:
            self._allowed.keep_only(out_W)
        if self._bad:
            last_ids = {word[-1] for word in self._bad}
            bad = [token_id for token_id in last_ids if self._is_bad(self._recent, token_id)]
            TokenSet(bad, 32 * self._num_words).remove_from(out_W)
        if self.num_fed < self._min_new:
            self._ends.remove_from(out_W)

    def note_empty(self) -> None:
        """Fail, as no token may come next, unless the request ends before."""
        if not self._has_ended:
            self._fail(self._reason())

    @property
    def is_complete(self) -> bool:
        """True where the grammar may end and no other token than an end token may follow."""
        if self._matcher is None or self._is_over or not self._matcher.may_end:
            return False
        out_W = np.empty(self._num_words, dtype=np.int32)
        self._matcher.allowed(out_W)
        self._eos.remove_from(out_W)
        return not out_W.any()

    @property
    def _has_ended(self) -> bool:
        """True where the request ends with its last token, which need not be known yet when the next is restricted."""
        return self.ends_alone and self.num_fed >= max(self._min_new, 1) and self.is_complete

    @property
    def _is_over(self) -> bool:
        return self.failure is not None

    def _ends_with(self, token_id: int) -> bool:
        """Return whether the token ends the request: nothing follows it in any grammar."""
        return token_id in self._stops and self.num_fed + 1 > self._min_new

    def _is_bad(self, recent: Sequence[int], token_id: int) -> bool:
        """Return whether the token would complete a bad word after the recent ones."""
        words = ((before, last) for *before, last in self._bad)
        return any(last == token_id and (not before or recent[-len(before) :] == before) for before, last in words)

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = self.num_fed, reason

    def _reason(self) -> str:
        matcher = self._matcher
        if matcher is not None and matcher.error:
            return f"the grammar is too costly for its next token: {matcher.error}"
        if self.num_fed < self._min_new and matcher is not None and matcher.may_end:
            return f"the grammar ends after {self.num_fed} tokens, and min_new_tokens is {self._min_new}"
        return (
            f"no token is allowed after {self.num_fed} tokens: grammar, allowed_token_ids, bad_words exclude each other"
        )


_NONE = TokenSet((), 0)
