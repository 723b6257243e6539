"""Lockstep's `Engine`, in process."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Prompts
from rollout.server.engine import Engine


class LockstepEngine:
    def __init__(self, model_path: str, threads: int, kv_tokens: int) -> None:
        self._engine = Engine(
            model_path=model_path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            max_total_tokens=kv_tokens,
            num_threads=threads,
        )
        self.about = f"Engine, {threads} threads"

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        start = time.perf_counter()
        outputs: Any = self._engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - start, [output["output_ids"] for output in outputs]

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        params = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        outputs: Any = self._engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=count
        )
        tops = [output["meta_info"]["output_top_logprobs"][0] for output in outputs]
        return [[(entry[1], entry[0]) for entry in top] for top in tops]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        self.generate(prompts, max_new_tokens)
        return ""

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    protocol.main(LockstepEngine)
