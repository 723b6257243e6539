"""Adapters that cannot be served, by every way over HTTP and by the client: one line each, and nothing changes."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from rollout.client import RolloutClient, ServerError
from tests.adapter_updates import FAMILY, SEED, Content, make_content
from tests.announcements import manifest_of
from tests.engine_thread import EngineThread
from tests.family_zoo import family_checkpoint
from tests.faults.transports import Named
from tests.http_harness import Live, live_server
from tests.troubleshooting import require_entry
from weight_sync.engine_control import EngineError

PROMPT = [5, 9, 200, 31, 7, 8]
GREEDY = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Sent:
    """An adapter as a caller gives it; `name`: the adapter that it would become."""

    config: dict[str, Any]
    named: Named
    name: str = "poet"

    def folder(self, path: Path) -> Path:
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(dict(self.named), path / "adapter_model.safetensors")
        return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [make_content(tmp_path_factory.mktemp(f"c{seed}") / "a", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(good: list[Content], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose two slots are taken by the newest versions of two adapters."""
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)
    paths = f"poet={good[0].folder},clerk={good[1].folder}"
    settings: dict[str, Any] = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": 2}
    settings |= {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_lora_rank": 4}
    with live_server(folder, with_tokenizer=False, engine=EngineThread, **settings) as live:
        yield live


# --- what is wrong ----------------------------------------------------------------------------------------------------


def _renamed(sent: Sent, old: str, new: str) -> Sent:
    return replace(sent, named=[(name.replace(old, new), tensor) for name, tensor in sent.named])


def _each(sent: Sent, change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> Sent:
    return replace(sent, named=[(name, change(tensor) if part in name else tensor) for name, tensor in sent.named])


def _doubled(sent: Sent) -> Sent:
    """Give each module twice the rank, and more than the slots have."""
    twice = _each(_each(sent, lambda a: torch.cat([a, a]), "lora_A"), lambda b: torch.cat([b, b], dim=1), "lora_B")
    return _set(twice, r=8)


def _set(sent: Sent, **changes: Any) -> Sent:
    return replace(sent, config=sent.config | changes)


# What is wrong, and words of the refusal, where the configuration and where a bucket is the first to show it.
WRONG: dict[str, tuple[Callable[[Sent], Sent], tuple[str, ...]]] = {
    "a missing base module": (lambda it: _renamed(it, "layers.1.", "layers.71."), ("to another model", "layers.71.")),
    "a module that has no adapter": (lambda it: _renamed(it, "self_attn.q_proj", "self_attn.q_norm"), ("q_norm",)),
    "another model's width": (
        lambda it: _each(it, lambda a: torch.cat([a, a], dim=1), "lora_A"),
        ("is adapted from 128 to", "the adapter expects"),
    ),
    "a wrong rank": (lambda it: _set(it, r=3), ("not of rank 3", "the adapter expects")),
    "a rank over the slots'": (_doubled, ("has rank 8; --max-lora-rank is 4",)),
    "alpha 0": (lambda it: _set(it, lora_alpha=0), ("lora_alpha must be a positive number",)),
    "NaN": (lambda it: _each(it, lambda tensor: torch.full_like(tensor, torch.nan), "q_proj"), ("not finite",)),
    "an infinity": (lambda it: _each(it, lambda tensor: torch.full_like(tensor, torch.inf), "q_proj"), ("not finite",)),
    "more adapters than slots": (lambda it: replace(it, name="third"), ("all 2 slots are taken",)),
    "the name of the model": (lambda it: replace(it, name="tiny"), ("'tiny' is the name of the model",)),
    "a pinned version's name": (lambda it: replace(it, name="poet@1"), ("holds no '@'",)),
    "DoRA": (lambda it: _set(it, use_dora=True), ("DoRA",)),
    "another method": (lambda it: _set(it, peft_type="IA3"), ("only LORA is served",)),
}  # fmt: skip


# --- how it comes -----------------------------------------------------------------------------------------------------
# Each way returns the message of the refusal, or None if the server took the adapter.

Way = Callable[[Live, Sent, Path], str | None]


def _said(response: Any) -> str | None:
    if response.status_code == 200:
        return None
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]  # type: ignore[no-any-return]


def _load(path: str, **more: Any) -> Way:
    def way(server: Live, sent: Sent, scratch: Path) -> str | None:
        body = {"lora_name": sent.name, "lora_path": str(sent.folder(scratch / "a"))} | more
        return _said(server.client.post(path, json=body))

    return way


def _client_load(server: Live, sent: Sent, scratch: Path) -> str | None:
    with RolloutClient(server.url) as client:
        try:
            client.load_adapter(sent.name, str(sent.folder(scratch / "a")))
        except ServerError as error:
            assert error.status == 400
            return error.message
    return None


def _tensors(server: Live, sent: Sent, scratch: Path) -> str | None:
    content = base64.b64encode(pickle.dumps(dict(sent.named))).decode()
    body = {"lora_name": sent.name, "config_dict": sent.config, "serialized_named_tensors": [content]}
    return _said(server.client.post("/load_lora_adapter_from_tensors", json=body))


def _update(server: Live, sent: Sent, with_manifest: bool) -> str | None:
    named = {"update_id": uuid.uuid4().hex}
    begin: dict[str, Any] = {"target": {"adapter": sent.name, "config": sent.config}}
    if with_manifest:
        begin["manifest"] = manifest_of(sent.named)
    content = {"serialized_named_tensors": [base64.b64encode(save(dict(sent.named))).decode()], "format": "safetensors"}
    calls = [("/begin_weight_update", begin), ("/update_weights_from_tensor", content), ("/end_weight_update", {})]
    for path, body in calls:
        if (message := _said(server.client.post(path, json=body | named))) is not None:
            server.client.post("/abort_weight_update", json=named)
            return message
    return None


def _client_update(server: Live, sent: Sent, scratch: Path) -> str | None:
    with RolloutClient(server.url) as client:
        try:
            target = {"adapter": sent.name, "config": sent.config}
            with client.weight_transaction(target=target, manifest=manifest_of(sent.named)) as update:
                payloads = [save(dict(sent.named))]
                update.send("update_weights_from_tensor", serialized_named_tensors=payloads, format="safetensors")
        except EngineError as error:
            (failure,) = error.failures.values()
            assert isinstance(failure, ServerError) and failure.status == 400
            return failure.message
    return None


WAYS: dict[str, Way] = {
    "SGLang's load": _load("/load_lora_adapter"),
    "vLLM's load": _load("/v1/load_lora_adapter", load_inplace=True),
    "SkyRL's load": _load("/skyrl/v1/load_lora_adapter"),
    "the client's load": _client_load,
    "SGLang's tensors": _tensors,
    "an update": lambda server, sent, _: _update(server, sent, with_manifest=False),
    "an update with a manifest": lambda server, sent, _: _update(server, sent, with_manifest=True),
    "the client's update": _client_update,
}


def state_of(server: Live, names: Sequence[str | None] = (None, "poet", "clerk")) -> Any:
    """Return what the adapters of the server are, and what the model answers with these."""
    answers = [
        server.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name, return_logprob=True) for name in names
    ]
    numbers = [(each["meta_info"].get("adapter"), each["meta_info"]["output_token_logprobs"]) for each in answers]
    cards = [(card["id"], card["root"]) for card in server.client.get("/v1/models").json()["data"]]
    return cards, numbers, server.client.get("/weight_update").json()["open"]


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_that_cannot_be_served_is_refused_in_one_line_and_changes_nothing(
    server: Live, good: list[Content], tmp_path: Path, way: str
) -> None:
    before, poet, taken_otherwise = state_of(server), state_of(server, ["poet"]), []
    for number, (what, (spoil, reasons)) in enumerate(WRONG.items()):
        sent = spoil(Sent(good[1].config, good[1].named))
        (scratch := tmp_path / str(number)).mkdir()
        message = WAYS[way](server, sent, scratch)
        if message is None or "\n" in message or not any(reason in message for reason in reasons):
            taken_otherwise.append((what, message))
            continue
        require_entry(message)
        assert state_of(server, ["poet"]) == poet, what
    assert not taken_otherwise and state_of(server) == before


