"""The optional `deep_ep` package: whether it can be used here, which of its APIs, and how its buffer is made.

    ElasticBuffer                  2.x; an NCCL group, and on each rank an RDMA device or EP_DISABLE_GIN=1
    normal and low-latency modes   2, 4 or 8 ranks of a node, each with an RDMA device
    normal mode                    2, 4 or 8 ranks of a node

The first of these that the package offers and that fits is used.

Source: DeepEP (github.com/deepseek-ai/DeepEP), 1.2.1 and 2.1.0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rollout.core.errors import StartupError
from rollout.distributed.communicator import Communicator

NEEDS = "--moe-a2a-backend deepep needs the deep_ep package and a GPU; all_to_all does the same on this machine"

_BUFFER_RANKS = (2, 4, 8)
_LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_MAX_LOW_LATENCY_TOKENS = 511  # two requests a token and two more fit the default depth of a queue pair, 1024
_INFINIBAND = Path("/sys/class/infiniband")


DeepEpModeName = Literal["auto", "normal", "low_latency"]  # values of --deepep-mode


class DeepEpApi(enum.Enum):
    """The modes in use, best first.  Low-latency mode alone is used on request only."""

    ELASTIC = "ElasticBuffer"
    NORMAL_AND_LOW_LATENCY = "Buffer, normal and low-latency modes"
    NORMAL = "Buffer, normal mode"
    LOW_LATENCY = "Buffer, low-latency mode"


@dataclass(frozen=True)
class DeepEpShape:
    """The sizes that the buffers are made for; the same on all ranks.

    `max_tokens_per_rank` limits every step.  In mode auto, steps of at most `max_low_latency_tokens` a rank are sent in
    the mode for few tokens, whose memory grows with this number.
    """

    hidden_size: int
    num_physical_experts: int  # experts of one layer, on all ranks
    top_k: int
    dtype: torch.dtype
    num_ranks: int
    max_tokens_per_rank: int
    max_low_latency_tokens: int = 128
    mode: DeepEpModeName = "auto"

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical_experts // self.num_ranks

    @property
    def low_latency_tokens(self) -> int:
        """The maximum number of tokens of a rank in the mode for few: the kernels' copies need a multiple of four."""
        most = self.max_tokens_per_rank
        if self.mode == "auto":
            most = min(most, self.max_low_latency_tokens)
        return -(-most // 4) * 4


def load_deep_ep() -> Any:
    """Load the package.  Raises `StartupError` where it is missing or cannot be loaded."""
    try:
        import deep_ep
    except (ImportError, AssertionError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0][:200]
        raise StartupError(f"{NEEDS} ({reason})") from error
    return deep_ep


def require_deep_ep(device: torch.device | str) -> Any:
    """Load the package for an engine on `device`.  Raises `StartupError` without the package or a CUDA device."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise StartupError(NEEDS)
    return load_deep_ep()


def has_rdma_device() -> bool:
    """Return whether this machine has an RDMA device, InfiniBand or RoCE."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def shows_communicator(communicator: Communicator) -> bool:
    """Return whether an NCCL group joins the devices and torch shows its communicator, as `ElasticBuffer` needs it."""
    return communicator.device is not None and hasattr(communicator.device.backend, "_comm_ptr")


def choose_api(
    library: Any, shape: DeepEpShape, *, has_rdma: bool, has_elastic_group: bool
) -> tuple[DeepEpApi, list[str]]:
    """Choose the best modes that `library` offers and that fit, and return why better ones are not used.

    `has_rdma`: every rank has an RDMA device.  `has_elastic_group`: every rank has a group that `ElasticBuffer` can
    use.  Raises `StartupError` with every reason if nothing fits.
    """
    if reasons := _common_objections(shape):
        raise _refusal(reasons)
    not_elastic = _elastic_objections(library, shape, has_elastic_group)
    if not not_elastic:
        return DeepEpApi.ELASTIC, []
    not_normal = _normal_objections(library, shape)
    not_low_latency = not_normal or _low_latency_objections(library, shape, has_rdma)
    if shape.mode == "low_latency":
        if not_low_latency:
            raise _refusal(not_low_latency)
        return DeepEpApi.LOW_LATENCY, not_elastic
    if not_normal:
        raise _refusal(not_normal)
    if shape.mode == "normal":
        return DeepEpApi.NORMAL, not_elastic
    return DeepEpApi.NORMAL if not_low_latency else DeepEpApi.NORMAL_AND_LOW_LATENCY, not_elastic + not_low_latency


def _refusal(reasons: list[str]) -> StartupError:
    return StartupError(
        f"--moe-a2a-backend deepep cannot carry this model on these ranks: {'; '.join(reasons)}; all_to_all can"
    )


def _common_objections(shape: DeepEpShape) -> list[str]:
    found = []
    if shape.dtype != torch.bfloat16:
        found.append(f"deep_ep sends bfloat16, not {str(shape.dtype).removeprefix('torch.')}")
    if shape.num_physical_experts % shape.num_ranks:
        found.append(f"{shape.num_ranks} ranks do not divide {shape.num_physical_experts} physical experts")
    if shape.top_k > 32:
        found.append(f"deep_ep sends a token to at most 32 experts, not {shape.top_k}")
    return found


def _elastic_objections(library: Any, shape: DeepEpShape, has_elastic_group: bool) -> list[str]:
    if not hasattr(library, "ElasticBuffer"):
        return ["this deep_ep has no ElasticBuffer"]
    found = []
    if not has_elastic_group:
        found.append("ElasticBuffer needs an NCCL group, and an RDMA device or EP_DISABLE_GIN=1 on each rank")
    if shape.hidden_size % 256:
        found.append(f"ElasticBuffer needs a hidden size that 256 divides, not {shape.hidden_size}")
    return found


def _normal_objections(library: Any, shape: DeepEpShape) -> list[str]:
    if not hasattr(library, "Buffer"):
        return ["this deep_ep has no Buffer"]
    found = []
    if shape.num_ranks not in _BUFFER_RANKS:
        found.append(f"Buffer joins 2, 4 or 8 ranks of a node, not {shape.num_ranks}")
    if shape.hidden_size % 16 or shape.hidden_size >= 8184:
        found.append(f"Buffer needs a hidden size below 8184 that 16 divides, not {shape.hidden_size}")
    if shape.slots_per_rank > 128:
        found.append(f"Buffer serves at most 128 physical experts a rank, not {shape.slots_per_rank}")
    return found


def _low_latency_objections(library: Any, shape: DeepEpShape, has_rdma: bool) -> list[str]:
    if not hasattr(getattr(library, "Buffer", None), "low_latency_dispatch"):
        return ["this deep_ep has no low-latency mode"]
    found = []
    if not has_rdma:
        found.append("low-latency mode needs an RDMA device")
    if shape.hidden_size not in _LOW_LATENCY_HIDDEN_SIZES:
        found.append(f"low-latency mode has no kernel for a hidden size of {shape.hidden_size}")
    if shape.top_k > 11:
        found.append(f"low-latency mode sends a token to at most 11 experts, not {shape.top_k}")
    if shape.low_latency_tokens > _MAX_LOW_LATENCY_TOKENS:
        found.append(
            f"low-latency mode takes at most {_MAX_LOW_LATENCY_TOKENS} tokens a rank, not {shape.low_latency_tokens} "
            "(--chunked-prefill-size and --max-running-requests over the ranks that share them)"
        )
    return found


def make_buffer(library: Any, api: DeepEpApi, shape: DeepEpShape, communicator: Communicator) -> Any:
    """Make the one buffer for all modes of `api`."""
    if api is DeepEpApi.ELASTIC:
        return library.ElasticBuffer(
            group=_ElasticGroup(communicator),
            num_max_tokens_per_rank=shape.max_tokens_per_rank,
            hidden=shape.hidden_size,
            num_topk=shape.top_k,
            deterministic=True,
            allow_hybrid_mode=False,
            explicitly_destroy=True,
        )
    num_ranks, row_bytes = shape.num_ranks, shape.hidden_size * shape.dtype.itemsize
    configs = library.Buffer.get_dispatch_config(num_ranks), library.Buffer.get_combine_config(num_ranks)
    settings: dict[str, Any] = {}
    if api is not DeepEpApi.NORMAL:
        settings = {
            "low_latency_mode": True,
            "num_qps_per_rank": shape.slots_per_rank,
            "num_rdma_bytes": library.Buffer.get_low_latency_rdma_size_hint(
                shape.low_latency_tokens, shape.hidden_size, num_ranks, shape.num_physical_experts
            ),
        }
    return library.Buffer(
        group=None,
        comm=_BufferComm(communicator),
        num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
        explicitly_destroy=True,
        **settings,
    )


class _ElasticGroup:
    """The calls of a torch process group that `ElasticBuffer` makes."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def rank(self) -> int:
        return self._communicator.rank

    def size(self) -> int:
        return self._communicator.size

    def barrier(self) -> None:
        self._communicator.all_agree(True)

    def _get_backend(self, device: torch.device) -> Any:
        """Return the NCCL backend, whose communicator the buffer shares."""
        assert self._communicator.device is not None
        return self._communicator.device.backend


class _BufferComm:
    """The calls of an mpi4py communicator that `Buffer` makes while it is set up.

    Given a torch group instead, `Buffer` would pickle the device numbers and handles that it exchanges.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def Get_rank(self) -> int:
        return self._communicator.rank

    def Get_size(self) -> int:
        return self._communicator.size

    def allgather(self, value: int | bytearray | None) -> list[int | bytearray | None]:
        return [_decode(message) for message in self._communicator.gather_bytes(_encode(value))]


def _encode(value: int | bytearray | bytes | None) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + str(value).encode()
    assert isinstance(value, bytearray | bytes), f"deep_ep exchanges {type(value).__name__}"
    return b"b" + bytes(value)


def _decode(message: bytes) -> int | bytearray | None:
    kind, body = message[:1], message[1:]
    if kind == b"i":
        return int(body)
    return bytearray(body) if kind == b"b" else None
