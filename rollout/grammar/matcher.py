"""`Matcher`: the place of one output in its grammar.

The library's tables of states grow with the texts that matchers come by, and have a limit.  Copies of a matcher share
them: requests of one grammar find most states there.  A matcher that finds its tables full goes on with new ones of its
own, so that no other request decides whether it fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollout.grammar.library import error_of, is_full

if TYPE_CHECKING:  # the process of `GrammarGuard` starts sooner without it
    import numpy as np

MIN_TOKENS_A_TABLE = 64
"""A matcher whose own tables are full after fewer tokens fails.  The costliest masks of these take a compile's time."""


class Tables:
    """The tables that a matcher and its copies share.  `is_full`: one of them had to leave them.

    `begin`: makes a matcher of the library at the beginning of the grammar, with new tables.
    """

    __slots__ = ("begin", "is_full")

    def __init__(self, begin: Callable[[], Any]) -> None:
        self.begin, self.is_full = begin, False


class Matcher:
    """Names the tokens that may come next, and takes the one that came.

    It depends on the grammar and its tokens alone.
    """

    __slots__ = ("_inner", "_may_renew", "_own_from", "_taken", "_vocab_words", "tables")

    def __init__(
        self, inner: Any, vocab_words: int, tables: Tables, taken: Sequence[int] = (), own_from: int | None = None
    ) -> None:
        """Begin in the place of `inner`, which took the tokens `taken`.

        `own_from`: the count of tokens at which it got tables of its own; None: it shares the first ones.
        """
        self._inner, self._vocab_words, self.tables = inner, vocab_words, tables
        self._taken, self._own_from = array("I", taken), own_from
        self._may_renew = True

    def copy(self, *, may_renew: bool = True) -> Matcher:
        """Return a matcher in the same place, which goes on by itself.

        One that may not renew its tables fails where they are full: new ones take a compile.
        """
        other = Matcher(self._inner.deep_copy(), self._vocab_words, self.tables, self._taken, self._own_from)
        other._may_renew = may_renew
        return other

    def allowed(self, out_W: np.ndarray) -> None:
        """Write the tokens that may come next: bit i % 32 of word i // 32 int32.

        End tokens are among them if it may end.  None are allowed if the matcher has failed.
        """
        assert out_W.dtype == "int32" and out_W.flags.c_contiguous and len(out_W) == self._vocab_words
        if not self.allowed_at(out_W.ctypes.data, out_W.nbytes):
            out_W[:] = 0

    def allowed_at(self, address: int, num_bytes: int) -> bool:
        """Write the same to the `num_bytes` bytes at an address.  Returns False if the matcher has failed."""
        if self._inner.is_error():
            return False
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)
        if self._has_new_tables():
            self._inner.unsafe_compute_mask_ptr(address, num_bytes)
        return not self._inner.is_error()

    def advance(self, token_id: int) -> bool:
        """Take the next token.  Returns False, and fails, if it is not allowed."""
        is_taken = self._inner.consume_token(token_id)
        if not is_taken and self._has_new_tables():
            is_taken = self._inner.consume_token(token_id)
        if is_taken:
            self._taken.append(token_id)
        return bool(is_taken)

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens it would take next.  It stays in its place, as a copy is asked."""
        return int(self._inner.deep_copy().validate_tokens(list(token_ids)))

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        self._inner.rollback(count)
        del self._taken[len(self._taken) - count :]

    @property
    def may_end(self) -> bool:
        """True where the tokens so far are a whole text of the grammar."""
        return bool(self._inner.is_accepting())

    @property
    def error(self) -> str:
        """The reason why the matcher has failed, in one line; empty if it has not."""
        return error_of(self._inner)

    def _has_new_tables(self) -> bool:
        """Go to the same place with new tables, if the ones that it has are full; return whether it did."""
        if not is_full(self._inner):
            return False
        self.tables.is_full = True
        if not self._may_renew:
            return False
        count = len(self._taken)
        if self._own_from is not None and count - self._own_from < MIN_TOKENS_A_TABLE:
            return False
        inner = self.tables.begin()
        if inner.is_error() or not inner.consume_tokens(self._taken.tolist()):
            return False
        self._inner, self._own_from = inner, count
        return True
