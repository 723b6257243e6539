"""checkpoint-engine: its `ParameterServer` and SGLang's script that drives it, over ZMQ to the server."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_engine.pin_memory
import checkpoint_engine.ps
import httpx
import pytest
import torch
from checkpoint_engine.api import request_inference_to_update
from safetensors.torch import save_file
from torch.multiprocessing import reductions

from tests.integrations.framework import Framework
from tests.integrations.weights import assert_holds, scaled
from tests.server_process import ServerProcess
from weight_sync.process_group import free_port

FRAMEWORK = Framework(
    name="checkpoint-engine",
    packages=("checkpoint-engine",),
    shimmed=("its device is the CPU: gloo, no pinned memory, buffers shared by file name",),
    not_there=("transfer between machines by RDMA",),
)


class _Cpu:
    """The attributes that the package asks of a device, for the CPU."""

    device_type = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.device_module = SimpleNamespace(
            device_count=lambda: 1,
            set_device=lambda _: None,
            mem_get_info=lambda: (1 << 24, 1 << 24),
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            ipc_collect=lambda: None,
        )


@pytest.fixture(scope="module")
def parameters() -> Iterator[Any]:
    """A parameter server of one rank."""
    ps = checkpoint_engine.ps
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torch.multiprocessing.set_sharing_strategy("file_system")
    # The package pickles the handle of its buffer plainly, which for a CPU would be the content.
    copyreg.pickle(torch.UntypedStorage, reductions.reduce_storage)
    copyreg.pickle(torch.storage.TypedStorage, reductions.reduce_typed_storage)
    ps.DeviceManager = _Cpu
    ps._get_physical_gpu_id = lambda *_: "CPU-0"
    ps.P2PStore = _no_store
    real_empty = torch.empty
    checkpoint_engine.pin_memory.torch = _ModuleWith(
        torch, empty=lambda *args, pin_memory=False, **kwargs: real_empty(*args, **kwargs)
    )
    yield ps.ParameterServer(auto_pg=True, gpu_count=1)


class _ModuleWith:
    """A module with some names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _no_store(_: Any) -> None:
    raise ImportError("no RDMA here")


def asked_as_sglang(server: ServerProcess, version: str) -> Any:
    """Return a function that names the sockets to the engine as SGLang does."""

    def ask(socket_paths: list[tuple[str, str]]) -> None:
        body = {"zmq_handles": dict(socket_paths), "flush_cache": True, "weight_version": version}
        reply = httpx.post(f"{server.url}/update_weights_from_ipc", json=body, timeout=60.0)
        assert reply.status_code == 200, reply.text

    return ask


def send(parameters: Any, name: str, ask: Any, **content: Any) -> None:
    parameters.register_checkpoint(name, **content)
    parameters.init_process_group()
    parameters.gather_metas(name)
    parameters.update(name, ask)
    parameters.unregister_checkpoint(name)


def test_named_tensors_reach_the_server(
    parameters: Any, server: ServerProcess, tensors: dict[str, torch.Tensor]
) -> None:
    new = scaled(tensors, 2.0)
    send(parameters, "first", asked_as_sglang(server, "1"), named_tensors=new)
    assert_holds(server, new)
    assert server.client.weight_version() == "1"


def test_tensors_of_files_reach_the_server(
    parameters: Any, server: ServerProcess, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    new = scaled(tensors, 4.0)
    save_file(new, tmp_path / "model.safetensors")
    send(parameters, "second", asked_as_sglang(server, "2"), files=[str(tmp_path / "model.safetensors")])
    assert_holds(server, new)


def test_its_own_client_triggers_an_update(
    parameters: Any, server: ServerProcess, tensors: dict[str, torch.Tensor]
) -> None:
    """The package's own client calls `/collective_rpc`, as it does with vLLM."""

    def ask(socket_paths: list[tuple[str, str]]) -> None:
        request_inference_to_update(f"{server.url}/collective_rpc", dict(socket_paths))

    send(parameters, "third", ask, named_tensors=tensors)
    assert_holds(server, tensors)
