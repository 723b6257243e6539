"""`GrammarBuilder`: a matcher from a grammar's text, for the vocabulary of one model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

from rollout.core.errors import BadRequest
from rollout.core.grammar import Grammar
from rollout.grammar.library import error_of, load, new_matcher
from rollout.grammar.matcher import Matcher, Tables
from rollout.grammar.source import library_source
from rollout.grammar.vocabulary import GrammarVocabulary


class GrammarBuilder:
    """Compiles grammars.  The library and the vocabulary are loaded when the first one comes."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._read_vocabulary = vocabulary

    def build(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of the grammar.  There is no deadline.

        Raises `BadRequest`, in one line, for a grammar that is wrong or over a limit of size or steps;
        `UnsupportedFeature` without the library.
        """
        library = load()
        source = library_source(library, grammar, self._special_tokens)
        begin = functools.partial(new_matcher, library, self._tokenizer, source)
        inner = begin()
        if not inner.is_error():
            probe = inner.deep_copy()
            probe.compute_bitmask()  # some limits are met by the first mask
            inner = probe if probe.is_error() else inner
        if error := error_of(inner):
            raise BadRequest(f"the grammar ({grammar.kind}) is refused: {error}")
        return Matcher(inner, -(-len(self._vocabulary.tokens) // 32), Tables(begin))

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return self._read_vocabulary()

    @cached_property
    def _tokenizer(self) -> Any:
        return self._vocabulary.tokenizer(load())

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        vocabulary = self._vocabulary
        return frozenset(vocabulary.tokens[index].decode(errors="replace") for index in vocabulary.special_ids)
