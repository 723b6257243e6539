"""Bodies of vLLM's control and weight endpoints, and of AReaL's, as pydantic models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from rollout.core.messages.message import Name, Size
from rollout.core.messages.weights import InitWeightsUpdateGroupReqInput, PackedBytes
from rollout.http.control.body import body_of
from rollout.http.protocol import Body, ListsPlace

SleepTag = Literal["weights", "kv_cache"]
LIST_NAMES = ("names", "dtype_names", "shapes")
DEFAULT_PACKED_BYTES = 1 << 30  # vLLM's


class AbortRequestsRequest(Body):
    """Null aborts all requests.  An empty list names no request."""

    request_ids: list[str] | None = None


class ResetPrefixCacheRequest(Body):
    """A field that SkyRL's clients send in the body, and vLLM's in the query."""

    reset_running_requests: bool = False


class InitInfo(body_of(InitWeightsUpdateGroupReqInput)):  # type: ignore[misc]
    """The form in which tensors come: group and packed buffers.  `packed_num_buffers` concerns only the sender."""

    unsupported = frozenset({"nccl_unique_id_b64"})

    packed: bool = False
    packed_buffer_size_bytes: PackedBytes = DEFAULT_PACKED_BYTES
    packed_num_buffers: int = 2


class InitWeightTransferEngineRequest(Body):
    init_info: InitInfo


class StartWeightUpdateRequest(Body):
    """POST /start_weight_update and /start_draft_weight_update.

    `cast` is no field of vLLM's: it means the same as in /begin_weight_update.
    """

    is_checkpoint_format: Literal[True] = True
    cast: bool | None = None


class UpdateInfo(Body):
    """The tensors that are about to come.  Older clients state here, and not before, that the tensors are packed.

    Without the three lists: the tensors that /fetch_weights fetched.  `target_version`: theirs; null: any.
    """

    unsupported = frozenset({"ipc_handles", "ipc_handles_pickled", "tensor_sizes"})

    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[Size]] | None = None
    packed: bool | None = None
    packed_buffer_size_bytes: PackedBytes | None = None
    cast: bool | None = None
    target_version: Size | None = None

    @property
    def is_fetched(self) -> bool:
        return self.names is None

    @model_validator(mode="after")
    def _complete(self) -> UpdateInfo:
        missing = [name for name in LIST_NAMES if getattr(self, name) is None]
        if missing and len(missing) < len(LIST_NAMES):
            raise ValueError(f"{missing[0]} is missing")
        return self


class FetchWeightsRequest(Body):
    """POST /fetch_weights of SkyRL.  `uri`: the folder of the publications; null: `sync_dir` itself."""

    target_version: Size
    sync_dir: Name
    uri: Name | None = None


class UpdateWeightsRequest(Body):
    """POST /update_weights: `update_info` as vLLM's clients send it, or `weight_dir` as prime-rl's do."""

    list_places = (ListsPlace(("update_info",), LIST_NAMES),)

    update_info: UpdateInfo | None = None
    weight_dir: Name | None = None


class FinishWeightUpdateRequest(Body):
    weight_version: Name | None = None


class CollectiveRpcRequest(Body):
    """POST /collective_rpc.  `timeout` has no effect: every verb has a deadline of its own."""

    list_places = (ListsPlace(("kwargs", "update_info"), LIST_NAMES), ListsPlace(("args", 0), LIST_NAMES))

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class LoraReceiveTarget(Body):
    """The adapter that SkyRL's next weight update is of.  `aliases`: tensors that equal others, which come."""

    kind: Literal["lora"]
    lora_name: Name
    adapter_config: dict[str, Any]
    aliases: dict[str, str] = {}


class SetLoraReceiveTarget(Body):
    receive_target: LoraReceiveTarget


class DiscardInMemoryLora(Body):
    lora_name: Name


class SleepForWeightSync(Body):
    """The arguments of SkyRL's sleep.  Requests give up their KV and compute it again, as it cannot be offloaded."""

    unsupported = frozenset({"offload_kv"})

    offload_kv: bool = False


class WakeForWeightSync(Body):
    tags: list[SleepTag] | None = None
