"""verl's server and tokenizer manager of this engine, without verl: the settings they make, and their refusals."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.client import ServerError
from rollout.core.errors import BadRequest


class RolloutMode(Enum):
    HYBRID = 1
    COLOCATED = 2
    STANDALONE = 3


class ServerAdapter:
    """verl's adapter in the trainer: what it asks of the server."""

    sleep_level = 2

    def __init__(self) -> None:
        self.resumed: list[list[str]] = []

    async def resume(self, tags: list[str]) -> None:
        self.resumed.append(tags)

    def wrap_lora_params(self, peft_config: Any, weights: Any) -> Any:
        return json.dumps(peft_config), list(weights)


STAND_INS: dict[str, dict[str, Any]] = {
    "ray": {"remote": lambda kind: kind},
    "verl.workers.rollout.base": {"_ROLLOUT_REGISTRY": {("sglang", "async"): object()}},
    "verl.workers.rollout.replica": {
        "RolloutMode": RolloutMode,
        "RolloutReplicaRegistry": SimpleNamespace(register=lambda *_: None),
    },
    "verl.workers.rollout.sglang_rollout.async_sglang_server": {
        "SGLangHttpServer": type("SGLangHttpServer", (), {"lora_as_adapter": False}),
        "SGLangReplica": object,
    },
    "verl.workers.rollout.sglang_rollout.sglang_rollout": {"ServerAdapter": ServerAdapter},
    "verl.workers.rollout.sglang_rollout.utils": {
        "lora_rank_of": lambda config: config.lora_rank,
        "sglang_lora_target_modules": list,
    },
}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plug-in, over stand-ins for the names that it takes from verl."""
    for name, content in STAND_INS.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rollout.integrations.verl", raising=False)
    yield importlib.import_module("rollout.integrations.verl")
    sys.modules.pop("rollout.integrations.verl", None)


def settings(plugin: Any, base_gpu_id: int = 0, **engine_kwargs: Any) -> dict[str, Any]:
    server = plugin.LockstepHttpServer.__new__(plugin.LockstepHttpServer)
    server.config = SimpleNamespace(
        dtype="auto",
        gpu_memory_utilization=0.5,
        max_model_len=None,
        get=lambda *_: None,
        skip_tokenizer_init=True,
        tensor_model_parallel_size=1,
        data_parallel_size=1,
        expert_parallel_size=1,
        enable_rollout_routing_replay=False,
        engine_kwargs={"lockstep": engine_kwargs},
    )
    server.model_config = SimpleNamespace(local_path="m", lora_rank=8, target_modules=("q_proj", "v_proj"))
    server.rollout_mode, server.base_gpu_id, server._server_address = RolloutMode.HYBRID, base_gpu_id, "127.0.0.1"
    return server._settings()


def test_on_a_gpu_the_server_starts_without_the_memory_saver(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = settings(plugin, base_gpu_id=3)
    assert made["device"] == "cuda:3"
    assert not made["enable_memory_saver"] and not made["enable_weights_cpu_backup"]
    on_cpu = settings(plugin, base_gpu_id=3, device="cpu")
    assert on_cpu["device"] == "cpu" and on_cpu["enable_memory_saver"] and on_cpu["enable_weights_cpu_backup"]


def test_on_a_cpu_the_server_may_release_its_memory(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = settings(plugin)
    assert made["device"] == "cpu" and made["enable_memory_saver"] and made["enable_weights_cpu_backup"]
    assert not settings(plugin, device="cuda")["enable_memory_saver"]


def test_a_release_on_a_gpu_is_refused_by_name(plugin: Any) -> None:
    manager = plugin.HttpTokenizerManager("http://127.0.0.1:1", None, kept_on="cuda:3")
    request = SimpleNamespace(tags=["kv_cache"])
    for verb in ("release_memory_occupation", "resume_memory_occupation"):
        with pytest.raises(
            BadRequest, match=f"{verb}: memory is released on a CPU only, but this server runs on cuda:3"
        ):
            asyncio.run(getattr(manager, verb)(request, None))


def test_an_adapter_has_slots_of_its_rank_and_its_modules(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.LockstepHttpServer, "lora_as_adapter", True)
    made = settings(plugin)
    assert (made["enable_lora"], made["max_lora_rank"], made["lora_target_modules"]) == (True, 8, "q_proj,v_proj")
    assert settings(plugin, max_lora_rank=32)["max_lora_rank"] == 32


def test_weights_that_were_kept_are_not_resumed(plugin: Any) -> None:
    """With LoRA verl releases the KV cache alone, and its worker asks for the weights, too."""
    adapter = plugin.LockstepServerAdapter()
    asyncio.run(adapter.resume(["weights"]))
    adapter.sleep_level = 1
    for tags in (["weights"], ["kv_cache"], ["weights", "kv_cache"]):
        asyncio.run(adapter.resume(tags))
    assert adapter.resumed == [["weights"], ["kv_cache"], ["kv_cache"]]


def test_sets_in_the_configuration_of_an_adapter_are_sent_as_lists(plugin: Any) -> None:
    config = {"r": 8, "target_modules": {"v_proj", "q_proj"}, "target_parameters": set()}
    sent, _ = plugin.LockstepServerAdapter().wrap_lora_params(config, [])
    assert json.loads(sent) == {"r": 8, "target_modules": ["q_proj", "v_proj"], "target_parameters": []}


class Profiler:
    """The client's two calls; `stop` is the server's answer to the second."""

    def __init__(self, stop: Exception | None = None) -> None:
        self.started: list[tuple[Any, dict[str, Any]]] = []
        self._stop = stop

    async def start_profile(self, output_dir: str | None, **fields: Any) -> None:
        self.started.append((output_dir, fields))

    async def stop_profile(self) -> None:
        if self._stop is not None:
            raise self._stop


def profiled(plugin: Any, client: Profiler) -> Any:
    manager = plugin.HttpTokenizerManager("http://127.0.0.1:1", None)
    manager._client = client
    return manager


def test_a_profile_as_verl_asks_for_it(plugin: Any) -> None:
    client = Profiler()
    manager = profiled(plugin, client)
    # The result of verl's `build_sglang_profiler_args`, with settings of the profiler and without.
    asked = {"output_dir": "out/replica_0", "with_stack": True, "record_shapes": False, "start_step": None}
    asyncio.run(manager.start_profile(**asked, num_steps=20))
    asyncio.run(manager.stop_profile())
    asyncio.run(manager.start_profile())
    assert client.started == [(str(Path.cwd() / "out/replica_0"), {"with_stack": True, "num_steps": 20}), (None, {})]


def test_what_the_profiler_lacks_is_refused_by_name(plugin: Any) -> None:
    client = Profiler()
    with pytest.raises(BadRequest, match="start_profile: not part of this server: profile_by_stage, start_step"):
        asyncio.run(profiled(plugin, client).start_profile(start_step=3, profile_by_stage=True, num_steps=2))
    assert not client.started


def test_a_profile_that_ended_by_itself_may_be_stopped(plugin: Any) -> None:
    asyncio.run(profiled(plugin, Profiler(ServerError(409, "no profile is running"))).stop_profile())
    with pytest.raises(ServerError, match="disk"):
        asyncio.run(profiled(plugin, Profiler(ServerError(500, "disk full"))).stop_profile())
