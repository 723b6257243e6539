"""AReaL: its remote engine with both of its backends, SGLang's and vLLM's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  before anything is stubbed: it asks which packages there are
from safetensors.torch import save_file

from tests.integrations import stubs
from tests.integrations.framework import Framework
from tests.integrations.peft_adapter import ALPHA, RANK, TARGETS, adapted_model, assert_sampled_by, train
from tests.integrations.weights import assert_holds, scaled
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

stubs.install("triton", "ray", "torchvision", "flask", "werkzeug", "numba", "aiofiles")
from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta  # noqa: E402
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig  # noqa: E402
from areal.engine.core.distributed import init_custom_process_group  # noqa: E402
from areal.engine.sglang_remote import RemoteSGLangEngine  # noqa: E402
from areal.engine.vllm_remote import RemotevLLMEngine  # noqa: E402
from areal.utils import name_resolve, names  # noqa: E402

FRAMEWORK = Framework(
    name="AReaL",
    packages=("areal",),
    flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True, "enable_return_routed_experts": True},
    not_there=("compute_logp: float() of the null that SGLang sends first, too",),
)
PROMPT = [260, 315, 81, 377, 294]
ENGINES = {"sglang": RemoteSGLangEngine, "vllm": RemotevLLMEngine}
BUCKETS = 2


class Trial:
    """An engine of one backend, and the group of its trainer."""

    def __init__(self, backend: str, server: ServerProcess, **options: Any) -> None:
        self.backend = backend
        config = InferenceEngineConfig(
            backend=f"{backend}:d1",
            experiment_name="lockstep",
            trial_name=backend,
            request_timeout=60,
            setup_timeout=30,
            return_routed_experts=backend == "sglang",
            **options,
        )
        self.engine = ENGINES[backend](config)
        self.engine.initialize(addr=f"127.0.0.1:{server.port}", train_data_parallel_size=1)
        self.meta = WeightUpdateMeta(
            type="xccl",
            gen_allocation=ModelAllocation.from_str(f"{backend}:d1", name="rollout"),
            nccl_master_address="127.0.0.1",
            nccl_master_port=free_port(),
            nccl_group_name=f"update_weight_group_{backend}",
        )
        self.group: Any = None

    def generate(self, tokens: int, **more: Any) -> Any:
        gconfig = GenerationHyperparameters(max_new_tokens=tokens, max_tokens=4096, ignore_eos=True, **more)
        return asyncio.run(self.engine.agenerate(ModelRequest(input_ids=list(PROMPT), gconfig=gconfig)))

    def join(self) -> None:
        told = self.engine.init_weights_update_group(self.meta)
        self.group = init_custom_process_group(
            backend="gloo",
            world_size=2,
            init_method=f"tcp://127.0.0.1:{self.meta.nccl_master_port}",
            rank=0,
            group_name=self.meta.nccl_group_name,
        )
        told.result()

    def send(self, tensors: dict[str, torch.Tensor], num_buckets: int = BUCKETS) -> None:
        """Send tensors as the trainer does: paused, a bucket a call."""
        named = list(tensors.items())
        self.engine.pause_generation()
        for bucket in (named[part::num_buckets] for part in range(num_buckets)):
            specs = [ParamSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).split(".")[-1]) for n, t in bucket]
            told = self.engine.update_weights_from_distributed(self.meta, specs)
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=self.group)
            told.result()
        self.engine.continue_generation()

    def send_adapter(self, name: str, version: int, model: Any, num_buckets: int) -> None:
        """Send what is trained as AReaL's FSDP engine does, under the name of this version."""
        lora = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "bias": "none"}
        meta = replace(self.meta, use_lora=True, lora_name=name, lora_int_id=1, peft_config=lora).with_version(version)
        whole, self.meta = self.meta, meta
        trained = {key: tensor.data for key, tensor in model.named_parameters() if tensor.requires_grad}
        self.send(trained, num_buckets)
        self.meta = whole
        self.engine.set_version(version)


@pytest.fixture(scope="module", params=list(ENGINES))
def trial(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Trial]:
    running = Trial(request.param, server)
    yield running
    running.engine.destroy()


