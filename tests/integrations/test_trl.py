"""TRL: the client of its trainers, the client of async GRPO, and the weight transfer of both."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import peft
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer

from tests.integrations import cuda_as_cpu, vllm_trainer_side
from tests.integrations.framework import Framework
from tests.integrations.peft_adapter import ALPHA, RANK, TARGETS, adapted_model, assert_sampled_by, train
from tests.integrations.weights import assert_holds, scale_model, scaled, trainer_model
from tests.model_zoo import logical_tensors
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port
from weight_sync.sender import WeightSender

cuda_as_cpu.install()
vllm_trainer_side.install()
importlib.import_module("trl.import_utils").is_vllm_available = lambda min_version=None: True
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402
from trl.experimental.async_grpo.async_grpo_trainer import select_adapter_sync  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop  # noqa: E402
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient  # noqa: E402
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

FRAMEWORK = Framework(
    name="TRL",
    packages=("trl",),
    shimmed=(vllm_trainer_side.SHIM, cuda_as_cpu.SHIM, "init_communicator told that its CPU is CUDA"),
    not_there=("images",),
)
PROMPTS = [[260, 315, 81, 377, 294], [67, 68, 310]]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    opened = VLLMClient(base_url=server.url, group_port=free_port())
    yield opened
    opened.session.close()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return trainer_model(checkpoint)


def test_generate_from_ids_returns_logprobs_of_each_token(client: Any) -> None:
    reply = client.generate(PROMPTS, n=2, max_tokens=5, logprobs=1, generation_kwargs={"ignore_eos": True})
    assert reply["prompt_ids"] == PROMPTS
    assert [len(ids) for ids in reply["completion_ids"]] == [5] * 4
    for ids, chosen in zip(reply["completion_ids"], reply["logprob_token_ids"]):
        assert all(token in entry for token, entry in zip(ids, chosen))


def test_generate_from_text_returns_token_ids(client: Any) -> None:
    reply = client.generate(["What is 2 + 3?"], max_tokens=4, logprobs=None)
    assert reply["prompt_ids"][0] and reply["completion_ids"][0]


def test_chat_returns_logprobs_of_each_token(client: Any) -> None:
    messages = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "What is 2 + 3?"}]]
    reply = client.chat(messages, n=2, max_tokens=4, logprobs=0)
    assert len(reply["prompt_ids"]) == 2 and len(reply["completion_ids"]) == 4
    assert all(len(ids) == len(entries) for ids, entries in zip(reply["completion_ids"], reply["logprobs"]))


def test_scores_of_a_teacher(client: Any) -> None:
    sequences = [[*prompt, 7, 9, 11] for prompt in PROMPTS]
    reply = client.get_sequence_logprobs(sequences, [len(prompt) for prompt in PROMPTS], top_logprobs=4)
    assert [ids[0] for ids in reply["actual_token_ids"][0]] == [7, 9, 11]
    assert all(len(entry) == 4 for entry in reply["logprobs"][0])


def test_weights_of_a_model(client: Any, server: ServerProcess, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    client.init_communicator(device="cuda")
    scale_model(model, 2.0)
    client.update_model_params(model)
    assert_holds(server, scaled(tensors, 2.0))


def test_weights_one_by_one(client: Any, server: ServerProcess, model: Any, tensors: dict[str, torch.Tensor]) -> None:
    scale_model(model, 0.5)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    assert_holds(server, tensors)


def test_reset_prefix_cache_is_accepted(client: Any) -> None:
    client.reset_prefix_cache()


def test_async_client_knows_the_server(server: ServerProcess) -> None:
    PartialState(cpu=True)  # the trainer has one, for its logs
    client = AsyncClient(server.url)
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 4096 and client.get_dtype() == "torch.float32"
    assert client.get_world_size() == 1


def test_async_weights_around_a_running_request(
    client: Any, server: ServerProcess, model: Any, tensors: dict[str, torch.Tensor]
) -> None:
    named = list(model.named_parameters())
    info = {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }
    transfer = WeightTransferClient(AsyncClient(server.url), info, weight_sync_timeout=60)
    transfer.init_weight_transfer()
    scale_model(model, 4.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, PROMPTS[:1], max_tokens=1500, generation_kwargs={"ignore_eos": True})
        while not server.client.loads()["loads"][0]["num_running_reqs"]:
            pass
        transfer.pause()
        transfer.send_weights((name, parameter.data) for name, parameter in named)
        transfer.resume()
        assert len(running.result()["completion_ids"][0]) == 1500
    transfer.destroy()
    assert_holds(server, scaled(tensors, 4.0))


def grpo_trainer(server: ServerProcess, checkpoint: Path, folder: Path, **given: Any) -> Any:
    """Return a trainer of two steps that samples from the server.  `given`: more of `GRPOTrainer`'s arguments."""
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url,
        vllm_group_port=free_port(),
        use_cpu=True,
        bf16=False,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
    )
    return GRPOTrainer(
        model=str(checkpoint),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"What is {number} + 3?" for number in range(8)]}),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        **given,
    )


