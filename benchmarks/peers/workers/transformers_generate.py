"""`transformers.generate`, with the experts implementations that are fastest here for each form of request.

`tune` times the implementations that run on a CPU on prompts of the form (batch size, prompt length).  It keeps the
fastest for the forward that reads the prompts, and the fastest for the forwards that decode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Prompts

EXPERTS = ("grouped_mm", "eager", "batched_mm")
"""The implementations that run on a CPU: deepgemm and sonicmoe need a GPU."""
MAX_BATCHED_MM_BYTES = 4 << 30
"""batched_mm copies the weights of every pick; above this, per layer, it would end the run instead of losing it."""


class Transformers:
    def __init__(self, model_path: str, threads: int, kv_tokens: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.bfloat16, trust_remote_code=False
        ).eval()
        self._model.register_forward_pre_hook(self._choose_experts, with_kwargs=True)
        self._fastest: dict[tuple[int, int], tuple[str, str]] = {}
        self._prefill = self._decode = EXPERTS[0]
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}, {threads} threads"

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        default = EXPERTS[0], EXPERTS[0]
        self._prefill, self._decode = self._fastest.get((len(prompts), len(prompts[0])), default)
        return self._generate(prompts, max_new_tokens)

    @torch.inference_mode()
    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        logits = self._model(input_ids=torch.tensor(prompts), logits_to_keep=1).logits[:, -1].float()
        values, ids = logits.log_softmax(-1).topk(count)
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        usable = [name for name in EXPERTS if name != "batched_mm" or self._batched_mm_fits(prompts)]
        self._prefill = self._fastest_of(usable, "_prefill", prompts, 1)
        self._decode = self._prefill
        if max_new_tokens > 1:
            self._decode = self._fastest_of(EXPERTS, "_decode", prompts, max_new_tokens)
        self._fastest[len(prompts), len(prompts[0])] = self._prefill, self._decode
        return f"prefill {self._prefill}" + (f", decode {self._decode}" if max_new_tokens > 1 else "")

    def close(self) -> None:
        """Do nothing: the system has started nothing outside its process."""

    @torch.inference_mode()
    def _generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        start = time.perf_counter()
        ids = torch.tensor(prompts)
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = output[:, ids.shape[1] :].tolist()
        return time.perf_counter() - start, tokens

    def _choose_experts(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        name = self._decode if kwargs["input_ids"].shape[1] == 1 else self._prefill
        if module.config._experts_implementation != name:
            module.set_experts_implementation(name)

    def _fastest_of(self, names: Sequence[str], stage: str, prompts: Prompts, max_new_tokens: int) -> str:
        """Measure each implementation once, after a request that warms up; return the fastest."""
        seconds = {}
        for name in (names[0], *names):
            setattr(self, stage, name)
            seconds[name] = self._generate(prompts, max_new_tokens)[0]
        return min(seconds, key=lambda name: seconds[name])

    def _batched_mm_fits(self, prompts: Prompts) -> bool:
        config = self._model.config
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        return 2 * sum(map(len, prompts)) * config.num_experts_per_tok * expert <= MAX_BATCHED_MM_BYTES


if __name__ == "__main__":
    protocol.main(Transformers)
