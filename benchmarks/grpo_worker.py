"""The process that `benchmarks.grpo` asks, in JSON lines: one `Engine`, of the checkout that PYTHONPATH names.

It imports nothing of `benchmarks`: that checkout may have other modules there.
"""

from __future__ import annotations

import json
import random
import sys
import time

from rollout.server.engine import Engine


def main() -> None:
    settings = json.loads(sys.argv[1])
    engine = Engine(dtype="bfloat16", skip_tokenizer_init=True, random_seed=1, **settings)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_generate(engine, **json.loads(line))), flush=True)
    engine.close()


def _generate(
    engine: Engine, seed: int, vocab_size: int, prompts: int, samples: int, prompt_tokens: int, answers: tuple[int, int]
) -> dict[str, float]:
    """Generate `samples` answers to each of `prompts` new prompts, with lengths drawn from the range `answers`.

    Return the seconds, the tokens generated, and the steps taken.
    """
    rng = random.Random(seed)
    input_ids, params = [], []
    for _ in range(prompts):
        prompt = [rng.randrange(vocab_size) for _ in range(prompt_tokens)]
        for _ in range(samples):
            input_ids.append(prompt)
            params.append({"temperature": 1.0, "ignore_eos": True, "max_new_tokens": rng.randint(*answers)})
    steps, start = engine.scheduler.stats.num_steps, time.perf_counter()
    outputs = engine.generate(input_ids=input_ids, sampling_params=params, return_logprob=True)
    seconds = time.perf_counter() - start
    tokens = sum(len(output["output_ids"]) for output in outputs)
    assert tokens == sum(param["max_new_tokens"] for param in params)
    return {"seconds": seconds, "tokens": tokens, "steps": engine.scheduler.stats.num_steps - steps}


if __name__ == "__main__":
    main()
