"""The tokenizer of a checkpoint behind three calls: encode, decode, render a chat.

Work that may take long runs in one of two threads, so that short work does not wait behind long work.  A text takes
hundreds of bytes a token while it is encoded.  So texts that cannot fit are refused before, and long ones are encoded
in parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollout.core.errors import BadRequest, TooLarge
from rollout.text.chat_template import ChatTemplates
from rollout.text.token_vocabulary import TokenVocabulary
from rollout.text.tokenizer_files import TokenizerFiles, read_tokenizer

INLINE_CHARS = 4096
"""Text up to this length is tokenised on the event loop: it takes less time than a hop to the thread."""
LONG_CHARS = 64 * 1024
"""Text over this length is handled by the thread for long work."""
PART_CHARS = 256 * 1024
"""Text encoded at once; a single longer text is counted in such parts first."""
EMPTY_CHARS = 16
MAX_TOKENS = 1 << 24
"""Most tokens of all texts of a call."""

Result = TypeVar("Result")


class Tokenizer:
    """Text to ids and back.  All methods are safe to call from one event loop.

    `backend`: the library's own object.  `context_length`: tokens of the longest prompt of any use; a text with far
    more is refused before it is encoded.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.context_length: int | None = None
        self.vocabulary = TokenVocabulary(files.backend)
        self.backend = files.backend
        self._special_tokens = files.special_tokens
        self._templates = ChatTemplates(files.chat_templates, files.special_tokens)
        vocabulary = files.backend.get_vocab()
        self._vocab_size, self._longest_token = len(vocabulary), max(map(len, vocabulary), default=1)
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-short")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a folder, never from the network; no code of the folder runs.  Raises `StartupError`."""
        return cls(read_tokenizer(path))

    @property
    def eos_token_id(self) -> int | None:
        text = self._special_tokens.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    def facts(self) -> dict[str, Any]:
        """Return the tokens that have a role, null where there is none, and the chat template."""
        roles: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        roles |= {role: token for role, token in self._special_tokens.items() if role in roles}
        return roles | {"chat_template": self._templates.source, "vocab_size": self._vocab_size}

    def close(self) -> None:
        for executor in (self._short, self._long):
            executor.shutdown(wait=False, cancel_futures=True)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text.

        Raises `BadRequest` for text that cannot be encoded (lone surrogates) or cannot fit into the context, `TooLarge`
        for more than `MAX_TOKENS`.
        """
        if not texts:
            return []
        size = _size(texts)
        if size <= INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        return await self._in_thread(lambda: self._encode(texts, add_special_tokens), size)

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Return the token ids of each pair of texts, joined as the tokenizer joins two.  Raises as `encode` does."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))

        def encode() -> list[list[int]]:
            for text in texts:
                self._check(text)
            ids: list[list[int]] = []
            num_tokens = 0
            for pair in pairs:
                ids.append(self.backend.encode(*pair).ids)
                num_tokens += len(ids[-1])
                if num_tokens > MAX_TOKENS:
                    raise TooLarge(f"the texts have more than {MAX_TOKENS} tokens; send fewer or shorter texts")
            return ids

        size = sum(len(text) + EMPTY_CHARS for pair in pairs for text in pair)
        return encode() if size <= INLINE_CHARS else await self._in_thread(encode, size)

    def encode_short(self, text: str) -> list[int]:
        """Return the token ids of a text of at most `INLINE_CHARS` at once.  Raises as `encode` does."""
        return self._encode([text], True)[0]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            self._check(text)
        ids: list[list[int]] = []
        num_tokens = 0
        for part in _parts(texts):
            ids += self._ids(part, add_special_tokens)
            num_tokens += sum(map(len, ids[-len(part) :]))
            if num_tokens > MAX_TOKENS:
                raise TooLarge(f"the texts have more than {MAX_TOKENS} tokens; send fewer or shorter texts")
        return ids

    def _ids(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _check(self, text: str) -> None:
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise BadRequest(f"text is not valid Unicode: {error.reason}") from None
        if self.context_length is not None and self._is_far_too_long(text, self.context_length):
            raise BadRequest(f"The input is longer than the model's context length ({self.context_length} tokens).")

    def _is_far_too_long(self, text: str, context_length: int) -> bool:
        """Return whether `text` has more tokens than fit, without encoding all of it at once.

        A cut can split a token or two, and never doubles their number.
        """
        if len(text) <= PART_CHARS:
            return False
        if len(text) > context_length * self._longest_token:
            return True
        num_tokens = 0
        for start in range(0, len(text), PART_CHARS):
            num_tokens += len(self._ids([text[start : start + PART_CHARS]], False)[0])
            if num_tokens > 2 * context_length:
                return True
        return False

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept_ids: frozenset[int] = frozenset(),
    ) -> str:
        """Return the text of `token_ids`; incomplete characters become U+FFFD, ids without text become nothing.

        `kept_ids` are special tokens that are not skipped.
        """
        if kept_ids and skip_special_tokens:
            skipped = self.vocabulary.special_ids - kept_ids
            token_ids, skip_special_tokens = [index for index in token_ids if index not in skipped], False
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special ones too; cached, as a few thousand are wanted again and again."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    async def decode_each(self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of ids."""
        size = _size(batch)

        def decode() -> list[str]:
            return [self.decode(token_ids, skip_special_tokens=skip_special_tokens) for token_ids in batch]

        return decode() if size <= INLINE_CHARS else await self._in_thread(decode, size)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        continue_final: bool,
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> list[int]:
        """Return the token ids of a chat under the model's template, see `render_text`."""
        text = await self.render_text(
            messages,
            tools=tools,
            continue_final=continue_final,
            add_generation_prompt=add_generation_prompt,
            extra=extra,
        )
        return (await self.encode([text], add_special_tokens=False))[0]

    async def render_text(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        continue_final: bool,
        add_generation_prompt: bool,
        extra: dict[str, Any],
    ) -> str:
        """Return a chat under the model's template.

        It ends where the last message goes on (`continue_final`), or else after the head of the assistant's turn
        (`add_generation_prompt`) or the end of the last message.
        Raises `UnsupportedFeature` without a template, `BadRequest` when the template refuses the messages.
        """
        self._templates.template(for_tools=tools is not None)
        texts = [text for message in messages for text in message.values()]
        is_plain = tools is None and all(isinstance(text, str) for text in texts)
        size = _size(texts) + len(messages) if is_plain else LONG_CHARS + 1

        def render() -> str:
            return self._templates.render(
                messages,
                tools=tools,
                continue_final=continue_final,
                add_generation_prompt=add_generation_prompt,
                variables=extra,
            )

        return await self._in_thread(render, size)

    async def _in_thread(self, work: Callable[[], Result], size: int) -> Result:
        executor = self._short if size <= LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(executor, work)


def _size(parts: Sequence[Sequence[Any]]) -> int:
    """Return the number of characters or ids; an empty text takes as long as `EMPTY_CHARS`."""
    return sum(map(len, parts)) + EMPTY_CHARS * len(parts)


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield runs of `texts` of at most `PART_CHARS` together, but at least one each."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > PART_CHARS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield part
