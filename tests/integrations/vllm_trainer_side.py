"""The trainer's half of vLLM's weight transfer for a CPU: the names of `vllm.distributed.weight_transfer`, over gloo.

Trainers of TRL and SkyRL import it from vLLM, whose own needs NCCL.  Tensors go as vLLM packs them: one uint8 buffer
after another, each closed by the tensor that takes it over the limit.
"""

from __future__ import annotations

import collections
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from rollout.core.messages.weights import DEFAULT_GROUP as WEIGHT_UPDATE_GROUP
from tests.integrations.stubs import Anything
from weight_sync.process_group import GroupHandle, free_port, init_process_group

SHIM = "gloo for vLLM's NCCL sender"
BUFFER_BYTES = 1 << 30
JOIN_S = 60.0


def install() -> None:
    """Answer `import vllm...` for the rest of the process."""
    network = _module("vllm.utils.network_utils", get_ip=lambda: "127.0.0.1", get_open_port=free_port)
    _module("vllm.utils", network_utils=network)
    common = _module("vllm.distributed.weight_transfer.nccl_common", trainer_init=trainer_init)
    packed = _module("vllm.distributed.weight_transfer.packed_tensor", packed_nccl_broadcast_producer=broadcast_packed)
    base = _module(
        "vllm.distributed.weight_transfer.base",
        ParamMeta=collections.namedtuple("ParamMeta", "name dtype shape"),
        WeightSource=object,
        materialize_full_tensor=lambda tensor: tensor,
    )
    transfer = _module("vllm.distributed.weight_transfer", base=base, nccl_common=common, packed_tensor=packed)
    params = _module("vllm.sampling_params", StructuredOutputsParams=Anything)
    _module(
        "vllm",
        utils=sys.modules["vllm.utils"],
        distributed=_module("vllm.distributed", weight_transfer=transfer),
        sampling_params=params,
        **dict.fromkeys(("LLM", "RequestOutput", "SamplingParams"), Anything),
    )


def trainer_init(init_info: Mapping[str, Any]) -> _Communicator:
    """Join the group as rank 0, after leaving the one before: torch holds a name once."""
    leave_groups()
    address, port = init_info["master_address"], int(init_info["master_port"])
    size = init_info["world_size"]
    return _Communicator(init_process_group(address, port, 0, size, WEIGHT_UPDATE_GROUP, "gloo", JOIN_S))


def leave_groups() -> None:
    """Leave every group that this process joined here."""
    while _Communicator.joined:
        _Communicator.joined.pop().destroy()


class _Communicator:
    """`group` is there for clients that take it apart when they are done."""

    joined: ClassVar[list[GroupHandle]] = []

    def __init__(self, handle: GroupHandle) -> None:
        self.joined.append(handle)
        self._handle = handle
        self.group = types.SimpleNamespace(store=None, socket=None)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        self._handle.start_broadcast(tensor).wait()


def broadcast_packed(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: _Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int = BUFFER_BYTES,
    num_buffers: int = 2,
) -> None:
    """Send all tensors of the iterator."""
    waiting: list[torch.Tensor] = []
    for item in iterator:
        waiting.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(tensor.numel() for tensor in waiting) > buffer_size_bytes:
            group.broadcast(torch.cat(waiting), src)
            waiting = []
    if waiting:
        group.broadcast(torch.cat(waiting), src)


def _module(name: str, **content: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__dict__.update(content)
    return module
