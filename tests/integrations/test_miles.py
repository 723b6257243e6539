"""miles (its wheel): an engine that runs already, and one that miles starts itself; both are these servers."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
import torch.distributed as dist
import transformers  # noqa: F401  before anything is stubbed: it asks which packages there are
from peft import get_peft_model_state_dict

import rollout.integrations
from tests.integrations import local_ray, stubs
from tests.integrations.environment import use_apart
from tests.integrations.framework import Framework
from tests.integrations.peft_adapter import ALPHA, RANK, adapted_model, assert_sampled_by, train
from tests.integrations.plain_server_args import ServerArgs
from tests.integrations.weights import assert_holds, scaled
from tests.server_process import ServerProcess
from tests.sglang_payloads import forking_pickle
from weight_sync.process_group import free_port

use_apart("miles-rl")
local_ray.install()
stubs.install("triton", "torchvision", "sgl_kernel", "IPython", "sglang.srt.server_args", "sglang.srt.utils")
import sglang.srt.server_args  # noqa: E402

sglang.srt.server_args.ServerArgs = ServerArgs
from miles.backends.megatron_utils.lora_utils import LORA_ADAPTER_NAME, build_lora_sync_config  # noqa: E402
from miles.backends.sglang_utils.sglang_engine import SGLangEngine  # noqa: E402
from miles.rollout.generate_utils.generate_endpoint_utils import (  # noqa: E402
    compute_request_payload,
    get_rollout_topk_from_response,
)
from miles.utils import distributed_utils  # noqa: E402
from miles.utils.types import Sample  # noqa: E402
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # noqa: E402

_new_group = distributed_utils._new_process_group_helper
# It takes torch 2.13 for older than 2.6, by the texts, and gives an argument of then.
distributed_utils._new_process_group_helper = lambda *args, pg_options=None, **kwargs: _new_group(*args, **kwargs)

FRAMEWORK = Framework(
    name="miles",
    packages=("miles-rl",),
    flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True, "enable_return_routed_experts": True},
    shimmed=(
        local_ray.SHIM,
        "gloo for NCCL",
        "an argument of torch before 2.6 left out",
        "SGLang's ServerArgs as a plain dataclass",
    ),
    not_there=("post_process_weights", "RDMA transfer"),
)
PROMPT = [260, 315, 81, 377, 294]


def arguments(checkpoint: Path, external: bool, lora_rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        hf_checkpoint=str(checkpoint),
        rollout_external=external,
        env_report=None,
        num_gpus_per_node=1,
        rollout_num_gpus_per_engine=1,
        colocate=True,
        seed=3,
        offload_rollout=True,
        sglang_dp_size=1,
        sglang_pp_size=1,
        sglang_ep_size=1,
        sglang_router_ip=None,
        sglang_router_port=None,
        use_rollout_routing_replay=True,
        use_miles_router=True,
        fp16=False,
        lora_rank=lora_rank,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        lora_adapter_path=None,
        target_modules=["linear_qkv", "linear_proj"],
        rollout_max_response_len=16,
        rollout_max_context_len=None,
        num_layers=4,
        moe_router_topk=2,
    )


@pytest.fixture(scope="module")
def args(checkpoint: Path) -> SimpleNamespace:
    return arguments(checkpoint, external=True)


@pytest.fixture(scope="module")
def engine(server: ServerProcess, args: SimpleNamespace) -> Any:
    running = SGLangEngine(args, rank=0)
    running.init("127.0.0.1:29500", server.port, free_port(), host="127.0.0.1")
    return running


def test_external_engine_has_the_arguments_that_miles_checks(engine: Any) -> None:
    assert engine.health_generate()
    assert engine.get_weight_version() == "default"


def test_a_rollout_comes_with_its_routes(engine: Any, args: SimpleNamespace, server: ServerProcess) -> None:
    payload, _ = compute_request_payload(args, PROMPT, {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 6})
    output = requests.post(f"{server.url}/generate", json=payload, timeout=60).json()
    tokens = PROMPT + [entry[1] for entry in output["meta_info"]["output_token_logprobs"]]
    sample = Sample(tokens=tokens, response_length=6)
    routes = get_rollout_topk_from_response(args, output, sample, "routed_experts")
    assert routes.shape == (len(tokens) - 1, 4, 2)


def test_weights_in_the_body_between_snapshot_and_compare(
    engine: Any, server: ServerProcess, tensors: dict[str, torch.Tensor]
) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    engine.check_weights("snapshot")
    engine.pause_generation()
    engine.flush_cache()
    named = list(scaled(tensors, 1.0).items())
    for part in (named[::2], named[1::2]):
        engine.update_weights_from_tensor([_serialized(part)], load_format="flattened_bucket", weight_version="1")
    engine.continue_generation()
    engine.check_weights("compare")
    assert engine.get_weight_version() == "1"
    assert_holds(server, tensors)


def test_a_broadcast_refreshes_every_tensor(
    engine: Any, server: ServerProcess, tensors: dict[str, torch.Tensor]
) -> None:
    port, name, new = free_port(), "miles-pp_0", scaled(tensors, 2.0)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(engine.init_weights_update_group, "127.0.0.1", port, 1, 2, name, "nccl")
        group = distributed_utils.init_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=name
        )
        told.result()
        engine.pause_generation()
        engine.flush_cache()
        told = pool.submit(
            engine.update_weights_from_distributed,
            list(new),
            [tensor.dtype for tensor in new.values()],
            [list(tensor.shape) for tensor in new.values()],
            name,
            weight_version="2",
        )
        for tensor in new.values():
            dist.broadcast(tensor, src=0, group=group)
        told.result()
        engine.continue_generation()
    engine.destroy_weights_update_group(name)
    assert_holds(server, new)


def test_a_folder_refreshes_every_tensor(
    engine: Any, server: ServerProcess, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    engine.update_weights_from_disk(str(checkpoint))
    assert_holds(server, tensors)


def test_an_adapter_comes_in_the_body(lora_server: ServerProcess, checkpoint: Path) -> None:
    """Load, unload and load again under one name, as miles syncs; its requests name it."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    args, model = arguments(checkpoint, external=True, lora_rank=RANK), adapted_model(checkpoint, 0)
    engine = SGLangEngine(args, rank=0)
    engine.init("127.0.0.1:29500", lora_server.port, free_port(), host="127.0.0.1")
    for number in (1, 2):
        train(model, number)
        if number == 2:
            engine.unload_lora_adapter(lora_name=LORA_ADAPTER_NAME)
        engine.load_lora_adapter_from_tensors(
            lora_name=LORA_ADAPTER_NAME,
            config_dict=build_lora_sync_config(args),
            serialized_tensors=_serialized(list(get_peft_model_state_dict(model).items())),
            load_format="flattened_bucket",
        )
        payload, _ = compute_request_payload(args, PROMPT, {"temperature": 1.0, "max_new_tokens": 6})
        payload |= {"lora_path": LORA_ADAPTER_NAME}
        output = requests.post(f"{lora_server.url}/generate", json=payload, timeout=60).json()
        entries = output["meta_info"]["output_token_logprobs"]
        assert_sampled_by(model, PROMPT, [entry[1] for entry in entries], [entry[0] for entry in entries])


