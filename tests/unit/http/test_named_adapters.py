"""Adapters over HTTP: the fields that name one, their answers, and refusals."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from rollout.adapters.peft_folder import read_adapter
from rollout.client import RolloutClient, ServerError
from tests.adapters import ATTENTION, save_adapter
from tests.engine_thread import EngineThread
from tests.family_zoo import family_checkpoint
from tests.http_harness import Live, live_server
from tests.tensor_sender import make_payload

PROMPT = [5, 9, 200, 31, 7, 8]
GREEDY = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(tmp_path_factory.mktemp(name), "qwen3", 3, seed, target_modules=ATTENTION, r=4, lora_alpha=8)
        for seed, name in enumerate(("poet", "clerk"))
    }


@pytest.fixture(scope="module")
def model(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", 3)
    paths = ",".join(f"{name}={path}" for name, path in adapters.items())
    settings: dict[str, Any] = {"enable_lora": True, "lora_paths": paths, "skip_tokenizer_init": True}
    settings |= {"max_total_tokens": 2048, "disable_radix_cache": True}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings) as server:
        yield server


@pytest.fixture
def file_system() -> Iterator[None]:
    """Let torch share memory by names, as SGLang's clients on CPUs must."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def test_answers_name_the_adapter(model: Live, adapters: dict[str, Path]) -> None:
    answers = {}
    for name in (None, "poet", "clerk"):
        answers[name] = model.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name, return_logprob=True)
    metas = {name: answer["meta_info"].get("adapter") for name, answer in answers.items()}
    assert metas[None] is None
    for name, path in adapters.items():
        assert metas[name] == {"name": name, "version": 0, "content_digest": read_adapter(path).digest}
    logprobs = [answer["meta_info"]["output_token_logprobs"] for answer in answers.values()]
    assert logprobs[0] != logprobs[1] != logprobs[2]


def test_each_prompt_of_a_batch_has_its_own_adapter(model: Live) -> None:
    names = ["clerk", None, "poet"]
    alone = [model.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name) for name in names]
    batch = model.generate(input_ids=[PROMPT] * 3, sampling_params=GREEDY, lora_path=names)
    assert [each["output_ids"] for each in batch] == [each["output_ids"] for each in alone]
    everyone = model.generate(input_ids=[PROMPT] * 2, sampling_params=GREEDY, lora_path="poet")
    assert [each["meta_info"]["adapter"]["name"] for each in everyone] == ["poet", "poet"]


def test_the_client_names_an_adapter(model: Live) -> None:
    with RolloutClient(model.url) as client:
        output = client.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path="clerk")
    assert output.meta_info["adapter"]["name"] == "clerk"


@pytest.mark.parametrize("name", ["poet", "tiny:poet"])
def test_a_model_may_be_an_adapter(model: Live, name: str) -> None:
    want = model.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path="poet")["output_ids"]
    body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = model.client.post("/v1/completions", json=body | {"return_token_ids": True, "return_meta_info": True})
    choice = answer.json()["choices"][0]
    assert choice["token_ids"] == want and choice["meta_info"]["adapter"]["name"] == "poet"
    tokens = {
        "token_ids": PROMPT,
        "model": name,
        "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    answer = model.client.post("/inference/v1/generate", json=tokens)
    assert answer.json()["choices"][0]["token_ids"] == want


def test_the_list_of_models_has_the_adapters(model: Live, adapters: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in model.client.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "poet", "clerk"]
    assert (cards["tiny"]["parent"], cards["poet"]["parent"]) == (None, "tiny")
    assert cards["poet"]["root"] == str(adapters["poet"])
    assert model.client.get("/v1/models/clerk").json() == cards["clerk"]


def test_names_that_are_not_served_are_refused(model: Live) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    assert model.refused(**body, lora_path="gone") == (
        404,
        "lora_path: there is no adapter 'gone'; this server has poet, clerk",
    )
    status, message = model.refused("/v1/completions", prompt=PROMPT, model="gone", max_tokens=1)
    assert status == 404 and "this server has tiny, poet, clerk" in message
    status, message = model.refused("/v1/completions", prompt=PROMPT, model="poet", lora_path="clerk", max_tokens=1)
    assert status == 400 and message == "model names the adapter poet, and lora_path clerk"
    status, message = model.refused(**body, lora_path=["poet"])
    assert status == 400 and "lora_path is a list" in message


def test_a_server_without_adapters_refuses_their_names_alone(live: Live) -> None:
    status, message = live.refused(input_ids=[1], lora_path="poet")
    assert status == 400 and "start it with --enable-lora" in message
    answer = live.client.post("/v1/completions", json={"prompt": [5], "model": "anything", "max_tokens": 1})
    assert answer.status_code == 200


# --- loads and unloads ---------------------------------------------------------------------------------------------


def names_of(model: Live) -> list[str]:
    return [card["id"] for card in model.client.get("/v1/models").json()["data"]]


def served_by(model: Live, name: str) -> Any:
    answer = model.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name)
    return answer["meta_info"]["adapter"]