def test_generate_returns_a_log_probability_a_token(trial: Trial) -> None:
    response = trial.generate(6)
    assert len(response.output_tokens) == len(response.output_logprobs) == 6
    if trial.backend == "sglang":
        assert response.routed_experts.shape == (len(PROMPT) + 6 - 1, 4 * 2)


def test_an_interrupted_request_is_resubmitted(trial: Trial) -> None:
    async def interrupted() -> Any:
        gconfig = GenerationHyperparameters(max_new_tokens=1500, max_tokens=4096, ignore_eos=True)
        running = asyncio.ensure_future(trial.engine.agenerate(ModelRequest(input_ids=list(PROMPT), gconfig=gconfig)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(trial.engine.pause_generation)
        await asyncio.to_thread(trial.engine.continue_generation)
        return await running

    assert len(asyncio.run(interrupted()).output_tokens) == 1500


def test_a_broadcast_refreshes_every_tensor(
    trial: Trial, server: ServerProcess, tensors: dict[str, torch.Tensor]
) -> None:
    trial.join()
    trial.send(scaled(tensors, 2.0))
    assert_holds(server, scaled(tensors, 2.0))


def note_saved(trial: Trial, scratch: Path) -> None:
    """Note that the trainer has written its files."""
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(scratch / "names")))
    saved = names.update_weights_from_disk("lockstep", trial.backend, trial.engine.get_version())
    name_resolve.add(saved, str(datetime.now().timestamp()), replace=True)


def test_a_folder_refreshes_every_tensor(
    trial: Trial, server: ServerProcess, checkpoint: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(scaled(tensors, 4.0), folder / "model.safetensors", metadata={"format": "pt"})
    note_saved(trial, tmp_path)
    meta = WeightUpdateMeta(type="disk", path=str(folder), clear_checkpoint_after_load=False)
    trial.engine.update_weights_from_disk(meta).result()
    assert_holds(server, scaled(tensors, 4.0))


def test_offload_and_onload_by_its_two_tags(trial: Trial) -> None:
    trial.engine.offload()
    trial.engine.onload(tags=["weights"])
    trial.engine.onload(tags=["kv_cache"])
    time.sleep(0.1)
    assert len(trial.generate(3).output_tokens) == 3


@pytest.mark.parametrize("backend", ENGINES)
def test_each_step_is_an_adapter_of_its_own_name(
    backend: str, lora_server: ServerProcess, checkpoint: Path, tmp_path: Path
) -> None:
    """Load versions from folders and sample each; SGLang's backend unloads the one before the last two."""
    trial, model = Trial(backend, lora_server, use_lora=True), adapted_model(checkpoint, 0)
    for version in (1, 2, 3):
        train(model, version)
        model.save_pretrained(tmp_path / f"weight_update_v{version}")
        note_saved(trial, tmp_path)
        meta = WeightUpdateMeta(
            type="disk", path=str(tmp_path / "weight_update"), use_lora=True, lora_name=backend, lora_keep_versions=2
        )
        trial.engine.update_weights_from_disk(meta.with_version(version)).result()
        trial.engine.set_version(version)
        response = trial.generate(6, lora_name=backend)
        assert_sampled_by(model, PROMPT, response.output_tokens, response.output_logprobs)
    trial.engine.destroy()
    served = [card["id"] for card in lora_server.http.get("/v1/models").json()["data"]]
    names_of_backend = [name for name in served if name.startswith(backend)]
    assert names_of_backend == [f"{backend}-v{version}" for version in ((2, 3) if backend == "sglang" else (1, 2, 3))]


def test_an_adapter_comes_by_broadcast_and_takes_the_place_of_the_one_before(
    lora_server: ServerProcess, checkpoint: Path
) -> None:
    trial, model = Trial("vllm", lora_server, use_lora=True), adapted_model(checkpoint, 0)
    trial.meta.nccl_group_name = "adapters"  # a process has each name once
    trial.join()
    for version, num_buckets in ((1, 1), (2, 2)):
        train(model, version)
        trial.send_adapter("sent", version, model, num_buckets)
        response = trial.generate(6, lora_name="sent")
        assert_sampled_by(model, PROMPT, response.output_tokens, response.output_logprobs)
    trial.engine.destroy()
    served = [card["id"] for card in lora_server.http.get("/v1/models").json()["data"]]
    assert [name for name in served if name.startswith("sent")] == ["sent-v2"]
