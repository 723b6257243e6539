"""`TextOffsets`: the places of tokens in the text of a completion."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rollout.text.token_vocabulary import TokenVocabulary


class TextOffsets:
    """Counts the characters of tokens as they come, whatever names the tokens have in the reply.

    The tokens of one character have its place.  A token that the text does not show has the place of what follows it.
    Without a `vocabulary` there is no text, and every place is 0.
    """

    def __init__(self, vocabulary: TokenVocabulary | None, *, skips_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skips_special = skips_special
        self._position = 0
        self._is_first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the places of a prompt's tokens; the special ones that tokenizing added are not in its `text`."""
        hidden = set()
        if self._vocabulary is not None:
            named = {token_id: self._vocabulary.bytes_of(token_id).decode() for token_id in self._specials(token_ids)}
            hidden = {token_id for token_id, name in named.items() if name not in text}
        offsets = self._count(token_ids, hidden)
        self._position = len(text)
        self._decoder.reset()
        self._is_first = True
        return offsets

    def output(self, token_ids: Sequence[int]) -> list[int]:
        """Return the places of the next output tokens."""
        return self._count(token_ids, set(self._specials(token_ids)) if self._skips_special else set())

    def _specials(self, token_ids: Sequence[int]) -> set[int]:
        return set() if self._vocabulary is None else {*token_ids} & self._vocabulary.special_ids

    def _count(self, token_ids: Sequence[int], hidden: set[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            if self._vocabulary is None or token_id in hidden:
                continue
            piece = self._decoder.decode(self._vocabulary.bytes_of(token_id))
            if self._is_first and self._vocabulary.strips_first_space:
                piece = piece.removeprefix(" ")
            self._is_first = False
            self._position += len(piece)
        return offsets
