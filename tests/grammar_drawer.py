"""Texts that are drawn at random under the masks of a grammar, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout.core.grammar import Grammar
from rollout.grammar.compiler import GrammarCompiler
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
