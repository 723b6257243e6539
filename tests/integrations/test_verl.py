"""verl: a replica of `rollout.integrations.verl`, launched as verl launches replicas, and the trainer's adapter."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from rollout.core.args.server_args import ServerArgs
from tests.integrations import local_ray, stubs
from tests.integrations.framework import Framework
from tests.integrations.peft_adapter import ALPHA, RANK, TARGETS, adapted_model, assert_sampled_by, train
from tests.integrations.weights import scaled
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import free_port

local_ray.install()
stubs.install(
    *("triton", "sgl_kernel", "sglang_kernel", "flashinfer", "tvm_ffi", "torchvision", "vllm", "IPython", "gguf"),
    *("wandb", "tensorboard", "compressed_tensors", "sentencepiece", "torch_memory_saver"),
    *("sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.tokenizer_manager"),
)
import sglang.srt.utils.patch_torch  # noqa: E402
import verl.trainer  # noqa: E402
from verl.utils.device import get_visible_devices_keyword  # noqa: E402
from verl.utils.fsdp_utils import replace_lora_wrapper  # noqa: E402
from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.engine.fsdp.utils import unfuse_moe_params  # noqa: E402
from verl.workers.rollout.base import get_rollout_class  # noqa: E402
from verl.workers.rollout.replica import get_rollout_replica_class  # noqa: E402
from verl.workers.rollout.sglang_rollout import sglang_rollout  # noqa: E402

import rollout.integrations.verl  # noqa: E402

FRAMEWORK = Framework(
    name="verl",
    packages=("verl", "sglang"),
    flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True, "enable_return_routed_experts": True},
    shimmed=(
        local_ray.SHIM,
        "CPU tensors, shared by file name",
        "stubs for SGLang's kernels and engine",
        "SGLang 0.5.23 for 0.5.12",
    ),
    not_there=("delta_sharded (its own loader)",),
)
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "recipes" / "verl" / "train.sh"
GUIDE = ROOT / "docs" / "guides" / "verl.md"
PROMPT = [260, 315, 81, 377, 294]


class Trial:
    """A hybrid replica of one server, and the adapter of the one trainer process."""

    def __init__(self, checkpoint: Path, **of_model: Any) -> None:
        self.loop = asyncio.new_event_loop()
        config = RolloutConfig(
            name="lockstep",
            tensor_model_parallel_size=1,
            dtype="float32",
            max_num_seqs=16,
            gpu_memory_utilization=0.3,
            enable_rollout_routing_replay=True,
            engine_kwargs={"lockstep": {"max_total_tokens": 8192}},
        )
        model = HFModelConfig(path=str(checkpoint), external_lib="rollout.integrations.verl", **of_model)
        self.replica = get_rollout_replica_class("lockstep")(0, config, model, gpus_per_node=1)
        worker = rollout.integrations.verl.ray.remote(SimpleNamespace).remote()
        self.run(self.replica.init_hybrid(SimpleNamespace(workers=[worker])))
        self.server = self.replica.server_handle
        self.adapter = get_rollout_class("lockstep")(config, model, None)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def generate(self, tokens: int) -> Any:
        sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": True, "ignore_eos": True}
        return await self.server.generate.remote(torch.tensor(PROMPT).tolist(), sampling, os.urandom(8).hex())

    async def held(self) -> dict[str, str]:
        client = self.server.local.tokenizer_manager._client
        return (await client.weights_checker("checksum"))["checksums"]

    def close(self) -> None:
        self.server.local._server.stop()
        self.loop.close()


@pytest.fixture(scope="module")
def trial(checkpoint: Path) -> Iterator[Trial]:
    os.environ |= {get_visible_devices_keyword(): "0", "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    torch.multiprocessing.set_sharing_strategy("file_system")
    sglang.srt.utils.patch_torch.monkey_patch_torch_reductions = lambda: None  # for CUDA's tensors only
    sglang_rollout._to_ipc_device = lambda tensor: tensor
    sglang_rollout.AsyncHttpServerAdapter.__abstractmethods__ = frozenset()  # of a later SGLang than verl's 0.5.12
    init = f"tcp://127.0.0.1:{free_port()}"
    torch.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    running = Trial(checkpoint)
    yield running
    running.close()
    torch.distributed.destroy_process_group()


@pytest.fixture
def lora_trial(trial: Trial, checkpoint: Path) -> Iterator[Trial]:
    """A replica of a model with an adapter, in the process group of `trial`."""
    running = Trial(checkpoint, lora_rank=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    yield running
    running.close()


def expected(tensors: dict[str, torch.Tensor], factor: float) -> dict[str, str]:
    return {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in scaled(tensors, factor).items()}


def test_generate_returns_a_log_probability_and_routes_a_token(trial: Trial) -> None:
    output = trial.run(trial.generate(6))
    assert len(output.token_ids) == len(output.log_probs) == 6 and output.stop_reason == "length"
    assert output.routed_experts.shape == (len(PROMPT) + 6 - 1, 4, 2)


def test_a_hybrid_step_refreshes_between_release_and_resume(trial: Trial, tensors: dict[str, torch.Tensor]) -> None:
    """Release, resume the weights, send them in buckets, resume the KV, sample."""

    async def step() -> None:
        await trial.adapter.release()
        await trial.adapter.resume(["weights"])
        await trial.adapter.update_weights(iter(scaled(tensors, 2.0).items()), global_steps=1)
        await trial.adapter.resume(["kv_cache"])

    trial.run(step())
    assert trial.run(trial.held()) == expected(tensors, 2.0)
    assert trial.run(trial.generate(4)).extra_fields["global_steps"] == 1


def test_weights_while_it_serves(trial: Trial, tensors: dict[str, torch.Tensor]) -> None:
    trial.run(trial.adapter.update_weights(iter(tensors.items()), global_steps=2))
    assert trial.run(trial.held()) == expected(tensors, 1.0)


def test_sleep_and_resume_of_the_cache(trial: Trial) -> None:
    async def cycle() -> None:
        await trial.replica.release_kv_cache()
        await trial.replica.resume_kv_cache()
        await trial.replica.clear_kv_cache()

    trial.run(cycle())
    assert len(trial.run(trial.generate(3)).token_ids) == 3


def test_abort_for_a_partial_rollout(trial: Trial) -> None:
    async def partial() -> Any:
        running = asyncio.ensure_future(trial.generate(3000))
        await asyncio.sleep(0.5)
        await trial.replica.abort_all_requests()
        first = await running
        await trial.replica.resume_generation()
        return first

    first = trial.run(partial())
    assert first.stop_reason == "abort" and len(first.token_ids) == len(first.log_probs) < 3000


def test_a_step_with_lora_sends_the_adapter_alone(lora_trial: Trial, checkpoint: Path) -> None:
    """The calls of verl's worker: the base's weights once, then in each step the adapter; KV is released in between."""
    judge = adapted_model(checkpoint, 0)
    config = judge.peft_config["default"]
    names = {name.replace(".base_layer", ""): it for name, it in judge.get_base_model().state_dict().items()}
    base = {replace_lora_wrapper(name, config): it for name, it in names.items() if "lora_" not in name}
    before = lora_trial.run(lora_trial.held())

    async def step(version: int) -> None:
        adapter = lora_trial.adapter
        await adapter.release()
        await adapter.resume(["weights"])
        if version == 1:
            plain = unfuse_moe_params(base.items(), "qwen3_moe")
            await adapter.update_weights(
                plain, global_steps=version, peft_config=config.to_dict(), base_sync_done=False
            )
        tensors = iter(peft.get_peft_model_state_dict(judge).items())
        await adapter.update_weights(tensors, global_steps=version, peft_config=config.to_dict(), base_sync_done=True)
        await adapter.resume(["kv_cache"])

    for version in (1, 2):
        train(judge, version)
        lora_trial.run(step(version))
        output = lora_trial.run(lora_trial.generate(6))
        assert output.extra_fields["global_steps"] == version
        assert_sampled_by(judge, PROMPT, output.token_ids, output.log_probs)
    assert lora_trial.run(lora_trial.held()) == before, "the adapter changes nothing of the base"


def overrides(script: str) -> list[str]:
    """Return the keys with values in the arrays of a script, as bash hands them on."""
    (before, _, _) = script.partition("python3 -m verl.trainer.main_ppo")
    echo = 'printf "%s\\n" "${ENGINE[@]}" "${ROUTES[@]}" "${CORRECTION[@]}" "${TRAINER[@]}"'
    result = subprocess.run(["bash", "-c", before + echo], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_overrides_of_the_recipe_are_keys_of_its_configuration() -> None:
    given = overrides(RECIPE.read_text(encoding="utf-8"))
    of_guide = re.findall(r"(\+?(?:actor_rollout_ref|algorithm)\.[\w.]+=\w[\w.]*)", GUIDE.read_text(encoding="utf-8"))
    assert len(given) > 40 and len(of_guide) > 8
    with initialize_config_dir(str(Path(verl.trainer.__path__[0]) / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=given)
        compose("ppo_trainer", overrides=["model_engine=megatron", *of_guide])
        with pytest.raises(ConfigCompositionException):
            compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.enable_routing_replay=True"])
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.enable_rollout_routing_replay) == ("lockstep", True)
    assert set(rollout.engine_kwargs.lockstep) <= {field.name for field in dataclasses.fields(ServerArgs)}
    assert config.actor_rollout_ref.actor.megatron.router_replay.mode == "R3"
