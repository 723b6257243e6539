"""Texts that are drawn at random under the masks of a grammar, byte by byte."""

from __future__ import annotations

import decimal
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout.core.grammar import Grammar
from rollout.grammar.compiler import GrammarCompiler
from rollout.grammar.matcher import Matcher
from rollout.grammar.vocabulary import GrammarVocabulary

END = "<end of output>"


def byte_tokenizer(markers: Mapping[str, bool]) -> Tokenizer:
    """Return a tokenizer of bytes and of `markers`, each special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark, special in markers.items()])
    return tokenizer


Place = tuple[Matcher, str]
"""A matcher, and the text that it took."""


def _texts_of(value: Any) -> list[str]:
    """Return texts of a plain JSON value, neither an array nor an object.

    Numbers are without and with an exponent, and with more digits than they need.
    """
    if isinstance(value, str):
        plain = json.dumps(value, ensure_ascii=False)
        return [plain, plain.replace("\x7f", "\\u007f")]
    texts = [json.dumps(value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        exact = decimal.Decimal(repr(value))
        plain = f"{int(exact)}" if exact == int(exact) else f"{exact:f}".rstrip("0")
        texts += [plain, f"{plain}0" if "." in plain else f"{plain}.0", *(["-0", "-0.0"] if not value else [])]
    return list(dict.fromkeys(texts))


class Drawer:
    """Draws texts, and tells which texts a grammar accepts.

    A draw tries one of `endings` at each step, so that texts end, and takes any allowed token where it does not fit.
    """

    def __init__(self, markers: Mapping[str, bool], endings: Sequence[str]) -> None:
        self.tokenizer = byte_tokenizer(markers)
        self.size = self.tokenizer.get_vocab_size()
        self._end = self.tokenizer.token_to_id(END)
        self._compiler = GrammarCompiler(lambda: GrammarVocabulary.of(self.tokenizer, self.size, [self._end]))
        self._endings = [self.tokenizer.encode(text).ids for text in endings]

    def check(self, grammar: Grammar) -> None:
        """Raise `BadRequest` for a grammar that is refused."""
        self._compiler.matcher(grammar)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Return whether the text is whole."""
        matcher = self._compiler.matcher(grammar)
        return all(map(matcher.advance, self.tokenizer.encode(text).ids)) and matcher.may_end

    def spelling(self, grammar: Grammar, value: Any) -> str | None:
        """Return a text of a JSON value that the grammar accepts, with any order of keys; None if there is none."""
        ends = self._ways([(self._compiler.matcher(grammar), "")], value)
        return next((text for matcher, text in ends if matcher.may_end), None)

    def _ways(self, places: Iterable[Place], value: Any) -> Iterator[Place]:
        """Yield the places behind each text of a value, from each of some places."""
        if isinstance(value, dict):
            for place in self._behind(places, ["{"]):
                yield from self._behind(self._members(place, list(value.items()), ""), ["}"])
        elif isinstance(value, list):
            inner = self._behind(places, ["["])
            for index, each in enumerate(value):
                inner = self._ways(self._behind(inner, [","]) if index else inner, each)
            yield from self._behind(inner, ["]"])
        else:
            yield from self._behind(places, _texts_of(value))

    def _members(self, place: Place, members: list[tuple[str, Any]], comma: str) -> Iterator[Place]:
        """Yield the places behind the members of an object, in each order."""
        if not members:
            yield place
        for index, (key, value) in enumerate(members):
            rest = members[:index] + members[index + 1 :]
            keys = self._behind([place], [f"{comma}{text}:" for text in _texts_of(key)])
            for behind in self._ways(keys, value):
                yield from self._members(behind, rest, ",")

    def _behind(self, places: Iterable[Place], texts: Sequence[str]) -> Iterator[Place]:
        """Yield the places behind each of some texts that can follow."""
        for matcher, before in places:
            for text in texts:
                following = matcher.copy()
                if all(map(following.advance, self.tokenizer.encode(text).ids)):
                    yield following, before + text

    def text(self, grammar: Grammar, seed: int, max_tokens: int = 4000, begin: str = "") -> str:
        """Draw a text that starts with `begin`.  Raises `AssertionError` if it does not end."""
        generator, matcher = random.Random(seed), self._compiler.matcher(grammar)
        packed_W: np.ndarray = np.zeros(-(-self.size // 32), dtype=np.int32)
        ids: list[int] = self.tokenizer.encode(begin).ids
        assert all(map(matcher.advance, ids)), f"{begin!r} is refused"
        while len(ids) < max_tokens:
            matcher.allowed(packed_W)
            allowed = np.flatnonzero(np.unpackbits(packed_W.view(np.uint8), bitorder="little")[: self.size])
            if self._end in allowed and (len(allowed) == 1 or generator.random() < 0.7):
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            ending = generator.choice(self._endings)
            trial = matcher.copy()
            if not all(map(trial.advance, ending)):
                ending = [generator.choice([index for index in allowed.tolist() if index != self._end])]
            assert all(map(matcher.advance, ending))
            ids += ending
        raise AssertionError("no end")
