"""`GrammarVocabulary`: what the library of grammars knows of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.text.token_vocabulary import TokenVocabulary

if TYPE_CHECKING:  # the process of `GrammarGuard` starts sooner without it
    from tokenizers import Tokenizer


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token id below the size of the model's vocabulary; ids without a token have none.

    `special_ids` are tokens that no text has.  `eos_ids`, at least one, end an output.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]

    @classmethod
    def of(cls, backend: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> GrammarVocabulary:
        """Read the tokens of a tokenizer.  A model without end tokens gets its last id as one, which is not used."""
        known = TokenVocabulary(backend)
        inside = [index for index in eos_ids if 0 <= index < vocab_size]
        special = known.special_ids.union(inside)
        return cls(
            tokens=[known.bytes_of(index) for index in range(vocab_size)],
            special_ids=sorted(index for index in special if index < vocab_size),
            eos_ids=inside or [vocab_size - 1],
        )

    def tokenizer(self, library: Any) -> Any:
        """Return the library's tokenizer.  It takes a second at 150,000 tokens."""
        eos = self.eos_ids
        tokens = list(self.tokens)
        for index in eos:
            tokens[index] = tokens[index] or b"<end of output>"
        return library.LLTokenizer(library.TokenizerWrapper(_Tokens(tokens, self.special_ids, eos[0])), eos_token=eos)


class _Tokens:
    """The form in which the library reads a vocabulary.  It is not asked for the usual tokens of a text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_ids, eos_id
        self._of_byte = {token[0]: index for index, token in reversed(list(enumerate(tokens))) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._of_byte[byte] for byte in text if byte in self._of_byte]
