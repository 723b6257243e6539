"""The control verbs that concern adapters, and the message that tells of a change."""

from __future__ import annotations

from typing import Any

from rollout.core.messages.message import ControlReqInput, Endpoint, Message, Name, Reply, Size
from rollout.core.messages.req_output import AdapterCard
from rollout.core.messages.tensor_lists import WithLists
from rollout.core.messages.weights import DEFAULT_GROUP

_UPSERT = {"upsert": (bool, False)}
"""SGLang's: refresh the version in force, under its requests.  Here each load makes the next version."""
_ADDED_TOKENS = frozenset({"added_tokens_config"})


class AdaptersChanged(Message):
    """Sent by a scheduler before the answer of the call that changed its adapters: all versions in memory.

    `awaited`: the names of registered adapters whose first weights have not come.
    """

    cards: list[AdapterCard]
    awaited: list[str] = []


class AdapterReply(Reply, kw_only=True):
    """The version that later requests get, and the source of each adapter by name, in SGLang's form."""

    lora_name: str
    version: int
    content_digest: str
    loaded_adapters: dict[str, str | None]


class LoadLoraAdapterReqInput(ControlReqInput[AdapterReply]):
    """Load an adapter from a folder of PEFT, as the next version of its name, for requests admitted from then on.

    `lora_path` must be readable on every machine of the server.  `pinned`: keep this version until its name is
    unloaded.  `load_inplace` false: refuse a name that is served.
    """

    endpoint = Endpoint(path="/load_lora_adapter", tag="adapters", client_waits="weights")

    lora_name: Name
    lora_path: Name
    pinned: bool = False
    load_inplace: bool = True


class LoadLoraAdapterFromTensorsReqInput(ControlReqInput[AdapterReply]):
    """Load an adapter whose tensors are in the body, as SGLang's clients make them: once, or once for each rank.

    `config_dict`: the content of `adapter_config.json`.  `payload`, `payloads`, `serialized_once`: the same as for
    /update_weights_from_tensor.  `expected_checksums`: the SHA-256 of the bytes of each tensor, in hex, by name; one
    that differs, or is missing, refuses the load.
    """

    endpoint = Endpoint(
        path="/load_lora_adapter_from_tensors",
        tag="adapters",
        client_waits="weights",
        hidden=frozenset({"payload", "payloads", "serialized_once"}),
        accepts={
            "serialized_tensors": (str | list[str] | None, None),
            "serialized_named_tensors": (list[str] | None, None),
            **_UPSERT,
        },
        refuses=_ADDED_TOKENS,
    )

    lora_name: Name
    config_dict: dict[str, Any]
    payload: bytearray | None = None
    payloads: list[bytearray] | None = None
    serialized_once: bool = False
    load_format: str | None = None
    pinned: bool = False
    load_inplace: bool = True
    expected_checksums: dict[str, str] | None = None


class LoadLoraAdapterFromDistributedReqInput(WithLists, ControlReqInput[AdapterReply]):
    """Load an adapter whose tensors come by broadcast from rank 0 of the group, one after the other, as miles sends it.

    `config_dict`: the content of `adapter_config.json`.  `tensor_lists`: the JSON object of the lists as it came, which
    are empty then.  `lists_digest`: of its bytes.
    """

    endpoint = Endpoint(
        path="/load_lora_adapter_from_distributed",
        tag="adapters",
        client_waits="weights",
        hidden=frozenset({"tensor_lists", "lists_digest"}),
        accepts=_UPSERT,
        refuses=_ADDED_TOKENS,
    )

    lora_name: Name
    config_dict: dict[str, Any]
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    group_name: str = DEFAULT_GROUP
    pinned: bool = False
    load_inplace: bool = True
    tensor_lists: bytes | None = None
    lists_digest: bytes | None = None


class RegisterReply(Reply, kw_only=True):
    """`pending`: the first weights of the name have not come, so that no request can name it."""

    lora_name: str
    pending: bool
    loaded_adapters: dict[str, str | None]


class RegisterLoraAdapterReqInput(ControlReqInput[RegisterReply]):
    """State the configuration of an adapter whose tensors come in weight updates, by names `lora_name`:TENSOR.

    Nothing is served until an update that brought all of them has ended.  `config_dict`: the content of
    `adapter_config.json`.  `defer_publish`: the name is not served yet, and if the next update with it fails, it must
    be registered again.  `pinned` and `lora_path`, SGLang's, change nothing: the newest version of a name stays.
    """

    endpoint = Endpoint(
        path="/register_lora_adapter",
        tag="adapters",
        client_waits="weights",
        accepts={"pinned": (bool, False), "lora_path": (str | None, None)},
        refuses=_ADDED_TOKENS,
    )

    lora_name: Name
    config_dict: dict[str, Any]
    defer_publish: bool = False


class UnloadReply(Reply, kw_only=True):
    loaded_adapters: dict[str, str | None]


class UnloadLoraAdapterReqInput(ControlReqInput[UnloadReply]):
    """Remove all versions of an adapter; 404 for a name that is not served.

    Its requests go on, and then its slots are free.  `retire` false: answer 409 while there are any.
    `missing_ok`: answer as if the name had been served.
    """

    endpoint = Endpoint(
        path="/unload_lora_adapter",
        tag="adapters",
        client_waits="weights",
        hidden=frozenset({"missing_ok"}),
    )

    lora_name: Name
    retire: bool = True
    missing_ok: bool = False


VERBS = (
    LoadLoraAdapterReqInput,
    LoadLoraAdapterFromTensorsReqInput,
    LoadLoraAdapterFromDistributedReqInput,
    RegisterLoraAdapterReqInput,
    UnloadLoraAdapterReqInput,
)
