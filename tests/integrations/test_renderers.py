"""renderers, the client half of prime-rl's and verifiers' rollouts: token ids in, token ids and routes out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
from openai import AsyncOpenAI
from renderers.base import create_renderer, load_tokenizer
from renderers.client import OverlongPromptError, generate

from tests.integrations.framework import Framework
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="renderers (prime-rl, verifiers)",
    packages=("renderers",),
    flags={"enable_return_routed_experts": True, "vllm_routed_experts": "dict"},
    not_there=("images", "sampling masks"),
)
MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


class Trial:
    def __init__(self, server: ServerProcess, checkpoint: Path) -> None:
        self.url = server.url
        self.model = server.client.model_info()["served_model_name"]
        self.renderer = create_renderer(load_tokenizer(str(checkpoint)))

    def generate(self, **options: Any) -> Any:
        async def call() -> Any:
            async with AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
                return await generate(
                    client=client, renderer=self.renderer, messages=MESSAGES, model=self.model, **options
                )

        return _run(call())


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module")
def trial(server: ServerProcess, checkpoint: Path) -> Trial:
    return Trial(server, checkpoint)


def sampling(tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, **more}


def test_generate_returns_a_log_probability_a_token(trial: Trial) -> None:
    reply = trial.generate(sampling_params=sampling(6), cache_salt="v1", priority=1)
    assert len(reply["completion_ids"]) == len(reply["completion_logprobs"]) == 6
    assert reply["finish_reason"] == "length" and reply["usage"]["prompt_tokens_details"] is not None


def test_routes_are_spliced_out_of_the_bytes(trial: Trial) -> None:
    """The client cuts the base64 out of the raw answer, which works for exactly the bytes that vLLM writes."""
    reply = trial.generate(sampling_params=sampling(6))
    routes = reply["routed_experts"]
    assert isinstance(routes["data"], memoryview)
    ids = np.frombuffer(pybase64.b64decode(routes["data"]), dtype=routes["dtype"]).reshape(routes["shape"])
    assert ids.shape == (len(reply["prompt_ids"]) + 6 - 1, 4, 2) and ids[:, 1:].any()


def test_next_turn_takes_new_rows_only(trial: Trial) -> None:
    first = trial.generate(sampling_params=sampling(6))
    known = [*first["prompt_ids"], *first["completion_ids"]]
    headers = {"X-Session-ID": "session-1", "X-data-parallel-rank": "0"}
    second = trial.generate(
        prompt_ids=[*known, 5, 6, 7],
        sampling_params=sampling(4, routed_experts_prompt_start=len(known) - 1),
        extra_headers=headers,
    )
    assert second["routed_experts"]["start"] == len(known) - 1
    assert second["routed_experts"]["shape"][0] == 3 + 4
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(known) - 1


def test_too_long_a_prompt_is_seen_before_it_is_sent(trial: Trial) -> None:
    with pytest.raises(OverlongPromptError):
        trial.generate(prompt_ids=[5] * 5000)