def test_release_and_resume_by_tags(engine: Any) -> None:
    engine.release_memory_occupation()
    engine.resume_memory_occupation(tags=["weights"])
    engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
    assert engine.health_generate()


@pytest.fixture
def redirected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Put the redirect on PYTHONPATH, as a user has it, for this process's children."""
    folder = Path(rollout.integrations.__file__).parent / "sglang_redirect"
    (tmp_path / "IPython").mkdir()
    (tmp_path / "IPython" / "display.py").write_text("HTML = display = None\n")  # which `import sglang` wants
    path = [str(folder), str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(folder)
    before = list(sys.meta_path)
    import sitecustomize  # noqa: F401

    yield
    sys.meta_path[:] = before


def test_engine_that_miles_starts(redirected: None, checkpoint: Path) -> None:
    engine = SGLangEngine(arguments(checkpoint, external=False), rank=0)
    engine.init("127.0.0.1:29500", free_port(), free_port(), host="127.0.0.1")
    try:
        assert engine.health_generate()
        assert engine.get_server_info()["enable_return_routed_experts"]
    finally:
        engine.process.terminate()
        engine.process.join(30)
    assert engine.process.exitcode == 0


def _serialized(named: list[tuple[str, torch.Tensor]]) -> str:
    """Pickle a bucket with the class of miles' SGLang, in base64."""
    bucket = FlattenedTensorBucket(named_tensors=named)
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return base64.b64encode(forking_pickle(content)).decode()
