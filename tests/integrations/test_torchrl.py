"""torchrl: `AsyncSGLang.connect`, and `SGLangWeightSyncScheme` around requests that run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import cuda_as_cpu
from tests.integrations.framework import Framework
from tests.integrations.weights import assert_holds, scale_model, scaled, trainer_model
from tests.server_process import ServerProcess

cuda_as_cpu.install()
from torchrl.modules.llm.backends.sglang import AsyncSGLang  # noqa: E402
from torchrl.weight_update.llm.sglang_nccl import SGLangWeightSyncScheme, get_model_metadata  # noqa: E402

FRAMEWORK = Framework(name="torchrl", packages=("torchrl", "tensordict"), shimmed=(cuda_as_cpu.SHIM,))
PROMPT = [260, 315, 81, 377, 294]


@pytest.fixture(scope="module")
def service(server: ServerProcess) -> Any:
    return AsyncSGLang.connect(server.url)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return trainer_model(checkpoint)


@pytest.fixture(scope="module")
def sender(server: ServerProcess, model: Any) -> Iterator[Any]:
    sender = SGLangWeightSyncScheme(server.url, master_address="127.0.0.1", strategy="state_dict").create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model))
    yield sender
    sender.shutdown()


def test_generate_from_ids_and_text(service: Any) -> None:
    both = service.generate(input_ids=[PROMPT, PROMPT[:2]], max_new_tokens=5, ignore_eos=True, return_logprobs=True)
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in both] == [5, 5]
    assert service.generate("Hello", max_new_tokens=5)["text"]


def test_refresh_reaches_every_tensor(
    server: ServerProcess, sender: Any, model: Any, tensors: dict[str, torch.Tensor]
) -> None:
    scale_model(model, 2.0)
    sender.update_weights()
    assert_holds(server, scaled(tensors, 2.0))


def test_refresh_around_a_running_request(
    server: ServerProcess, service: Any, sender: Any, model: Any, tensors: dict[str, torch.Tensor]
) -> None:
    before = server.client.weight_version()
    scale_model(model, 0.5)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(service.generate, input_ids=PROMPT, max_new_tokens=1500, ignore_eos=True)
        while not server.client.loads()["loads"][0]["num_running_reqs"]:
            pass
        sender.update_weights()
        spans = running.result()["meta_info"]["weight_versions"]
    assert_holds(server, tensors)
    assert len(spans) == 2 and spans[0]["version"] == before


def test_flush_cache_succeeds_between_requests(sender: Any) -> None:
    assert sender.flush_cache()
