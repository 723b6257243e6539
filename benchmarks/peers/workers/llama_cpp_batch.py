"""llama.cpp through its C API: all sequences in one `llama_batch`, token ids picked from the logits by numpy.

Contexts are made outside the measured time, one for each number of sequences and room.  `tune` times them with and
without flash attention on prompts of the form (sequences, prompt length) and keeps the faster.  KV is float16,
llama.cpp's default, in a buffer per sequence: one for all was slower from 8 sequences on, by half at 64.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as api
import numpy as np

from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Prompts

BATCH_TOKENS = 2048
"""Most tokens handed over in one call."""
MICRO_BATCH_TOKENS = 512
"""Most tokens computed together."""
ROOM_STEP = 256
"""Sequences get room in multiples of this many tokens, as llama.cpp pads it anyway."""


class LlamaCpp:
    def __init__(self, model_path: str, threads: int, kv_tokens: int) -> None:
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.load_mode = api.LLAMA_LOAD_MODE_NONE
        self._model = api.llama_model_load_from_file(model_path.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {model_path}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._threads = threads
        self._contexts: dict[tuple[int, int, bool], Any] = {}
        self._fastest: dict[tuple[int, int], bool] = {}
        self.about = f"llama-cpp-python {api.__version__}, built for this CPU, {threads} threads"

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        _, seconds, tokens = self._generate(prompts, max_new_tokens, self._flash(prompts))
        return seconds, tokens

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        context = self._context(prompts, 1, self._flash(prompts))
        logits = self._read_prompts(context, np.array(prompts, dtype=np.int32)).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
        return [[(int(token), float(row[token])) for token in top] for row, top in zip(logprobs, ids, strict=True)]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        seconds: dict[bool, float] = {}
        for flash in (True, False):
            # Decoding follows a prefill that has touched the memory; a prefill alone needs a first try for that.
            for _ in range(2 if max_new_tokens == 1 else 1):
                first, whole, _ = self._generate(prompts, max_new_tokens, flash)
            seconds[flash] = whole - first if max_new_tokens > 1 else whole
        best = seconds[True] <= seconds[False]
        self._fastest[len(prompts), len(prompts[0])] = best
        for key in [key for key in self._contexts if key[0] == len(prompts) and key[2] != best]:
            api.llama_free(self._contexts.pop(key))
        return "flash attention" if best else "no flash attention"

    def close(self) -> None:
        """Do nothing: the system has started nothing outside its process."""

    def _flash(self, prompts: Prompts) -> bool:
        return self._fastest.get((len(prompts), len(prompts[0])), True)

    def _generate(self, prompts: Prompts, max_new_tokens: int, flash: bool) -> tuple[float, float, Prompts]:
        """Return the seconds up to the first new token, the seconds in all, and the tokens."""
        context = self._context(prompts, max_new_tokens, flash)
        num_sequences, position = len(prompts), len(prompts[0])
        sequences = np.arange(num_sequences, dtype=np.int32)
        start = time.perf_counter()
        logits = self._read_prompts(context, np.array(prompts, dtype=np.int32))
        picked = [logits.argmax(-1).astype(np.int32)]
        first = time.perf_counter() - start
        for step in range(max_new_tokens - 1):
            positions = np.full(num_sequences, position + step, dtype=np.int32)
            self._decode(context, picked[-1], positions, sequences, np.ones(num_sequences, dtype=np.int8))
            picked.append(self._logits(context, num_sequences).argmax(-1).astype(np.int32))
        tokens = np.stack(picked, 1).tolist()
        return first, time.perf_counter() - start, tokens

    def _context(self, prompts: Prompts, max_new_tokens: int, flash: bool) -> Any:
        """Return an empty context with room for each prompt and its new tokens."""
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("prompts of one request must have one length")
        room = -(-(len(prompts[0]) + max_new_tokens) // ROOM_STEP) * ROOM_STEP
        key = len(prompts), room, flash
        if key not in self._contexts:
            params = api.llama_context_default_params()
            params.n_ctx = len(prompts) * room
            params.n_seq_max = len(prompts)
            params.n_batch, params.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = int(flash)
            params.kv_unified = False
            context = api.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"no context for {len(prompts)} sequences of {room} tokens")
            self._contexts[key] = context
        api.llama_memory_clear(api.llama_get_memory(self._contexts[key]), True)
        return self._contexts[key]

    def _read_prompts(self, context: Any, prompts: np.ndarray) -> np.ndarray:
        """Return the logits [sequences, vocab] after each prompt's last token; `prompts` is [sequences, tokens]."""
        num_sequences, length = prompts.shape
        sequences = np.repeat(np.arange(num_sequences, dtype=np.int32), length)
        positions = np.tile(np.arange(length, dtype=np.int32), num_sequences)
        wanted = (positions == length - 1).astype(np.int8)
        tokens = prompts.reshape(-1)
        rows = []
        for begin in range(0, len(tokens), BATCH_TOKENS):
            part = slice(begin, begin + BATCH_TOKENS)
            self._decode(context, tokens[part], positions[part], sequences[part], wanted[part])
            if num_outputs := int(wanted[part].sum()):
                rows.append(self._logits(context, num_outputs).copy())
        return np.concatenate(rows)

    def _decode(
        self, context: Any, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray
    ) -> None:
        """Call `llama_decode` once.  The arrays are parallel, of int32; `wanted` is of int8."""
        ones = np.ones(len(tokens), dtype=np.int32)
        sequences = np.ascontiguousarray(sequences)
        addresses = sequences.ctypes.data + sequences.itemsize * np.arange(len(tokens), dtype=np.uint64)
        batch = api.llama_batch(
            n_tokens=len(tokens),
            token=_pointer(tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(positions, ctypes.c_int32),
            n_seq_id=_pointer(ones, ctypes.c_int32),
            seq_id=_pointer(addresses, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(wanted, ctypes.c_int8),
        )
        status = api.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _logits(self, context: Any, num_outputs: int) -> np.ndarray:
        """Return a view of the last call's logits, [outputs, vocab]."""
        return np.ctypeslib.as_array(api.llama_get_logits(context), (num_outputs, self._vocab_size))


def _pointer(array: np.ndarray, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


if __name__ == "__main__":
    protocol.main(LlamaCpp)
