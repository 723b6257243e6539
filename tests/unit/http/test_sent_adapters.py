"""Adapters whose tensors are in the body, with the checksums that SGLang's clients state."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.adapters import ATTENTION, save_adapter
from tests.engine_thread import EngineThread
from tests.family_zoo import family_checkpoint
from tests.http_harness import Live, live_server
from tests.troubleshooting import require_entry

TENSORS_PATH = "/load_lora_adapter_from_tensors"
PROMPT = [5, 9, 200, 31, 7, 8]
GREEDY = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(tmp_path_factory.mktemp(name), "qwen3", 3, seed, target_modules=ATTENTION, r=4, lora_alpha=8)
        for seed, name in enumerate(("poet", "clerk"))
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", 3)
    settings: dict[str, Any] = {"enable_lora": True, "skip_tokenizer_init": True, "max_total_tokens": 2048}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings) as server:
        yield server


def served_by(model: Live, name: str) -> Any:
    answer = model.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name)
    return answer["meta_info"]["adapter"]


def tensors_body(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the body of an adapter whose tensors are in it, by their names."""
    content = pickle.dumps(load_file(folder / "adapter_model.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text())
    payloads = [base64.b64encode(content).decode()]
    return {"lora_name": "sent", "config_dict": config, "serialized_named_tensors": payloads} | changes


def checksums_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each tensor of an adapter, as a client states it."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def test_checksums_of_the_client_hold_or_refuse_the_load(model: Live, adapters: dict[str, Path]) -> None:
    folder, stated = adapters["clerk"], checksums_of(adapters["clerk"])
    for version in (0, 1):
        answer = model.client.post(TENSORS_PATH, json=tensors_body(folder, expected_checksums=stated, upsert=True))
        assert answer.json()["version"] == version, answer.text
    first, *others = stated
    for wrong, counts in (
        (stated | {first: stated[others[0]]}, "1 of 24 tensors have other bytes, 0 did not come, 0 came without one"),
        (stated | {"gone": "0" * 64}, "0 of 25 tensors have other bytes, 1 did not come, 0 came without one: gone"),
        ({name: stated[name] for name in others}, f"0 did not come, 1 came without one: {first}"),
        ({}, "0 of 0 tensors have other bytes, 0 did not come, 24 came without one"),
    ):
        status, message = model.refused(TENSORS_PATH, **tensors_body(folder, expected_checksums=wrong))
        assert status == 400 and counts in message and "\n" not in message, message
        require_entry(message)
    assert served_by(model, "sent")["version"] == 1
    assert model.client.post("/unload_lora_adapter", json={"lora_name": "sent"}).status_code == 200
