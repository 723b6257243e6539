"""A registered adapter over HTTP: the calls of clients of SGLang, and the answers to requests that name it."""

from __future__ import annotations

import hashlib
import json
import pickle
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout.adapters.peft_folder import read_adapter
from tests.adapters import ATTENTION, save_adapter
from tests.engine_thread import EngineThread
from tests.family_zoo import family_checkpoint
from tests.http_harness import Live, live_server
from tests.troubleshooting import require_entry

PROMPT = [5, 9, 200, 31, 7, 8]
GREEDY = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
AWAITED = "the adapter 'miles_lora' is registered, and its first weights have not come"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    return save_adapter(folder, "qwen3", 3, 1, target_modules=ATTENTION, r=4, lora_alpha=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", 3)
    settings: dict[str, Any] = {"enable_lora": True, "skip_tokenizer_init": True, "max_total_tokens": 2048}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings) as server:
        yield server


def registration(folder: Path, **changes: Any) -> dict[str, Any]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return {"lora_name": "miles_lora", "config_dict": config, "pinned": False} | changes


def call(model: Live, path: str, **body: Any) -> dict[str, Any]:
    answer = model.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    assert content["success"]
    return content


def test_a_name_is_served_from_the_commit_on(model: Live, adapter: Path) -> None:
    told = call(model, "/register_lora_adapter", **registration(adapter, lora_path=None, defer_publish=True))
    assert (told["pending"], told["error_message"], told["loaded_adapters"]) == (True, None, {})
    assert "miles_lora" not in model.client.get("/v1/models").text
    for path, body in (
        ("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, "lora_path": "miles_lora"}),
        ("/v1/completions", {"prompt": PROMPT, "model": "miles_lora"}),
        ("/v1/completions", {"prompt": PROMPT, "model": "miles_lora@0"}),
    ):
        status, message = model.refused(path, **body)
        assert status == 404 and "first weights have not come" in message and "\n" not in message, message
        require_entry(message)
    call(model, "/begin_weight_update", selector="all", sync_base=False)
    named = load_file(adapter / "adapter_model.safetensors")
    payload = b64encode(pickle.dumps([(f"miles_lora:{name}", tensor) for name, tensor in named.items()])).decode()
    call(model, "/update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=False, selector="all")
    assert AWAITED in model.refused("/generate", input_ids=PROMPT, lora_path="miles_lora")[1]
    stated = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in named.items()}
    ended = call(model, "/end_weight_update", expected_lora_checksums={"miles_lora": stated})
    version = {"name": "miles_lora", "version": 0, "content_digest": read_adapter(adapter).digest}
    assert ended["adapters"] == [version]
    call(model, "/update_weight_version", new_version="7", abort_all_requests=False)
    output = model.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path="miles_lora")
    assert (output["meta_info"]["adapter"], output["meta_info"]["weight_version"]) == (version, "7")
    assert "miles_lora" in model.client.get("/v1/models").text
    status, message = model.refused("/register_lora_adapter", **registration(adapter, defer_publish=True))
    assert status == 400 and "defer_publish is for a name that is not" in message
    assert call(model, "/unload_lora_adapter", lora_name="miles_lora")["loaded_adapters"] == {}


def test_a_refusal_has_the_field_that_clients_of_sglang_read(model: Live, adapter: Path) -> None:
    for changes, reason in (
        ({"lora_name": "A@2"}, "holds no '@'"),
        ({"config_dict": {"peft_type": "LORA", "r": 300}}, "lora_alpha"),
        ({"added_tokens_config": {"a": 1}}, "added_tokens_config"),
    ):
        answer = model.client.post("/register_lora_adapter", json=registration(adapter, **changes))
        content = answer.json()
        assert answer.status_code == 400 and reason in content["message"], answer.text
        assert not content["success"]
    assert content["message"]


def test_an_end_with_abort_drops_the_update(model: Live, adapter: Path) -> None:
    call(model, "/register_lora_adapter", **registration(adapter))
    call(model, "/begin_weight_update", sync_base=False)
    call(model, "/end_weight_update", abort=True)
    assert model.client.post("/end_weight_update", json={}).status_code == 409
    assert AWAITED in model.refused("/generate", input_ids=PROMPT, lora_path="miles_lora")[1]
    call(model, "/unload_lora_adapter", lora_name="miles_lora")
    assert "there is no adapter" in model.refused("/generate", input_ids=PROMPT, lora_path="miles_lora")[1]
