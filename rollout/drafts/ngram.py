"""`NgramDrafter`: proposes what followed the last tokens of a request where they stood before.

    ... if x is None : return y    ...    if x is None :  ->  return y
        `-- the same four tokens --------- the end --'

The text is the request's prompt and output, and the output of the other samples of its prompt.  Source: prompt lookup
decoding (Saxena, 2023) and suffix decoding (Oliaro et al., 2024), here with the longest match and no tree.

An index has an entry for each run of `shortest` tokens: the last place where it ended.  Each place knows the one
before, so that the few last places are compared backwards, and the longest match wins.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from rollout.core.prompt import Prompt
from rollout.drafts.base import NO_DRAFT, Draft, DraftedSequence, Drafter

_PLACES = 8  # that are compared for one proposal
_LONGEST = 32  # tokens of a match that are compared
_FULL = 1 << 20  # tokens of samples
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NOWHERE = -1


class _Text:
    """One run of tokens in an index: `before[i]` is the place before of the run that ends at token i."""

    __slots__ = ("before", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.before: list[int] = []


@dataclass(eq=False, slots=True)
class _Index:
    """The texts of one prompt.  A place is `number of the text << 32 | index of the token` that follows the run."""

    texts: list[_Text] = field(default_factory=list)
    newest: dict[int, int] = field(default_factory=dict)  # by the hash of a run
    num_readers: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts)

    @property
    def is_full(self) -> bool:
        """True once it should get no more samples, so that it goes with the ones that it has.

        Else the samples of a prompt that comes again and again would all be kept.
        """
        return self.num_tokens - len(self.texts[0].token_ids) >= _FULL


@dataclass(eq=False, slots=True)
class _Reader:
    """One request: its index, the number of its own text there, and how many of its output tokens are in it."""

    index: _Index
    number: int
    num_fed: int = 0


class NgramDrafter(Drafter):
    """Keeps an index of each prompt that requests have, and of the `history_tokens` newest ones that none has.

    `shortest`: the tokens of the shortest match, at least 1.
    """

    def __init__(self, shortest: int = 3, history_tokens: int = 0) -> None:
        self._shortest = shortest
        self._max_history = history_tokens
        self._readers: dict[DraftedSequence, _Reader] = {}
        self._indices: dict[int, tuple[Prompt, _Index]] = {}  # by the prompt's key
        self._history: OrderedDict[int, int] = OrderedDict()  # tokens of the indices without readers, oldest first

    def propose(self, sequence: DraftedSequence, most: int) -> Draft:
        reader = self._readers.get(sequence)
        if reader is None:
            reader = self._readers[sequence] = self._new_reader(sequence.prompt)
        index, text = reader.index, reader.index.texts[reader.number]
        output = sequence.output_ids
        if reader.num_fed < len(output):
            self._feed(index, reader.number, output[reader.num_fed :])
            reader.num_fed = len(output)
        if most <= 0 or len(text.token_ids) < self._shortest:
            return NO_DRAFT
        return self._best(index, reader.number, most)

    def forget(self, sequence: DraftedSequence) -> None:
        reader = self._readers.pop(sequence, None)
        if reader is None:
            return
        reader.index.num_readers -= 1
        if reader.index.num_readers == 0:
            self._retire(sequence.prompt.key, reader.index)

    @property
    def num_tokens(self) -> int:
        """The tokens of all indices."""
        return sum(index.num_tokens for _, index in self._indices.values())

    def _new_reader(self, prompt: Prompt) -> _Reader:
        """Return a reader with a text of its own, which begins with the last tokens of the prompt."""
        known = self._indices.get(prompt.key)
        self._history.pop(prompt.key, None)
        if known is None or not np.array_equal(known[0].array, prompt.array) or known[1].is_full:
            index = _Index([_Text()])
            _feed_many(index, prompt.array, self._shortest)
            self._indices[prompt.key] = prompt, index
        else:
            index = known[1]
        index.num_readers += 1
        index.texts.append(_Text())
        number = len(index.texts) - 1
        ids = prompt.array[-_LONGEST:].tolist()
        self._feed(index, number, ids[:-1], enters=False)
        self._feed(index, number, ids[-1:])  # what follows the prompt is found from now on
        return _Reader(index, number)

    def _retire(self, key: int, index: _Index) -> None:
        """Keep an index that no request reads any more as history, or drop it."""
        held = self._indices.get(key)
        if held is None or held[1] is not index:
            return  # another prompt of the same key has taken its place
        if index.num_tokens > self._max_history:
            del self._indices[key]
            return
        self._history[key] = index.num_tokens
        while sum(self._history.values()) > self._max_history:
            oldest, _ = self._history.popitem(last=False)
            del self._indices[oldest]

    def _feed(self, index: _Index, number: int, token_ids: list[int], *, enters: bool = True) -> None:
        """Append tokens to a text.  `enters`: its new runs can be found from now on."""
        text, shortest, newest = index.texts[number], self._shortest, index.newest
        ids, before = text.token_ids, text.before
        for token_id in token_ids:
            ids.append(token_id)
            place = _NOWHERE
            if enters and len(ids) >= shortest:
                key = _hash(ids[-shortest:])
                place = newest.get(key, _NOWHERE)
                newest[key] = number << 32 | len(ids)
            before.append(place)

    def _best(self, index: _Index, number: int, most: int) -> Draft:
        """Return what follows the longest match of the end of a text; of equal ones, the newest with most tokens."""
        ids = index.texts[number].token_ids
        place = index.newest.get(_hash(ids[-self._shortest :]), _NOWHERE)
        best, found = (0, 0), NO_DRAFT
        for _ in range(_PLACES):
            if place == _NOWHERE:
                break
            text, end = index.texts[place >> 32], place & 0xFFFFFFFF
            length = _match(ids, text.token_ids, end) if end < len(text.token_ids) else 0
            if length >= self._shortest:
                proposed = text.token_ids[end : end + most]
                if (length, len(proposed)) > best:
                    best, found = (length, len(proposed)), Draft(proposed, length)
            place = text.before[end - 1]
        return found


def _match(ids: list[int], other: list[int], end: int) -> int:
    """Return how many of the last tokens of `ids` are the ones before index `end` of `other`, up to a limit."""
    length, limit = 0, min(len(ids), end, _LONGEST)
    last = len(ids) - 1
    while length < limit and ids[last - length] == other[end - 1 - length]:
        length += 1
    return length


def _hash(token_ids: list[int]) -> int:
    """Return a hash of a few tokens, of 64 bits.  Equal hashes of unlike tokens cost a comparison."""
    value = 0
    for token_id in token_ids:
        value = ((value ^ token_id) * _MIX) & _MASK
    return value


def _feed_many(index: _Index, token_ids: np.ndarray, shortest: int) -> None:
    """Append a prompt to the first text: as `NgramDrafter._feed` does, in a few operations on arrays."""
    text = index.texts[0]
    text.token_ids += token_ids.tolist()
    text.before += [_NOWHERE] * len(token_ids)
    count = len(token_ids) - shortest + 1
    if count <= 0:
        return
    keys = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(shortest):
            keys = (keys ^ token_ids[offset : offset + count].astype(np.uint64)) * np.uint64(_MIX)
    order = np.argsort(keys, kind="stable")  # equal keys next to one another, by place
    places = order + shortest
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1]) + 1
    for later, earlier in zip(places[same].tolist(), places[same - 1].tolist()):
        text.before[later - 1] = earlier
    index.newest.update(zip(keys.tolist(), range(shortest, len(token_ids) + 1)))
