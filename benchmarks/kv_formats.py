"""Keys and values in FP8 next to bfloat16: memory of a token, and how far log-probabilities move.

    python -m benchmarks.kv_formats

Both engines score the same samples of the engine with KV in bfloat16, on the demo's model.  They differ in the numbers
that the cache holds alone: attention over FP8 has the bits of attention over the widened numbers.

Shapes: N samples, S positions, V vocabulary.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.shapes import cached_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.server.engine import Engine

FORMATS = ("bfloat16", "fp8_e4m3")
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 64


def measure(folder: str) -> dict[str, Any]:
    """Return tokens, bytes of a token by format, KL in nats, top-1 agreement, mean change of a log-probability."""
    engines = {
        name: Engine(
            model_path=folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_total_tokens=8192,
            kv_cache_dtype=name,
            max_logprob_entries=1 << 26,
        )
        for name in FORMATS
    }
    plain = engines["bfloat16"]
    vocab_size = plain.scheduler.runner.state.model.config.vocab_size
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(SAMPLES)]
    params = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": 7}
    answers = plain.generate(input_ids=prompts, sampling_params=params)
    ids = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(prompts, answers, strict=True)]
    plain_NSV, fp8_NSV = (scores(engine, ids, vocab_size) for engine in engines.values())
    targets = torch.tensor(ids)[:, PROMPT_TOKENS:, None]
    row = {
        "tokens": targets.numel(),
        "bytes": [
            sum(tensor.nbytes // len(tensor) for tensor in engine.scheduler.runner.kv_pool.tensors)
            for engine in engines.values()
        ],
        "kl": (plain_NSV.exp() * (plain_NSV - fp8_NSV)).sum(-1).mean().item(),
        "top1": (plain_NSV.argmax(-1) == fp8_NSV.argmax(-1)).float().mean().item(),
        "logprob": (plain_NSV.gather(-1, targets) - fp8_NSV.gather(-1, targets)).abs().mean().item(),
    }
    for engine in engines.values():
        engine.close()
    return row


def scores(engine: Engine, ids: list[list[int]], vocab_size: int) -> torch.Tensor:
    """Return the log-probabilities [N, S, V] of every token after each prompt, from one prefill of each sample."""
    found = []
    for sequence in ids:
        answer = engine.generate(
            input_ids=sequence,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=PROMPT_TOKENS - 1,
            token_ids_logprob=list(range(vocab_size)),
        )
        assert isinstance(answer, dict)
        rows = [row for row in answer["meta_info"]["input_token_ids_logprobs"] if row is not None]
        found.append(torch.tensor([[entry[0] for entry in row] for row in rows][-NEW_TOKENS:]))
    return torch.stack(found)


def main() -> None:
    row = measure(str(cached_checkpoint("demo", CheckpointSpec(shards=4))))
    print(
        f"{row['tokens']} tokens, bytes of a token {row['bytes'][0]} and {row['bytes'][1]}, KL {row['kl']:.2g}, "
        f"top-1 agreement {row['top1']:.2%}, mean change of a log-probability {row['logprob']:.2g}"
    )


if __name__ == "__main__":
    main()
