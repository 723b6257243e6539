"""`NgramDrafter`: proposes what followed the last tokens of a request where they stood before.

The text is the request's prompt and output, and the output of the other samples of its prompt.  Source: prompt lookup
decoding (Saxena, 2023) and suffix decoding (Oliaro et al., 2024), here with the longest match and no tree.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout.core.prompt import Prompt
from rollout.drafts.base import NO_DRAFT, Draft, DraftedSequence, Drafter
from rollout.drafts.plain_texts import PlainTexts

_FULL = 1 << 20  # tokens of samples


@dataclass(eq=False, slots=True)
class _Index:
    """The texts of one prompt: their number in `DraftTexts`, and how many requests read them."""

    number: int
    num_readers: int = 0


@dataclass(eq=False, slots=True)
class _Reader:
    """One request: its index, the number of its own text there, and how many of its output tokens are in it."""

    index: _Index
    number: int
    num_fed: int = 0


class NgramDrafter(Drafter):
    """Keeps an index of each prompt that requests have, and of the `history_tokens` newest ones that none has.

    `shortest`: the tokens of the shortest match, at least 1.  `texts`: where they are looked up; by default in compiled
    code, where `load_kernels` loaded it.
    """

    def __init__(self, shortest: int = 3, history_tokens: int = 0, texts: PlainTexts | None = None) -> None:
        self._texts = _loaded_texts(shortest) if texts is None else texts
        self._look_up = self._texts.propose  # looked up once, as that takes longer than to look up a draft
        self._max_history = history_tokens
        self._readers: dict[DraftedSequence, _Reader] = {}
        self._indices: dict[int, tuple[Prompt, _Index]] = {}  # by the prompt's key
        self._history: OrderedDict[int, int] = OrderedDict()  # tokens of the indices without readers, oldest first

    def propose(self, asks: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        numbers, token_ids = array("q", [len(asks)]), array("q")
        for sequence, most in asks:
            reader = self._readers.get(sequence)
            if reader is None:
                reader = self._readers[sequence] = self._new_reader(sequence.prompt)
            output = sequence.output_ids
            new = len(output) - reader.num_fed
            if new == 1:
                token_ids.append(output[-1])
            elif new:
                token_ids.extend(output[reader.num_fed :])
            numbers.extend((reader.index.number, reader.number, new, most))
            reader.num_fed += new
        found = self._look_up(torch.frombuffer(numbers + token_ids, dtype=torch.int64)).tolist()
        if len(found) == 2 * len(asks):
            return [NO_DRAFT] * len(asks)
        drafts, begin = [], 2 * len(asks)
        for length, count in zip(found[: len(asks)], found[len(asks) : begin], strict=True):
            drafts.append(Draft(found[begin : begin + count], length) if count else NO_DRAFT)
            begin += count
        return drafts

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
        return sum(sum(self._texts.sizes(index.number)) for _, index in self._indices.values())

    def _new_reader(self, prompt: Prompt) -> _Reader:
        """Return a reader with a text of its own."""
        known = self._indices.get(prompt.key)
        self._history.pop(prompt.key, None)
        if known is None or not np.array_equal(known[0].array, prompt.array) or self._is_full(known[1]):
            if known is not None and known[1].num_readers == 0:
                self._texts.drop_index(known[1].number)
            index = _Index(self._texts.add_index(torch.from_numpy(prompt.array)))
            self._indices[prompt.key] = prompt, index
        else:
            index = known[1]
        index.num_readers += 1
        return _Reader(index, self._texts.add_text(index.number))

    def _is_full(self, index: _Index) -> bool:
        """Return whether an index should get no more samples, so that it goes with the ones that it has.

        Else the samples of a prompt that comes again and again would all be kept.
        """
        return self._texts.sizes(index.number)[1] >= _FULL

    def _retire(self, key: int, index: _Index) -> None:
        """Keep an index that no request reads any more as history, or drop it."""
        held = self._indices.get(key)
        if held is None or held[1] is not index:
            self._texts.drop_index(index.number)  # another prompt of the same key has taken its place
            return
        num_tokens = sum(self._texts.sizes(index.number))
        if num_tokens > self._max_history:
            self._drop(key)
            return
        self._history[key] = num_tokens
        while sum(self._history.values()) > self._max_history:
            oldest, _ = self._history.popitem(last=False)
            self._drop(oldest)

    def _drop(self, key: int) -> None:
        _, index = self._indices.pop(key)
        self._texts.drop_index(index.number)


def _loaded_texts(shortest: int) -> Any:
    """Return the compiled form of `PlainTexts` where it is loaded, else the plain one."""
    if hasattr(torch.ops.lockstep, "isa"):
        return torch.classes.lockstep.DraftTexts(shortest)
    return PlainTexts(shortest)
