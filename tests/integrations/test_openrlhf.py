"""OpenRLHF: its rollout actor and its single-turn agent over `rollout.integrations.openrlhf`, weights as its trainer
sends them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import rollout.integrations
from tests.integrations import cuda_as_cpu, local_ray, stubs
from tests.integrations.framework import Framework
from tests.integrations.weights import scale_model, trainer_model
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import free_port

sys.path.insert(0, str(Path(rollout.integrations.__file__).parent / "openrlhf_path"))
local_ray.install()
stubs.install("deepspeed", "flash_attn")
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor  # noqa: E402
from openrlhf.utils.distributed_util import stateless_init_process_group  # noqa: E402
from vllm import SamplingParams  # noqa: E402

FRAMEWORK = Framework(
    name="OpenRLHF",
    packages=("openrlhf",),
    flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True},
    shimmed=(local_ray.SHIM, cuda_as_cpu.SHIM),
    not_there=("update_weight_cuda_ipc", "sync_with_ray"),
)
PROMPT = [260, 315, 81, 377, 294]


class Trial:
    """An actor, the loop that it lives in, and the trainer's side of the group."""

    def __init__(self, checkpoint: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.model = trainer_model(checkpoint)
        self.actor = self.run(self._start(checkpoint))
        self.llm = self.actor.local.llm

    async def _start(self, checkpoint: Path) -> Any:
        actor = RolloutRayActor.remote(
            model=str(checkpoint),
            num_gpus=0,
            enforce_eager=True,
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
            tensor_parallel_size=1,
            seed=1,
            max_model_len=2048,
            enable_prefix_caching=True,
            dtype="float32",
            trust_remote_code=True,
            gpu_memory_utilization=0.4,
            enable_sleep_mode=True,
            logprobs_mode="processed_logprobs",
            max_logprobs=1,
        )
        await actor.started()
        return actor

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def join(self) -> None:
        port = free_port()
        joining = self.actor.init_process_group.remote("127.0.0.1", port, 1, 2, "openrlhf", "nccl", False)
        self.group = await asyncio.to_thread(stateless_init_process_group, "127.0.0.1", port, 0, 2, "cpu")
        await joining

    async def send(self) -> None:
        """Send parameters as the trainer's loop does: one call and one broadcast a parameter."""
        named = list(self.model.named_parameters())
        for number, (name, parameter) in enumerate(named, 1):
            told = self.actor.update_weight.remote(
                name, dtype=parameter.dtype, shape=parameter.shape, empty_cache=number == len(named)
            )
            await asyncio.to_thread(self.group.broadcast, parameter.data, 0)
            await told

    async def held(self) -> dict[str, str]:
        client = await self.llm._client()
        return (await client.weights_checker("checksum"))["checksums"]

    def close(self) -> None:
        self.llm._server.stop()
        self.loop.close()


@pytest.fixture(scope="module")
def trial(checkpoint: Path) -> Iterator[Trial]:
    running = Trial(checkpoint)
    yield running
    running.close()


def test_generate_returns_a_log_probability_a_token(trial: Trial) -> None:
    params = SamplingParams(max_tokens=6, min_tokens=6, logprobs=1, skip_special_tokens=False)
    output = trial.run(trial.actor.local.generate(PROMPT, params)).outputs[0]
    assert len(output.token_ids) == 6 and output.finish_reason == "length"
    assert all(entry[token].logprob <= 0 for entry, token in zip(output.logprobs, output.token_ids))


def test_a_single_turn_agent_gets_its_log_probabilities(trial: Trial, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    params = SamplingParams(max_tokens=None, min_tokens=1, logprobs=1)
    work = trial.actor.local.generate_responses("What is 2 + 3?", "5", params, 64, tokenizer, num_samples=2)
    samples = trial.run(work)
    assert len(samples) == 2
    for sample in samples:
        assert len(sample["rollout_log_probs"]) == len(sample["observation_tokens"])


def test_weights_one_parameter_a_call(trial: Trial, tensors: dict[str, torch.Tensor]) -> None:
    scale_model(trial.model, 2.0)
    trial.run(trial.join())
    trial.run(trial.send())
    expected = {name: fingerprint_hex(fingerprint(tensor * 2.0)) for name, tensor in tensors.items()}
    assert trial.run(trial.held()) == expected


def test_weights_while_a_request_is_kept(trial: Trial, tensors: dict[str, torch.Tensor]) -> None:
    async def refresh() -> Any:
        params = SamplingParams(max_tokens=1500, ignore_eos=True, logprobs=1)
        running = asyncio.ensure_future(trial.actor.local.generate(PROMPT, params))
        while not trial.actor.local.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        await trial.actor.local.pause_generation()
        scale_model(trial.model, 0.5)
        await trial.send()
        await trial.actor.local.resume_generation()
        return await running

    assert len(trial.run(refresh()).outputs[0].token_ids) == 1500
    expected = {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}
    assert trial.run(trial.held()) == expected


def test_sleep_and_wake_up_by_tag(trial: Trial) -> None:
    actor = trial.actor.local
    trial.run(actor.reset_prefix_cache())
    trial.run(actor.sleep())
    assert trial.run(trial.llm.is_sleeping())
    trial.run(actor.wake_up(["weights"]))
    trial.run(actor.wake_up(["kv_cache"]))
    assert not trial.run(trial.llm.is_sleeping())
    assert trial.run(actor.generate(PROMPT, SamplingParams(max_tokens=2))).outputs[0].token_ids
