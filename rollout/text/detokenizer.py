"""Token ids to text, a few at a time, such that text that was shown never changes.

    ids      [ ... | context | pending ]
    text     [ .....  _text  | _tail   ]      shown = _text + the tail's whole characters, less anything that may be
                                              the start of a stop string

Pending tokens are decoded together with the tokens before them (the context), as Hugging Face's
text-generation-inference does.  A token's text can depend on its neighbour: half a character, or a space that a decoder
strips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
_MAX_PENDING = 16
_MAX_PARTS = 4  # tokens of a character that is still incomplete


class IncrementalDetokenizer:
    """The text of one growing sequence of token ids."""

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        """Begin with no tokens.  `decode` must give the same text for the same ids.

        Text that may be the start of a string in `stop` is held back until it is decided.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self.num_fed = 0
        self._context: list[int] = []
        self._pending: list[int] = []
        self._text = ""
        self._tail = ""

    def feed(self, token_ids: Sequence[int]) -> None:
        """Append token ids."""
        if not token_ids:
            return
        self.num_fed += len(token_ids)
        self._pending += token_ids
        self._tail = self._text_of(self._context, self._pending)
        if not self._tail:
            self._context, self._pending = self._context + self._heard(), []
        elif not self._tail.endswith(INCOMPLETE):
            self._settle(len(self._pending), "")
        elif len(self._pending) > _MAX_PENDING:
            self._pending = self._heard()
            if not self._settle_whole() and len(self._pending) > _MAX_PENDING:
                self._settle_invalid()

    def _text_of(self, context: list[int], ids: list[int]) -> str:
        """Return the text that `ids` add to the text of `context`."""
        if not context:
            return self._decode(ids)
        return self._decode(context + ids)[len(self._decode(context)) :]

    def _settle(self, count: int, rest: str) -> None:
        """Make the text of the first `count` pending tokens final.  `rest` is the text of the other pending tokens."""
        self._text += self._tail[: len(self._tail) - len(rest)]
        self._tail = rest
        self._context, self._pending = self._pending[:count], self._pending[count:]

    def _heard(self) -> list[int]:
        """Return the pending tokens without the ones that leave no trace in a text, such as skipped tokens.

        Any number of these may stand within a character, or between a word and the space of the next: they are no
        context.  A token that is a space alone is heard when it stands a second time.
        """
        return [token_id for token_id in self._pending if self._decode([token_id, token_id])]

    def _settle_whole(self) -> bool:
        """Settle all but the tokens of a last character that is incomplete; false if others are invalid.

        A decoder of byte tokens makes a whole run of them invalid if its last character is incomplete.
        """
        for parts in range(1, min(_MAX_PARTS, len(self._pending))):
            before, after = self._pending[:-parts], self._pending[-parts:]
            text = self._text_of(self._context, before)
            if text and not text.endswith(INCOMPLETE):
                rest = self._text_of(before, after)
                self._tail = text + rest
                self._settle(len(before), rest)
                return True
        return False

    def _settle_invalid(self) -> None:
        """Settle bytes that no later token can make a character of.

        Otherwise each further token would decode all of the invalid ones again.  A cut lies between two characters,
        valid or not, if the texts of its two sides add up to the whole.
        """
        for parts in range(_MAX_PARTS, 2 * _MAX_PARTS):
            before, after = self._pending[:-parts], self._pending[-parts:]
            rest = self._text_of(before, after)
            if self._text_of(self._context, before) + rest == self._tail:
                self._settle(len(before), rest)
                return

    @property
    def decided(self) -> str:
        """Text that no later token can change."""
        return self._text + self._tail.rstrip(INCOMPLETE)

    @property
    def shown(self) -> str:
        """`decided`, less a suffix that may turn out to begin a stop string."""
        text = self.decided
        return text[: len(text) - longest_partial_stop(text, self._stop)]

    @property
    def complete(self) -> str:
        """The whole text, with U+FFFD for characters that stayed incomplete."""
        return self._text + self._tail


def longest_partial_stop(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of some string in `stop`."""
    longest = 0
    for candidate in stop:
        position = text.find(candidate[0], max(0, len(text) - len(candidate) + 1))
        while position != -1:
            if candidate.startswith(text[position:]):
                longest = max(longest, len(text) - position)
                break
            position = text.find(candidate[0], position + 1)
    return longest


def final_text(
    detokenizer: IncrementalDetokenizer, token_ids: Sequence[int], matched: int | str | None, *, trim: bool
) -> str:
    """Return the whole text of a finished sequence, whose last tokens `token_ids` were not fed yet.

    With `trim`, a matched stop token contributes no text and a matched stop string is cut off.  The match is looked
    for where the last token can have completed it: an earlier occurrence did not end the sequence.
    """
    if not token_ids or matched is None or not trim:
        detokenizer.feed(token_ids)
        return detokenizer.complete
    detokenizer.feed(token_ids[:-1])
    if isinstance(matched, int):
        return detokenizer.complete
    before = len(detokenizer.decided)
    detokenizer.feed(token_ids[-1:])
    text = detokenizer.complete
    position = text.find(matched, max(0, before - len(matched) + 1))
    return text if position == -1 else text[:position]
