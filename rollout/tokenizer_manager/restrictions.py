"""`Restrictions`: checks grammars, and tokenises bad words, before a request is sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from rollout.core.errors import Unavailable, UnsupportedFeature
from rollout.core.grammar import Grammar
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.core.specs.model_config import ModelConfig
from rollout.grammar.compiler import GrammarCompiler
from rollout.grammar.library import installed_version
from rollout.grammar.vocabulary import GrammarVocabulary
from rollout.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
MAX_WAITING = 64
"""Most requests whose grammars wait for their check, which takes up to a second each."""


class Restrictions:
    """Completes sampling parameters.  Grammars are checked one after the other, in a thread of their own."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._num_waiting = 0
        self._tokenizer: Tokenizer | None = None
        self._compiler: GrammarCompiler | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.has_grammars = False  # True once it can bind answers: it has the library and a tokenizer

    def serve(self, tokenizer: Tokenizer | None) -> None:
        """Begin with the server's tokenizer; without one, requests with a grammar or bad words are refused."""
        if tokenizer is not None:
            self._tokenizer, self.has_grammars = tokenizer, installed_version() is not None
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
            config = self._config
            self._compiler = GrammarCompiler(
                lambda: GrammarVocabulary.of(tokenizer.backend, config.vocab_size, config.eos_token_ids)
            )

    def warm_up(self) -> None:
        """Begin to start the process that checks grammars, if there can be any, so that none waits for it."""
        if self._thread is not None and self._compiler is not None and self.has_grammars:
            self._thread.submit(self._start, self._compiler)

    @staticmethod
    def _start(compiler: GrammarCompiler) -> None:
        try:
            compiler.start()
        except Unavailable as error:
            logger.warning("%s", error)  # the first grammar tries again

    def close(self) -> None:
        """End the thread, and the process that checks grammars; nothing is admitted any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    async def complete(self, messages: Sequence[TokenizedGenerateReqInput]) -> None:
        """Check the grammars of messages, and set the token ids of their bad words.

        Messages that share their parameters still share them afterwards.  Raises `BadRequest` for a grammar that is
        wrong or too costly, `UnsupportedFeature` for what this server cannot do, `Unavailable` if too many wait.
        """
        done: dict[int, tuple[SamplingParams, SamplingParams]] = {}  # by identity, while kept
        for message in messages:
            params = message.sampling_params
            if params.grammar is None and not params.bad_words:
                continue
            if id(params) not in done:
                done[id(params)] = params, await self._completed(params)
            message.sampling_params = done[id(params)][1]

    async def _completed(self, params: SamplingParams) -> SamplingParams:
        tokenizer = self._tokenizer
        if tokenizer is None or self._compiler is None:
            raise UnsupportedFeature(
                "sampling_params: grammars and bad_words need a tokenizer; this server runs --skip-tokenizer-init"
            )
        params.validate_restrictions(self._config.vocab_size)
        if params.grammar is not None:
            await self._check(self._compiler, params.grammar)
        return msgspec.structs.replace(params, bad_word_ids=await self._bad_word_ids(tokenizer, params.bad_words))

    async def _check(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable(f"{self._num_waiting} requests wait until their grammars are checked; try again")
        self._num_waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, compiler.check, grammar)
        finally:
            self._num_waiting -= 1

    async def _bad_word_ids(self, tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell `words`: at the beginning of a text, and behind a space.

        The second one counts only if its first token alone differs: vLLM's rule.  Sequences with a token that the model
        cannot sample are left out.
        """
        bare = [word.lstrip() for word in words]
        plain = await tokenizer.encode(bare, add_special_tokens=False)
        spaced = await tokenizer.encode([f" {word}" for word in bare], add_special_tokens=False)
        found = list(plain)
        for first, second in zip(plain, spaced, strict=True):
            if second and first and second[0] != first[0] and len(second) == len(first):
                found.append(second)
        return [ids for ids in found if ids and max(ids) < self._config.vocab_size]