def test_sglangs_clients_load_and_unload(model: Live, adapters: dict[str, Path]) -> None:
    body = {"lora_name": "bard", "lora_path": str(adapters["poet"]), "pinned": False}
    answer = model.client.post("/load_lora_adapter", json=body).json()
    assert answer["success"] and answer["error_message"] is None
    assert set(answer["loaded_adapters"]) == {"poet", "clerk", "bard"}
    assert (answer["version"], answer["content_digest"]) == (0, served_by(model, "bard")["content_digest"])
    assert model.client.post("/load_lora_adapter", json=body).json()["version"] == 1
    assert served_by(model, "bard")["version"] == 1 and served_by(model, "bard@0")["version"] == 0
    assert names_of(model) == ["tiny", "poet", "clerk", "bard"]
    answer = model.client.post("/unload_lora_adapter", json={"lora_name": "bard"}).json()
    assert answer["success"] and set(answer["loaded_adapters"]) == {"poet", "clerk"}
    refused = model.client.post("/unload_lora_adapter", json={"lora_name": "bard"})
    assert refused.status_code == 404 and refused.json()["error_message"] == refused.json()["message"]
    assert names_of(model) == ["tiny", "poet", "clerk"]
    assert model.refused(input_ids=PROMPT, lora_path="bard@0")[0] == 404


def test_a_load_names_the_patterns_that_match_nothing(model: Live, tmp_path: Path, file_system: None) -> None:
    """PEFT ignores them in silence."""
    patterns = {"rank_pattern": {"o_proj": 2, "experts.down_proj": 1}, "alpha_pattern": {"layers.9.o_proj": 3}}
    folder = save_adapter(tmp_path / "a", "qwen3", 3, 7, target_modules=ATTENTION, r=4, lora_alpha=8, **patterns)
    answer = model.client.post("/load_lora_adapter", json={"lora_name": "odd", "lora_path": str(folder)}).json()
    assert answer["success"] and answer["message"] == (
        "Adapter 'odd' loaded as version 0. rank_pattern 'experts.down_proj' matches none of its modules. "
        "alpha_pattern 'layers.9.o_proj' matches none of its modules."
    )
    answer = model.client.post("/load_lora_adapter_from_tensors", json=tensors_body(folder, lora_name="odd")).json()
    assert answer["success"], answer
    assert answer["message"].count("matches none of its modules.") == 2
    assert model.client.post("/unload_lora_adapter", json={"lora_name": "odd"}).status_code == 200


def test_vllms_clients_load_and_unload(model: Live, adapters: dict[str, Path]) -> None:
    body = {"lora_name": "scribe", "lora_path": str(adapters["clerk"])}
    for path, more, status in (
        ("/v1/load_lora_adapter", {}, 200),
        ("/v1/load_lora_adapter", {}, 400),
        ("/v1/load_lora_adapter", {"load_inplace": True}, 200),
        ("/skyrl/v1/load_lora_adapter", {}, 200),
    ):
        answer = model.client.post(path, json=body | more)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.text == "Success: LoRA adapter 'scribe' added successfully."
        else:
            assert "load_inplace makes this its next version" in answer.json()["message"]
    assert served_by(model, "scribe")["version"] == 2
    cards = {card["id"]: card for card in model.client.get("/v1/models").json()["data"]}
    assert (cards["scribe"]["parent"], cards["scribe"]["root"]) == ("tiny", str(adapters["clerk"]))
    for _ in range(2):  # a name that is not served is no mistake
        answer = model.client.post("/v1/unload_lora_adapter", json={"lora_name": "scribe"})
        assert answer.text == "Success: LoRA adapter 'scribe' removed successfully."


def tensors_body(folder: Path, form: str = "flattened", **changes: Any) -> dict[str, Any]:
    """Return the body of an adapter whose tensors are in it, as SGLang's clients make it."""
    tensors = load_file(folder / "adapter_model.safetensors") | changes.pop("tensors", {})
    kept: list[Any] = []
    content = pickle.dumps(tensors) if form == "dict" else make_payload(form, list(tensors.items()), kept)
    body = {
        "lora_name": "sent",
        "config_dict": json.loads((folder / "adapter_config.json").read_text()),
        "serialized_named_tensors": [base64.b64encode(content).decode()],
        "load_format": "flattened_bucket" if form == "flattened" else None,
    }
    return body | changes


