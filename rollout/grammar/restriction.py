"""`Restriction`: the tokens that one request may sample next, by its grammar and its lists.

    allowed = grammar's tokens & allowed_token_ids & ~last tokens of bad words & ~end tokens below min_new_tokens

End tokens of the model are allowed where the grammar may end.  A request that ignores them never samples one.

Shapes: W words of 32 bits, one bit for each token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from rollout.core.sampling_params import SamplingParams
from rollout.grammar.matcher import Matcher

_ALL = np.int32(-1)


class Restriction:
    """Follows the tokens of one request, each of them once, in order.

    `ends_alone`: it has a grammar, and no token of the model ends it.  `failure` is set where no token is allowed: the
    index of the token that cannot be sampled, and the reason.  From there on every token is allowed, as the request
    ends.
    """

    __slots__ = (
        "_allowed",
        "_bad",
        "_ends",
        "_eos",
        "_matcher",
        "_min_new",
        "_num_words",
        "_recent",
        "_stops",
        "ends_alone",
        "failure",
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
        allowed_ids = params.allowed_token_ids
        self._allowed = None if allowed_ids is None else TokenSet(allowed_ids, vocab_size)
        self._num_words = -(-vocab_size // 32)
        self._bad = params.bad_word_ids
        self._min_new = params.min_new_tokens
        self.ends_alone = matcher is not None and self._stops.isdisjoint(eos_ids)
        self._recent: list[int] = []  # the latest tokens, as many as the longest bad word needs
        self.num_fed = 0
        self.failure: tuple[int, str] | None = None

    def feed(self, token_ids: Iterable[int]) -> None:
        """Take the next tokens of the output."""
        kept = max(map(len, self._bad), default=1) - 1
        for token_id in token_ids:
            matcher = None if self._is_over or self._ends_with(token_id) else self._matcher
            if matcher is not None and not matcher.advance(token_id):
                self._fail(f"the grammar does not take token {token_id}: {matcher.error}")
            self.num_fed += 1
            if kept:
                self._recent = [*self._recent, token_id][-kept:]

    def write(self, out_W: np.ndarray) -> None:
        """Write the set of tokens that may come next: bit i % 32 of word i // 32 int32."""
        out_W[:] = _ALL
        if self._is_over:
            return
        if self._matcher is not None:
            self._write_grammar(self._matcher, out_W)
        if self._allowed is not None:
            self._allowed.keep_only(out_W)
        for *before, last in self._bad:
            if not before or self._recent[-len(before) :] == before:
                TokenSet([last], 32 * self._num_words).remove_from(out_W)
        if self.num_fed < self._min_new:
            self._ends.remove_from(out_W)
        if not out_W.any():
            if not self._has_ended:
                self._fail(self._reason())
            out_W[:] = _ALL

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

    def _write_grammar(self, matcher: Matcher, out_W: np.ndarray) -> None:
        matcher.allowed(out_W)
        if matcher.error:
            return
        self._eos.remove_from(out_W)
        self._ends.remove_from(out_W)  # a `stop_token_ids` may be a token of the grammar's texts
        if len(self._ends.places) and matcher.may_end:
            self._ends.add_to(out_W)

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


class TokenSet:
    """Token ids of the vocabulary as the words that hold them: `places` [P] ascending, and `bits` [P] int32."""

    __slots__ = ("bits", "places")

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        """Keep those `token_ids` that are in the vocabulary: a configuration may name others."""
        ids = np.array(sorted({index for index in token_ids if 0 <= index < vocab_size}), dtype=np.int64)
        self.places, first = np.unique(ids // 32, return_index=True)
        bits = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
        self.bits = np.bitwise_or.reduceat(bits, first).view(np.int32) if len(ids) else np.empty(0, dtype=np.int32)

    def add_to(self, out_W: np.ndarray) -> None:
        out_W[self.places] |= self.bits

    def remove_from(self, out_W: np.ndarray) -> None:
        if len(self.places):
            out_W[self.places] &= ~self.bits

    def keep_only(self, out_W: np.ndarray) -> None:
        """Remove all other tokens."""
        kept = out_W[self.places] & self.bits
        out_W[:] = 0
        out_W[self.places] = kept
