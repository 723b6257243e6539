"""`TokenVocabulary`: what single tokens are, their bytes and whether they are special."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rollout.text.byte_level import BYTE_LETTERS

if TYPE_CHECKING:  # the process of `GrammarGuard` starts sooner without it
    from tokenizers import Tokenizer

_BYTES_OF_LETTERS = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenVocabulary:
    """Facts of a tokenizer's tokens, by id.

    A token's bytes are what it adds to a text in UTF-8.  They may be part of a character, which its text cannot show.
    `strips_first_space`: a text does not show the space that its first token begins with.
    """

    def __init__(self, backend: Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = {index: token.content for index, token in added.items()}
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self._is_byte_level = any(kind["type"] == "ByteLevel" for kind in kinds)
        self._falls_back = any(kind["type"] == "ByteFallback" for kind in kinds)
        self._replaced = [
            (kind["pattern"]["String"], kind["content"])
            for kind in kinds
            if kind["type"] == "Replace" and "String" in kind["pattern"]
        ] + [(kind["replacement"], " ") for kind in kinds if kind["type"] == "Metaspace"]
        self.strips_first_space = any(kind["type"] in ("Strip", "Metaspace") for kind in kinds)
        self._bytes: dict[int, bytes] = {}

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of the `tokens` that exist."""
        ids = map(self._backend.token_to_id, tokens)
        return frozenset(index for index in ids if index is not None)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled = self._backend.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._is_byte_level and all(letter in _BYTES_OF_LETTERS for letter in spelled):
            return bytes(_BYTES_OF_LETTERS[letter] for letter in spelled)
        if self._falls_back and (byte := _BYTE.fullmatch(spelled)):
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replaced:
            spelled = spelled.replace(pattern, content)
        return spelled.encode()


def _decoder_kinds(backend: Tokenizer) -> list[dict[str, Any]]:
    """Return the parts of the tokenizer's decoder, as its file would have them."""
    if backend.decoder is None:
        return []
    whole = json.loads(backend.decoder.__getstate__())
    return whole["decoders"] if whole["type"] == "Sequence" else [whole]
