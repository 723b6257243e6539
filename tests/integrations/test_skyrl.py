"""SkyRL: its inference client and the control plane of its weight sync."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # noqa: F401  before anything is stubbed: it asks which packages there are
import typing_extensions

from tests.integrations import stubs, vllm_trainer_side
from tests.integrations.framework import Framework
from tests.integrations.peft_adapter import (
    ALPHA,
    RANK,
    TOLERANCE,
    adapted_model,
    assert_sampled_by,
    distance,
    train,
)
from tests.integrations.weights import assert_holds, scaled, trainer_model
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12
stubs.install("triton", "ray", "torchvision", "cloudpathlib")
vllm_trainer_side.install()
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.backends.skyrl_train.weight_sync.control_plane import (  # noqa: E402
    SkyrlWeightSyncClient,
    nccl_init_payloads,
)
from skyrl.backends.skyrl_train.weight_sync.sources import LoraAdapterWeightSource  # noqa: E402

FRAMEWORK = Framework(
    name="SkyRL",
    packages=("skyrl",),
    flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True, "enable_return_routed_experts": True},
    shimmed=(vllm_trainer_side.SHIM, "typing_extensions' TypedDict (it is for Python 3.12)"),
    not_there=("its own publisher of deltas (not run)", "sharded RDT", "sample support"),
)
PROMPTS = [[260, 315, 81, 377, 294], [67, 68, 310]]


class Trial:
    """A client and the loop that it lives in."""

    def __init__(self, server: ServerProcess, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        model = server.client.model_info()["served_model_name"]
        self.client = RemoteInferenceClient(
            proxy_url=server.url, server_urls=[server.url], data_parallel_size=1, model_name=model, **options
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def close(self) -> None:
        self.run(self.client.teardown())
        self.loop.close()


@pytest.fixture(scope="module")
def trial(server: ServerProcess) -> Iterator[Trial]:
    running = Trial(server)
    yield running
    running.close()


def batch(tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    return {"prompt_token_ids": PROMPTS, "sampling_params": sampling, **more}


def test_generate_returns_a_log_probability_a_token(trial: Trial) -> None:
    output = trial.run(trial.client.generate(batch(5, session_ids=["a", "b"], cache_salt="v1")))
    assert [len(ids) for ids in output["response_ids"]] == [5, 5] and all(output["responses"])
    assert [len(entries) for entries in output["response_logprobs"]] == [5, 5]


def test_generate_returns_routes_from_the_asked_token_on(server: ServerProcess) -> None:
    routed = Trial(server, enable_return_routed_experts=True)
    output = routed.run(routed.client.generate(batch(5, routed_experts_prompt_starts=[0, 2])))
    shapes = [tuple(routes.shape) for routes in output["rollout_expert_indices"]]
    assert shapes == [(len(PROMPTS[0]) + 4, 4, 2), (len(PROMPTS[1]) + 4 - 2, 4, 2)]
    routed.close()


def test_sample_with_prompt_logprobs(trial: Trial) -> None:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 3},
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    reply = trial.run(trial.client.sample({"json": body}))
    assert len(reply["sequences"]) == 2 and len(reply["prompt_logprobs"]) == len(PROMPTS[0])


def test_chat_and_completion_return_an_answer(trial: Trial) -> None:
    chat = {"json": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "session_id": "a"}}
    assert trial.run(trial.client.chat_completion(chat))["choices"][0]["message"]["content"]
    completion = {"json": {"prompt": PROMPTS[0], "max_tokens": 4}}
    assert trial.run(trial.client.completion(completion))["choices"]


def test_detokenize_restores_the_tokenized_text(trial: Trial) -> None:
    ids = trial.run(trial.client.tokenize(["What is 2 + 3?"]))
    assert trial.run(trial.client.detokenize(ids)) == ["What is 2 + 3?"]


def test_the_world_size_of_one_server_is_1(trial: Trial) -> None:
    assert trial.run(trial.client.get_world_size()) == (1, 1)


def test_pause_keeps_a_request(trial: Trial) -> None:
    async def cycle() -> Any:
        running = asyncio.ensure_future(trial.client.generate(batch(800)))
        await asyncio.sleep(0.3)
        await trial.client.pause_generation()
        await trial.client.resume_generation()
        return await running

    assert [len(ids) for ids in trial.run(cycle())["response_ids"]] == [800, 800]


def test_sleep_and_wake_up(trial: Trial) -> None:
    async def cycle() -> None:
        await trial.client.reset_prefix_cache()
        await trial.client.sleep(level=1)
        assert await trial.client.is_sleeping()
        await trial.client.wake_up(tags=["weights"])
        await trial.client.wake_up(tags=["kv_cache"])
        await trial.client.generate(batch(2))

    trial.run(cycle())


def send(server: ServerProcess, new: dict[str, torch.Tensor], version: str) -> None:
    """Send tensors by SkyRL's control plane, as one update."""
    control = SkyrlWeightSyncClient([server.url], init_payload_fn=nccl_init_payloads)
    init = {
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "world_size": 2,
        "rank_offset": 1,
        "packed": True,
    }
    update = {
        "names": list(new),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in new.values()],
        "shapes": [list(tensor.shape) for tensor in new.values()],
    }
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(control.init_weight_transfer_engine, init)
        group = vllm_trainer_side.trainer_init(init)
        told.result()
        control.pause_generation()
        control.start_weight_update()
        told = pool.submit(control.update_weights, update)
        vllm_trainer_side.broadcast_packed(iter(new.items()), group, 0, lambda item: item[1])
        told.result()
        control.finish_weight_update(weight_version=version)
        control.resume_generation()
    control.close()


