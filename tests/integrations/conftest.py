"""The server that a framework's steps share, and the weights that it should hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integrations.framework import Framework
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess

CONTEXT = 4096


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest) -> Framework:
    return request.module.FRAMEWORK


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with a tokenizer: four layers, the first dense, eight experts of which two are used, float32."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    return tiny_checkpoint(folder, layers=4, top_k=2, vocab_size=512, context_length=CONTEXT)


@pytest.fixture(scope="session")
def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name."""
    return logical_tensors(checkpoint)


@pytest.fixture(scope="module")
def server(framework: Framework, checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess(checkpoint, max_total_tokens=16384, **framework.flags) as running:
        yield running


@pytest.fixture(scope="module")
def lora_server(framework: Framework, checkpoint: Path) -> Iterator[ServerProcess]:
    """The server of the steps with an adapter."""
    with ServerProcess(checkpoint, max_total_tokens=16384, enable_lora=True, **framework.flags) as running:
        yield running


@pytest.fixture(scope="module")
def random_server(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server of random weights, named tiny: nothing but a grammar makes JSON or a call of its answers."""
    settings = {"served_model_name": "tiny", "tool_call_parser": "hermes"}
    with ServerProcess(checkpoint, max_total_tokens=16384, **settings) as running:
        yield running
