"""`PlainTexts`: the texts of requests, in which drafts are looked up.

    ... if x is None : return y    ...    if x is None :  ->  return y
        `-- the same four tokens --------- the end --'

Texts of one prompt share an index.  It has an entry for each run of `shortest` tokens: the last place where it ended.
Each place knows the one before, so that the few last places are compared backwards, and the longest match wins.

`rollout/kernels/csrc/draft_texts.cpp` has the same class with the same results; it takes a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LONGEST = 32  # tokens of a match that are compared
_PLACES = 8  # that are compared for one proposal
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NOWHERE = -1
_NUMBERS = 4  # of an ask


class _Text:
    """One run of tokens in an index: `before[i]` is the place before of the run that ends at token i."""

    __slots__ = ("before", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.before: list[int] = []


@dataclass(eq=False, slots=True)
class _Index:
    """Texts, of which the first is the prompt.

    A place is `number of the text << 32 | index of the token` that follows the run.
    """

    texts: list[_Text] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)  # by the hash of a run


class PlainTexts:
    """Indices by number, and in each of them texts by number."""

    def __init__(self, shortest: int) -> None:
        """Use matches of at least `shortest` tokens, at least 1."""
        self._shortest = shortest
        self._indices: dict[int, _Index] = {}
        self._next = 0

    def add_index(self, prompt_T: torch.Tensor) -> int:
        """Make an index of a prompt [T], int64, and return its number."""
        index = self._indices[self._next] = _Index()
        self._feed(index, self._new_text(index), prompt_T.tolist())
        self._next += 1
        return self._next - 1

    def add_text(self, number: int) -> int:
        """Add a text to an index, and return its number there.  It begins with the last tokens of the prompt."""
        index = self._indices[number]
        ids = index.texts[0].token_ids[-LONGEST:]
        own = self._new_text(index)
        self._feed(index, own, ids[:-1], enters=False)
        self._feed(index, own, ids[-1:])  # what follows the prompt is found from now on
        return own

    def drop_index(self, number: int) -> None:
        """Drop an index with its texts."""
        del self._indices[number]

    def sizes(self, number: int) -> tuple[int, int]:
        """Return how many tokens the prompt of an index has, and how many its other texts."""
        prompt, *others = (len(text.token_ids) for text in self._indices[number].texts)
        return prompt, sum(others)

    def propose(self, given: torch.Tensor) -> torch.Tensor:
        """Append tokens to texts, then look up the end of each of them.

        `given`, int64: the number of asks; four numbers of each: the index, the text, how many of the next tokens are
        appended to it, and the most tokens to propose; and these tokens.  Returns the length of each match, 0 for none;
        how many tokens follow each; and these tokens, one ask after the other.
        """
        num_asks, *numbers = given.tolist()
        each = [numbers[_NUMBERS * n : _NUMBERS * (n + 1)] for n in range(num_asks)]
        token_ids, used = numbers[_NUMBERS * num_asks :], 0
        for number, own, count, _ in each:
            self._feed(self._indices[number], own, token_ids[used : used + count])
            used += count
        found = [self._best(self._indices[number], own, most) for number, own, _, most in each]
        lengths, proposed = [length for length, _ in found], [ids for _, ids in found]
        counts, tokens = [len(ids) for ids in proposed], [token_id for ids in proposed for token_id in ids]
        return torch.tensor([*lengths, *counts, *tokens], dtype=torch.int64)

    def _new_text(self, index: _Index) -> int:
        index.texts.append(_Text())
        return len(index.texts) - 1

    def _feed(self, index: _Index, own: int, token_ids: Sequence[int], *, enters: bool = True) -> None:
        """Append tokens to a text.  `enters`: its new runs can be found from now on."""
        text, shortest, newest = index.texts[own], self._shortest, index.newest
        ids, before = text.token_ids, text.before
        for token_id in token_ids:
            ids.append(token_id)
            place = _NOWHERE
            if enters and len(ids) >= shortest:
                key = _hash(ids[-shortest:])
                place = newest.get(key, _NOWHERE)
                newest[key] = own << 32 | len(ids)
            before.append(place)

    def _best(self, index: _Index, own: int, most: int) -> tuple[int, list[int]]:
        """Return the longest match of the end of a text with what follows; of equal ones, the newest with most tokens.

        All are of the last places where the end stood before.
        """
        ids = index.texts[own].token_ids
        best: tuple[int, list[int]] = (0, [])
        if most <= 0 or len(ids) < self._shortest:
            return best
        place = index.newest.get(_hash(ids[-self._shortest :]), _NOWHERE)
        for _ in range(_PLACES):
            if place == _NOWHERE:
                break
            text, end = index.texts[place >> 32], place & 0xFFFFFFFF
            length = _match(ids, text.token_ids, end) if end < len(text.token_ids) else 0
            if length >= self._shortest:
                proposed = text.token_ids[end : end + most]
                if (length, len(proposed)) > (best[0], len(best[1])):
                    best = length, proposed
            place = text.before[end - 1]
        return best


def _match(ids: list[int], other: list[int], end: int) -> int:
    """Return how many of the last tokens of `ids` are the ones before index `end` of `other`, up to a limit."""
    length, limit = 0, min(len(ids), end, LONGEST)
    last = len(ids) - 1
    while length < limit and ids[last - length] == other[end - 1 - length]:
        length += 1
    return length


def _hash(token_ids: list[int]) -> int:
    """Return a hash of a few tokens, of 64 bits.  Equal hashes of unlike tokens cost a comparison."""
    value = 0
    for token_id in token_ids:
        value = ((value ^ token_id & _MASK) * _MIX) & _MASK
    return value