@pytest.mark.parametrize("form", ["dict", "plain", "flattened"])
def test_sglangs_clients_send_the_tensors_of_an_adapter(
    model: Live, adapters: dict[str, Path], form: str, file_system: None
) -> None:
    body = tensors_body(adapters["clerk"], form)
    if form == "dict":  # older clients
        body["serialized_tensors"] = body.pop("serialized_named_tensors")[0]
    answer = model.client.post("/load_lora_adapter_from_tensors", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content_digest"] == read_adapter(adapters["clerk"]).digest
    assert served_by(model, "sent")["content_digest"] == read_adapter(adapters["clerk"]).digest
    assert model.client.get("/v1/models/sent").json()["root"] is None
    assert model.client.post("/unload_lora_adapter", json={"lora_name": "sent"}).status_code == 200


class RunsCode:
    """Calls a function where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_tensors_that_make_no_adapter_are_refused(model: Live, adapters: dict[str, Path], file_system: None) -> None:
    folder = adapters["clerk"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    run_code = base64.b64encode(pickle.dumps(RunsCode())).decode()
    for changes, reason in (
        ({"tensors": {name: torch.full((4, 64), float("nan"))}}, "values that are not finite"),
        ({"tensors": {"model.norm.weight": torch.ones(64)}}, "is not the name of a tensor of a LoRA adapter"),
        ({"config_dict": {"peft_type": "IA3"}}, "only LORA is served"),
        ({"serialized_named_tensors": [run_code]}, "system"),
        ({"serialized_named_tensors": None}, "give either serialized_tensors or serialized_named_tensors"),
        ({"expected_checksums": {"a": "b"}}, "expected_checksums"),
    ):
        status, message = model.refused("/load_lora_adapter_from_tensors", **tensors_body(folder, **changes))
        assert status == 400 and reason in message and "\n" not in message, message
    assert names_of(model) == ["tiny", "poet", "clerk"]


def test_a_refused_load_gives_shared_memory_back(model: Live, adapters: dict[str, Path], file_system: None) -> None:
    mine = f"torch_{os.getpid()}_*"
    before = set(Path("/dev/shm").glob(mine))
    for changes in ({"lora_name": "poet", "load_inplace": False}, {"lora_name": "a@3"}, {"config_dict": {}}):
        body = tensors_body(adapters["clerk"], "plain", **changes)
        assert model.refused("/load_lora_adapter_from_tensors", **body)[0] == 400
        assert set(Path("/dev/shm").glob(mine)) <= before, changes


def test_trls_clients_see_what_can_be_loaded(model: Live) -> None:
    config = model.client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]["lora_config"]
    assert config == {"max_lora_rank": 4, "max_loras": 8}


def test_skyrls_adapters_come_by_weight_updates(model: Live, adapters: dict[str, Path]) -> None:
    """A target, then start, update and finish, then a load without a path, as SkyRL's client calls them."""
    config = json.loads((adapters["clerk"] / "adapter_config.json").read_text())
    target = {"kind": "lora", "lora_name": "sky", "adapter_config": config, "aliases": {}}

    def rpc(method: str, **kwargs: Any) -> Any:
        return model.client.post("/collective_rpc", json={"method": method, "kwargs": kwargs})

    def loads() -> Any:
        return model.client.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "sky", "in_memory": True})

    assert loads().status_code == 409 and "no weight update has brought the adapter 'sky'" in loads().text
    payload = base64.b64encode((adapters["clerk"] / "adapter_model.safetensors").read_bytes()).decode()

    def brings() -> None:
        assert rpc("skyrl_start_weight_update").status_code == 200
        state = model.client.get("/weight_update").json()
        assert state["target"] == "adapter sky"
        fields = {"serialized_named_tensors": [payload], "format": "safetensors", "update_id": state["update_id"]}
        assert model.client.post("/update_weights_from_tensor", json=fields).status_code == 200
        assert rpc("skyrl_finish_weight_update").status_code == 200

    assert rpc("skyrl_set_lora_receive_target", receive_target=target).status_code == 200
    refused = rpc("skyrl_set_lora_receive_target", receive_target=target)
    assert refused.status_code == 409 and "brings adapter 'sky' already" in refused.text
    brings()
    assert rpc("skyrl_discard_in_memory_lora", lora_name="sky").status_code == 200
    assert loads().status_code == 409, "what was discarded is not confirmed"
    assert rpc("skyrl_set_lora_receive_target", receive_target=target).status_code == 200
    brings()
    assert loads().text == "Success: LoRA adapter 'sky' added successfully." and loads().status_code == 409
    assert served_by(model, "sky")["content_digest"] == read_adapter(adapters["clerk"]).digest
    assert rpc("skyrl_start_weight_update").status_code == 200, "the target was of one update"
    state = model.client.get("/weight_update").json()
    assert state["target"] == "model"
    assert model.client.post("/abort_weight_update", json={"update_id": state["update_id"]}).status_code == 200
    assert model.client.post("/v1/unload_lora_adapter", json={"lora_name": "sky"}).status_code == 200
    assert rpc("skyrl_discard_in_memory_lora", lora_name="sky").status_code == 200
    for fields in ({}, {"lora_path": "/a", "in_memory": True}):
        status, message = model.refused("/skyrl/v1/load_lora_adapter", lora_name="a", **fields)
        assert status == 400 and "give either lora_path" in message


