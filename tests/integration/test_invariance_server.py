"""Batch invariance over HTTP: where /server_info promises it, a request gets the same bits alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

PROMPTS = [[5, 6, 7], [300] * 40, [8, 9, 10, 11], list(range(100, 190)), [5, 6, 7, 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", seed=3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    settings = {"max_total_tokens": 2048, "chunked_prefill_size": 32, "num_threads": 2, "dtype": "bfloat16"}
    with ServerProcess(folder, enable_return_routed_experts=True, **settings) as running:
        yield running


def generate(server: ServerProcess, input_ids: Any, params: Any) -> Any:
    body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, "return_routed_experts": True}
    response = server.http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def facts(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["routed_experts"]


def test_what_holds_is_said(server: ServerProcess) -> None:
    info = server.http.get("/server_info").json()
    assert info["batch_invariant"] is True and info["batch_invariance_note"] == ""
    assert info["internal_states"][0]["batch_invariant"] is True


def test_the_same_bits_alone_and_together(server: ServerProcess) -> None:
    params = [{"max_new_tokens": 12, "sampling_seed": seed, "temperature": seed % 2} for seed in range(len(PROMPTS))]
    alone = [facts(generate(server, prompt, settings)) for prompt, settings in zip(PROMPTS, params, strict=True)]
    for _ in range(2):
        together = generate(server, PROMPTS, params)
        assert [facts(answer) for answer in together] == alone


def test_what_does_not_hold_is_said(folder: Path) -> None:
    with ServerProcess(folder, max_total_tokens=512, disable_native_kernels=True) as running:
        info = running.http.get("/server_info").json()
        assert info["batch_invariant"] is False
        assert info["batch_invariance_note"].endswith("on plain torch: --disable-native-kernels")
