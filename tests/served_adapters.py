"""Engines that serve adapters: their scores of a prompt, and their answers to batches of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.invariance import Ask, Facts
from tests.scheduler_harness import Harness

IDS = torch.randint(5, 300, (24,), generator=torch.Generator().manual_seed(0)).tolist()
NEAR = 1e-4  # float32 sums in two orders


def scores(harness: Harness, adapter: str | None, ids: Sequence[int] = IDS) -> list[float]:
    (result,) = harness.generate([list(ids)], {"max_new_tokens": 0}, lora_name=adapter, logprob_start_len=0)
    assert result.finished is not None and result.finished.prompt_logprobs is not None
    assert result.finished.reason.type == "length", result.finished.reason
    return result.finished.prompt_logprobs.values[1:]  # type: ignore[return-value]


def distance(got: Sequence[float], want: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, want, strict=True))


def served(folder: Path, adapters: dict[str, Path], **settings: Any) -> Harness:
    paths = ",".join(f"{name}={path}" for name, path in adapters.items())
    defaults = {"enable_lora": True, "max_loras_per_batch": 16, "enable_return_routed_experts": False}
    return Harness(folder, lora_paths=paths, **defaults | settings)


def asks(count: int) -> list[Ask]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 40, (count,), generator=generator).tolist()
    params = {"max_new_tokens": 6, "temperature": 0.0}
    return [Ask(tuple(torch.randint(5, 300, (n,), generator=generator).tolist()), params) for n in lengths]


def answers(harness: Harness, batch: Sequence[tuple[Ask, str | None]]) -> list[Facts]:
    vocabulary = list(range(320))
    rids = [
        harness.submit(list(ask.prompt), params=dict(ask.params), lora_name=name, token_ids_logprob=vocabulary)
        for ask, name in batch
    ]
    harness.run()
    harness.check_idle()
    facts = []
    for rid in rids:
        result = harness.results[rid]
        facts.append(
            Facts(
                result.token_ids,
                torch.tensor(result.logprobs).numpy(),
                torch.tensor(result.chosen).numpy(),
                torch.empty(0, 0, 0).numpy(),
            )
        )
    return facts