def test_grpo_trainer_in_server_mode(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of the whole trainer; afterwards the server holds what the trainer holds."""
    join = VLLMClient.init_communicator
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: join(self, "cuda"))
    trainer = grpo_trainer(server, checkpoint, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2
    trainer.vllm_generation.sync_weights()
    trainer.model.save_pretrained(tmp_path / "trained")
    assert_holds(server, logical_tensors(tmp_path / "trained"))


def test_grpo_trainer_with_our_sender_needs_no_nccl_of_vllm(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of docs/guides/trl.md: the client joins nothing, and a refresh is one of `WeightSender`."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    trainer = grpo_trainer(server, checkpoint, tmp_path)
    vllm_trainer_side.leave_groups()
    sender = WeightSender(server.client)
    sender.connect()
    versions: list[str] = []

    def refresh() -> None:
        version = f"step-{trainer.state.global_step}"
        sender.refresh(trainer.accelerator.unwrap_model(trainer.model), version)
        versions.append(version)

    trainer.vllm_generation.sync_weights = refresh
    trainer.train()
    trainer.vllm_generation.sync_weights()
    sender.close()
    assert versions[-1] == server.client.weight_version() == "step-2" and len(versions) >= 2
    trainer.model.save_pretrained(tmp_path / "trained")
    assert_holds(server, logical_tensors(tmp_path / "trained"))


# --- LoRA -------------------------------------------------------------------------------------------------------------

LORA = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM")


def test_grpo_trainer_merges_its_adapter_into_all_weights(
    server: ServerProcess,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps with `peft_config`, and the line of docs/guides/trl.md.  Without it TRL sends the model alone.

    TRL takes the adapter out of the weights once the last tensor was asked for.  vLLM's sender joins the tensors of a
    buffer after that, from views of the weights.
    """
    join, named_params = VLLMClient.init_communicator, VLLMGeneration._iter_named_params
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: join(self, "cuda"))
    monkeypatch.setattr(
        VLLMGeneration, "_iter_named_params", lambda self: ((name, it.clone()) for name, it in named_params(self))
    )
    trainer = grpo_trainer(server, checkpoint, tmp_path, peft_config=LORA)
    trainer.train()
    for seed in (1, 2):
        train(trainer.model, seed)
        trainer.vllm_generation.sync_weights()
        (tokens,), (entries,) = _sampled(trainer.vllm_generation.vllm_client)
        assert_sampled_by(trainer.model, PROMPTS[0], tokens, entries)
    monkeypatch.setattr(VLLMGeneration, "_iter_named_params", named_params)
    trainer.vllm_generation.sync_weights()
    (tokens,), (entries,) = _sampled(trainer.vllm_generation.vllm_client)
    with pytest.raises(AssertionError, match="are off by"):
        assert_sampled_by(trainer.model, PROMPTS[0], tokens, entries)


def _sampled(client: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Return tokens and their log-probabilities of one answer to the first prompt."""
    reply = client.generate(PROMPTS[:1], max_tokens=6, logprobs=0, generation_kwargs={"ignore_eos": True})
    return reply["completion_ids"], [[each[0] for each in entry] for entry in reply["logprobs"]]


class Rollouts:
    """A rollout worker in the trainer's process.  Its requests are made by the loop that TRL runs in a process."""

    def __init__(self, server: ServerProcess, checkpoint: Path) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._version = SimpleNamespace(value=0)
        values: dict[str, Any] = {"model_version_value": self._version, "heartbeat_value": SimpleNamespace(value=0.0)}
        values |= {"failed_event": multiprocessing.Event(), "exception_info_queue": queue.Queue()}
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.response_schema = {"type": "object"}  # TRL makes one for the templates that it knows
        self._loop = _AsyncRolloutLoop(
            model_name=str(checkpoint),
            dataset=Dataset.from_dict({"prompt": ["hi"]}),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            processing_class=tokenizer,
            eos_token_ids=[],
            rollout_buffer=self.rollout_buffer,
            metrics_queue=self.metrics_queue,
            vllm_server_url=server.url,
            lora_name="trl-policy",
            max_tokens=6,
            **values,
        )

    def update_model_version(self, version: int) -> None:
        self._version.value = version

    def sample(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        async def turn() -> Any:
            async with aiohttp.ClientSession() as self._loop.session:
                return await self._loop._generate_one_turn(prompt)

        return asyncio.run(turn())


def test_async_grpo_trainer_publishes_its_adapter_as_versions(
    lora_server: ServerProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sync is an adapter of its own name, which the next request asks for; old ones are unloaded."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "CPU")  # for its count of operations a second
    rollouts, judge = Rollouts(lora_server, checkpoint), adapted_model(checkpoint, 0)
    trainer = AsyncGRPOTrainer(
        model=str(checkpoint),
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path / "run"),
            vllm_server_base_url=lora_server.url,
            max_staleness=1,
            use_cpu=True,
            bf16=False,
            max_steps=2,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["hi"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        peft_config=LORA,
        rollout_worker=rollouts,
    )
    for version in range(1, 5):
        train(trainer.model, version)
        train(judge, version)
        trainer._sync_weight()
        assert_sampled_by(judge, PROMPTS[0], *rollouts.sample(PROMPTS[0]))
    served = [card["id"] for card in lora_server.http.get("/v1/models").json()["data"]]
    assert [name for name in served if "trl-policy" in name] == ["trl-policy-v3", "trl-policy-v4"], (
        "one more than its staleness"
    )


def test_async_grpo_reads_from_the_server_what_adapters_it_takes(lora_server: ServerProcess, checkpoint: Path) -> None:
    info, model = AsyncClient(lora_server.url).get_server_info(), adapted_model(checkpoint, 1)
    assert select_adapter_sync(info, model, SimpleNamespace(max_staleness=6))
    with pytest.raises(ValueError, match="`--max-loras 8`"):
        select_adapter_sync(info, model, SimpleNamespace(max_staleness=7))
