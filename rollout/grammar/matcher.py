"""`Matcher`: the place of one output in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollout.grammar.library import error_of

if TYPE_CHECKING:  # the process of `GrammarGuard` starts sooner without it
    import numpy as np


class Matcher:
    """Names the tokens that may come next, and takes the one that came.

    It depends on the grammar and its tokens alone, until it fails: copies share the library's tables of limited size.
    """

    __slots__ = ("_inner", "_vocab_words")

    def __init__(self, inner: Any, vocab_words: int) -> None:
        self._inner = inner
        self._vocab_words = vocab_words

    def copy(self) -> Matcher:
        """Return a matcher in the same place, which goes on by itself."""
        return Matcher(self._inner.deep_copy(), self._vocab_words)

    def allowed(self, out_W: np.ndarray) -> None:
        """Write the tokens that may come next: bit i % 32 of word i // 32 int32.

        End tokens are among them if it may end.  None are allowed if the matcher has failed.
        """
        assert out_W.dtype == "int32" and out_W.flags.c_contiguous and len(out_W) == self._vocab_words
        if not self.allowed_at(out_W.ctypes.data, out_W.nbytes):
            out_W[:] = 0

    def allowed_at(self, address: int, num_bytes: int) -> bool:
        """Write the same to the `num_bytes` bytes at an address.  Returns False if the matcher has failed."""
        inner = self._inner
        if inner.is_error():
            return False
        inner.unsafe_compute_mask_ptr(address, num_bytes)
        return not inner.is_error()

    def advance(self, token_id: int) -> bool:
        """Take the next token.  Returns False, and fails, if it is not allowed."""
        return bool(self._inner.consume_token(token_id))

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens it would take next.  It stays in its place, as a copy is asked."""
        return int(self._inner.deep_copy().validate_tokens(list(token_ids)))

    @property
    def is_spent(self) -> bool:
        """True if no mask can be made in this place, as the tables that copies share are full."""
        copy = self.copy()
        copy._inner.compute_bitmask()
        return bool(copy._inner.is_error())

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        self._inner.rollback(count)

    @property
    def may_end(self) -> bool:
        """True where the tokens so far are a whole text of the grammar."""
        return bool(self._inner.is_accepting())

    @property
    def error(self) -> str:
        """The reason why the matcher has failed, in one line; empty if it has not."""
        return error_of(self._inner)
