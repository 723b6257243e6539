"""Adapters by the calls of AReaL for vLLM: an announcement, then the same body and a broadcast of each tensor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rollout.adapters.peft_folder import read_adapter
from tests.adapters import ATTENTION, save_adapter
from tests.family_zoo import family_checkpoint
from tests.server_process import ServerProcess
from tests.troubleshooting import require_entry
from weight_sync.errors import TransportError
from weight_sync.process_group import free_port, init_process_group

pytestmark = pytest.mark.full

TIMEOUT_S = 60.0
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_adapter(tmp_path_factory.mktemp(name), "qwen3", 3, seed, target_modules=ATTENTION, r=4, lora_alpha=8)
        for seed, name in enumerate(("first", "second", "third"))
    }


class Areal:
    """The trainer's side of the wire."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, self._pool = server, ThreadPoolExecutor(1)
        self.join()

    def join(self) -> None:
        port = free_port()
        fields = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2,
                  "backend": "gloo", "group_name": "areal"}  # fmt: skip
        joined = self._pool.submit(self.server.http.post, "/areal_init_weights_update_group", json=fields)
        self._group = init_process_group("127.0.0.1", port, 0, 2, "areal", "gloo", TIMEOUT_S)
        assert joined.result(TIMEOUT_S).status_code == 200, joined.result().text

    def leave(self) -> None:
        with contextlib.suppress(TransportError):
            self._group.destroy()

    def body(self, name: str, tensors: Tensors, **more: Any) -> dict[str, Any]:
        lists = {
            "names": [key.replace(".weight", ".default.weight") for key in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        config = {"lora_target_modules": list(ATTENTION), "lora_rank": 4, "lora_alpha": 8, "lora_bias": "none"}
        names = {"lora_name": name, "lora_int_id": 1, "base_model_name": "tiny", "group_name": "areal"}
        return lists | config | names | more

    def send(self, name: str, tensors: Tensors, **more: Any) -> httpx.Response:
        body = self.body(name, tensors, **more)
        announced = self.server.http.post("/areal_set_update_weight_meta_lora", json=body)
        assert announced.json() == {"success": True, "message": f"{len(tensors)} tensors announced."}
        reply = self._pool.submit(self.server.http.post, "/areal_update_weights_lora_xccl", json=body)
        for tensor in tensors.values():
            self._group.finish(self._group.start_broadcast(tensor.contiguous()), time.monotonic() + TIMEOUT_S)
        return reply.result(TIMEOUT_S)

    def served(self) -> list[str]:
        cards = self.server.http.get("/v1/models").json()["data"]
        return [card["id"] for card in cards if card["parent"] is not None]

    def digest_of(self, name: str) -> str:
        output = self.server.client.generate(input_ids=[5, 9, 7], sampling_params={"max_new_tokens": 1}, lora_path=name)
        return str(output.meta_info["adapter"]["content_digest"])


@pytest.fixture(scope="module")
def areal(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Areal]:
    """A server that was started with `lora-v0`, as AReaL starts vLLM, and a trainer in its group."""
    folder = family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", 3)
    settings: dict[str, Any] = {"enable_lora": True, "lora_paths": f"lora-v0={adapters['first']}"}
    settings |= {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_loras_per_batch": 3}
    with ServerProcess(folder, **settings) as server:
        trainer = Areal(server)
        yield trainer
        trainer.leave()


def tensors_of(folder: Path) -> Tensors:
    return dict(load_file(folder / "adapter_model.safetensors"))


def refused(reply: httpx.Response, status: int, *parts: str) -> None:
    message = reply.json()["message"]
    assert reply.status_code == status and all(part in message for part in parts), reply.text
    require_entry(message)


@pytest.mark.parametrize("targets", [list(ATTENTION), "all-linear"])
def test_each_update_takes_the_place_of_the_name_with_its_number(
    areal: Areal, adapters: dict[str, Path], targets: Sequence[str] | str
) -> None:
    for name, content in (("lora-v1", "second"), ("lora-v2", "third")):
        sent = tensors_of(adapters[content])
        reply = areal.send(name + targets[0], sent, lora_target_modules=targets)
        assert reply.status_code == 200 and reply.json()["success"], reply.text
        assert areal.served() == [name + targets[0]]
        assert areal.digest_of(name + targets[0]) == read_adapter(adapters[content]).digest


def test_an_adapter_in_parts_is_in_force_with_the_last_of_them(areal: Areal, adapters: dict[str, Path]) -> None:
    """Pipeline stages of a trainer send theirs one after another, and so do buckets."""
    sent, before = tensors_of(adapters["second"]), areal.served()
    names = sorted(sent)
    reply = areal.send("parts-v1", {name: sent[name] for name in names[:5]})
    assert reply.status_code == 200 and f"{len(names) - 5} of its tensors are missing" in reply.json()["message"]
    assert areal.served() == before
    assert areal.send("parts-v1", {name: sent[name] for name in names[5:]}).status_code == 200
    assert areal.served() == ["parts-v1"]
    assert areal.digest_of("parts-v1") == read_adapter(adapters["second"]).digest


def test_a_continue_refuses_an_adapter_of_which_tensors_are_missing(areal: Areal, adapters: dict[str, Path]) -> None:
    sent, before = tensors_of(adapters["third"]), areal.served()
    left_out = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    assert areal.server.http.post("/areal_pause_generation", json={}).status_code == 200
    assert areal.send("short-v1", {name: sent[name] for name in sent if name != left_out}).status_code == 200
    reply = areal.server.http.post("/areal_continue_generation", json={})
    refused(reply, 409, "the adapter 'short-v1' was dropped: 1 of its tensors are missing", "layers.0.self_attn.k_proj")
    assert areal.server.http.get("/is_paused").json() == {"is_paused": True}
    assert areal.server.http.post("/areal_continue_generation", json={}).status_code == 200
    assert areal.served() == before and areal.server.http.get("/weight_update").json()["update_id"] is None


def test_an_update_that_is_left_makes_room_for_the_next_name(areal: Areal, adapters: dict[str, Path]) -> None:
    sent = tensors_of(adapters["third"])
    assert "missing" in areal.send("left-v1", dict(list(sent.items())[:2])).json()["message"]
    assert areal.send("left-v2", sent).status_code == 200
    assert areal.served() == ["left-v2"]


@pytest.mark.parametrize(
    ("name", "more", "status", "message"),
    [
        ("bad-v1", {}, 400, "not finite"),
        ("bad-v1", {"lora_bias": "all"}, 400, "bias is 'all'"),
        ("bad-v1", {"lora_alpha": 0}, 400, "lora_alpha"),
        ("bad-v1", {"lora_rank": None}, 400, "lora_rank"),
        ("bad@v1", {}, 400, "'@'"),
        ("kept-v1", {"lora_target_modules": "all-linear"}, 409, "'kept-v1' came already"),
    ],
)
def test_a_refused_adapter_changes_nothing_but_the_group(
    areal: Areal, adapters: dict[str, Path], name: str, more: dict[str, Any], status: int, message: str
) -> None:
    """The trainer broadcasts all the same, and that is not taken for the next bucket: the engine leaves the group."""
    sent = tensors_of(adapters["third"])
    if "kept-v1" not in areal.served():
        assert areal.send("kept-v1", sent).status_code == 200
    nan = {key: torch.full_like(tensor, float("nan")) for key, tensor in sent.items()}
    if message == "not finite":
        refused(areal.send(name, nan), status, message)
    else:
        body = areal.body(name, sent, **more)
        refused(areal.server.http.post("/areal_update_weights_lora_xccl", json=body), status, message)
    assert areal.served() == ["kept-v1"] and areal.digest_of("kept-v1") == read_adapter(adapters["third"]).digest
    assert areal.server.http.get("/weight_update").json()["update_id"] is None
    areal.leave()
    areal.join()
    assert areal.send("kept-v2", sent).status_code == 200 and areal.served() == ["kept-v2"]
    assert areal.send("kept-v1", sent).status_code == 200