def test_weights_by_the_control_plane(server: ServerProcess, tensors: dict[str, torch.Tensor]) -> None:
    new = scaled(tensors, 2.0)
    send(server, new, "7")
    assert_holds(server, new)
    assert server.client.weight_version() == "7"


@pytest.fixture(scope="module")
def lora_server(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server with slots for adapters of experts, too."""
    flags = FRAMEWORK.flags | {"enable_lora": True, "lora_target_modules": "all"}
    with ServerProcess(checkpoint, max_total_tokens=16384, **flags) as running:
        yield running


class SharedAdapter(LoraAdapterWeightSource):  # type: ignore[misc]
    """SkyRL's source of an adapter of which four experts each share the matrices."""

    def __init__(self, adapter: dict[str, torch.Tensor], name: str) -> None:
        super().__init__(dtype=torch.float32, experts_per_shared_adapter=4)
        self._adapter = adapter
        self.set_lora_name(name)
        self.prepare()

    def export_adapter_stream(self) -> Any:
        return self._adapter.items()

    def finalize_adapter(self, adapter_state: Any) -> tuple[Any, dict[str, Any]]:
        targets = ["gate_proj", "up_proj", "down_proj"]
        return adapter_state, {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}


def shared_by_experts(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random A and B of all MLP, four experts alike, with a pair for each expert; merge them into the model."""
    adapter = {}

    def merge(module: str, weight: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        weight += ALPHA / RANK * pair[1] @ pair[0]
        adapter.update({f"base_model.model.{module}.lora_{side}.weight": each for side, each in zip("AB", pair)})

    def random_pair(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        into, out = (0.2 * torch.randn(RANK, size, generator=generator) for size in reversed(weight.shape))
        return into, out.T.contiguous()

    for number, layer in enumerate(model.model.layers):
        mlp, path = layer.mlp, f"model.layers.{number}.mlp"
        if not hasattr(mlp, "experts"):
            for part in ("gate_proj", "up_proj", "down_proj"):
                weight = getattr(mlp, part).weight.data
                merge(f"{path}.{part}", weight, random_pair(weight))
            continue
        gates, ups = mlp.experts.gate_up_proj.data.chunk(2, dim=1)
        for part, weights in {"gate_proj": gates, "up_proj": ups, "down_proj": mlp.experts.down_proj.data}.items():
            for expert, weight in enumerate(weights):
                pair = random_pair(weight) if expert % 4 == 0 else pair  # noqa: F821
                merge(f"{path}.experts.{expert}.{part}", weight, tuple(each.clone() for each in pair))
    return adapter


def test_an_adapter_comes_in_memory(lora_server: ServerProcess, checkpoint: Path) -> None:
    """SkyRL finds what is alike, names it in the target, and sends the rest by the transport of weights."""
    base, merged, trial = trainer_model(checkpoint), trainer_model(checkpoint), Trial(lora_server)
    for seed in (1, 2):
        merged.load_state_dict(base.state_dict())
        source = SharedAdapter(shared_by_experts(merged, torch.Generator().manual_seed(seed)), "shared")
        assert len(source.receive_target["aliases"]) == 3 * 3 * 2 * (8 - 2), "of three layers, three matrices, A and B"
        trial.run(trial.client.set_lora_receive_target(source.receive_target))
        send(lora_server, dict(source), "8")
        trial.run(trial.client.load_lora_adapter("shared", in_memory=True))
        output = trial.run(trial.client.generate(batch(6), model="shared"))
        for prompt, tokens, logprobs in zip(PROMPTS, output["response_ids"], output["response_logprobs"], strict=True):
            assert distance(merged, prompt, tokens, logprobs) < TOLERANCE
            assert distance(base, prompt, tokens, logprobs) > 100 * TOLERANCE
    trial.run(trial.client.unload_lora_adapter("shared"))
    trial.close()


def test_adapters_come_from_folders(lora_server: ServerProcess, checkpoint: Path, tmp_path: Path) -> None:
    """Write and load twice under one name, as its workers do; each sample is of the content before it."""
    trial, model = Trial(lora_server, uses_lora_weight_sync=True), adapted_model(checkpoint, 1)
    for seed in (1, 2):
        train(model, seed)
        model.save_pretrained(tmp_path / "lora")
        trial.run(trial.client.load_lora_adapter("tenant", str(tmp_path / "lora")))
        output = trial.run(trial.client.generate(batch(6), model="tenant"))
        for prompt, tokens, logprobs in zip(PROMPTS, output["response_ids"], output["response_logprobs"], strict=True):
            assert_sampled_by(model, prompt, tokens, logprobs)
    with pytest.raises(ValueError, match="`model` is required when LoRA"):
        trial.run(trial.client.generate(batch(2)))
    trial.run(trial.client.unload_lora_adapter("tenant"))
    assert "tenant" not in [card["id"] for card in lora_server.http.get("/v1/models").json()["data"]]
    trial.close()