@pytest.mark.parametrize("way", WAYS)
def test_the_same_adapter_without_the_fault_is_taken(
    server: Live, good: list[Content], tmp_path: Path, way: str
) -> None:
    """Each way works: what the test before saw was the fault."""
    version = state_of(server)[1][1][0]["version"]
    assert WAYS[way](server, Sent(good[0].config, good[0].named), tmp_path) is None
    _, numbers, is_open = state_of(server)
    assert numbers[1][0] == {"name": "poet", "version": version + 1, "content_digest": good[0].digest} and not is_open


@pytest.mark.parametrize("path", ["/unload_lora_adapter", None])
def test_an_unload_of_an_adapter_in_use_is_refused_in_one_line(server: Live, path: str | None) -> None:
    before = state_of(server)
    with RolloutClient(server.url) as client, ThreadPoolExecutor(1) as pool:
        client.pause("in_place")
        waiting = pool.submit(server.generate, input_ids=PROMPT, sampling_params=GREEDY, lora_path="poet")
        server.wait_until(lambda: client.loads()["loads"][0]["num_waiting_reqs"] == 1)
        if path is None:
            with pytest.raises(ServerError) as caught:
                client.unload_adapter("poet")
            status, message = caught.value.status, caught.value.message
        else:
            response = server.client.post(path, json={"lora_name": "poet", "retire": False})
            status, message = response.status_code, response.json()["error"]["message"]
        assert status == 409 and "poet" in message and "\n" not in message, message
        require_entry(message)
        client.continue_generation()
        assert waiting.result()["meta_info"]["adapter"] == before[1][1][0]
    assert state_of(server) == before


def _by_our_client(server: Live) -> bool:
    with RolloutClient(server.url) as client:
        return bool(client.unload_adapter("poet", retire=True)["success"])


RETIRES: dict[str, Callable[[Live], bool]] = {
    "vLLM": lambda server: (
        server.client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"}).text
        == "Success: LoRA adapter 'poet' removed successfully."
    ),
    "SGLang": lambda server: server.client.post("/unload_lora_adapter", json={"lora_name": "poet"}).json()["success"],
    "ours": _by_our_client,
}


@pytest.mark.parametrize("retire", RETIRES)
def test_an_unload_takes_the_name_away_and_lets_requests_end(
    server: Live, good: list[Content], tmp_path: Path, retire: str
) -> None:
    label = state_of(server)[1][1][0]
    with RolloutClient(server.url) as client, ThreadPoolExecutor(1) as pool:
        client.pause("in_place")
        waiting = pool.submit(server.generate, input_ids=PROMPT, sampling_params=GREEDY, lora_path="poet")
        server.wait_until(lambda: client.loads()["loads"][0]["num_waiting_reqs"] == 1)
        assert RETIRES[retire](server)
        assert "poet" not in [card["id"] for card in server.client.get("/v1/models").json()["data"]]
        assert server.refused(input_ids=PROMPT, lora_path="poet")[0] == 404
        client.continue_generation()
        assert waiting.result()["meta_info"]["adapter"] == label
    again = Sent(good[0].config, good[0].named).folder(tmp_path / "again")
    body = {"lora_name": "poet", "lora_path": str(again)}
    assert server.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert state_of(server)[1][1][0]["version"] == label["version"] + 1