def test_skyrls_aliases_are_tensors_that_do_not_come(model: Live, adapters: dict[str, Path], tmp_path: Path) -> None:
    """SkyRL leaves out what equals a tensor that it sends: the adapter has both.  An alias of what never came fails."""
    config = json.loads((adapters["clerk"] / "adapter_config.json").read_text())
    name = "base_model.model.model.layers.{}.self_attn.v_proj.lora_{}.weight"
    aliases = {name.format(1, side): name.format(0, side) for side in "AB"}
    sent = load_file(adapters["clerk"] / "adapter_model.safetensors")
    whole = sent | {alias: sent[of] for alias, of in aliases.items()}
    shutil.copy(adapters["clerk"] / "adapter_config.json", tmp_path)
    save_file({key: value.clone() for key, value in whole.items()}, tmp_path / "adapter_model.safetensors")

    def finish(aliases: dict[str, str], sent: dict[str, torch.Tensor]) -> Any:
        target = {"kind": "lora", "lora_name": "shared", "adapter_config": config, "aliases": aliases}
        calls: list[tuple[str, dict[str, Any]]] = [("skyrl_set_lora_receive_target", {"receive_target": target})]
        for method, kwargs in [*calls, ("skyrl_start_weight_update", {})]:
            answer = model.client.post("/collective_rpc", json={"method": method, "kwargs": kwargs})
            if answer.status_code != 200:
                return answer
        state = model.client.get("/weight_update").json()
        payload = base64.b64encode(save(sent)).decode()
        fields = {"serialized_named_tensors": [payload], "format": "safetensors", "update_id": state["update_id"]}
        model.client.post("/update_weights_from_tensor", json=fields)
        return model.client.post("/collective_rpc", json={"method": "skyrl_finish_weight_update"})

    left = {key: value for key, value in sent.items() if key not in aliases}
    assert finish(aliases, left).status_code == 200
    assert served_by(model, "shared")["content_digest"] == read_adapter(tmp_path).digest
    for of, tensors, message in (
        (aliases, {key: value for key, value in left.items() if key != name.format(0, "A")}, "2 of 24 tensors missing"),
        (aliases, sent, "came again as"),
        ({"m.experts.1.up_proj.lora_A.weight": name.format(0, "A")}, left, "the model has no tensor"),
        ({name.format(1, "A"): name.format(0, "B")}, left, "both must be tensors of one shape"),
        (aliases | {name.format(0, "A"): name.format(1, "A")}, left, "of which the second comes"),
    ):
        refused = finish(of, tensors)
        assert refused.status_code >= 400 and message in refused.text, refused.text
    assert served_by(model, "shared")["version"] == 0
    assert model.client.post("/v1/unload_lora_adapter", json={"lora_name": "shared"}).status_code == 200


def test_our_client_loads_and_unloads(model: Live, adapters: dict[str, Path]) -> None:
    with RolloutClient(model.url) as client:
        loaded = client.load_adapter("ours", str(adapters["poet"]), pinned=True)
        assert (loaded["lora_name"], loaded["version"]) == ("ours", 0)
        output = client.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path="ours@0")
        assert output.meta_info["adapter"]["content_digest"] == loaded["content_digest"]
        assert set(client.unload_adapter("ours")["loaded_adapters"]) == {"poet", "clerk"}
        with pytest.raises(ServerError, match="no adapter 'ours'"):
            client.unload_adapter("ours")
