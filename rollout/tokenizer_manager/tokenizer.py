"""A Hugging Face tokenizer behind three calls: encode, decode, render a chat.

Knows transformers and its threads.  Does not know requests.  Work that may take long leaves the event loop; one worker
thread does it, because a Hugging Face tokenizer is not safe to configure from several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout.core.errors import BadRequest, StartupError, UnsupportedFeature

INLINE_CHARS = 4096
"""Text up to this length is tokenised on the event loop: it takes less time than a hop to the thread."""

Result = TypeVar("Result")


class Tokenizer:
    """Text to ids and back.  All methods are safe to call from one event loop."""

    def __init__(self, backend: PreTrainedTokenizerBase) -> None:
        self._backend = backend
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a folder, never from the network.  Raises `StartupError`."""
        if not Path(path).is_dir():
            raise StartupError(f"tokenizer folder {path} does not exist")
        try:
            backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:
            # transformers raises a dozen unrelated types for a folder without usable tokenizer files.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise StartupError(
                f"no usable tokenizer in {path} ({reason[0]}); give --tokenizer-path or --skip-tokenizer-init"
            ) from error
        return cls(backend)

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.eos_token_id

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text.  Raises `BadRequest` for text that cannot be encoded (lone surrogates)."""
        if not texts:
            return []
        size = sum(len(text) for text in texts)
        if size <= INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        return await self._in_thread(lambda: self._encode(texts, add_special_tokens))

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            if not text.isascii():
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise BadRequest(f"text is not valid Unicode: {error.reason}") from None
        return self._backend(list(texts), add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between: bool = True) -> str:
        """Text of `token_ids`; incomplete characters become U+FFFD, ids without text become nothing."""
        text = self._backend.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str), "a flat list of ids decodes to one text"
        return text

    async def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None, continue_final: bool, extra: dict[str, Any]
    ) -> list[int]:
        """Token ids of a chat under the model's template, ready for the assistant's turn.

        Raises `UnsupportedFeature` without a template, `BadRequest` when the template refuses the messages.
        """
        if not self._backend.chat_template:
            raise UnsupportedFeature(
                "this model's tokenizer has no chat template; send `input_ids` or use /v1/completions"
            )
        return await self._in_thread(lambda: self._render(messages, tools, continue_final, extra))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, continue_final: bool, extra: dict[str, Any]
    ) -> list[int]:
        try:
            text = self._backend.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
                **extra,
            )
        except Exception as error:
            # Templates are programs: what they raise for odd messages is up to their author.
            raise BadRequest(f"messages: the chat template refused them: {error}") from None
        return self._encode([str(text)], False)[0]

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
