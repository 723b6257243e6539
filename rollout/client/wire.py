"""Every call but generation as data: method, path, body, deadline, and how its answer is read.

Pure functions, shared by the synchronous and the asynchronous client.  Knows SGLang's endpoints and error shapes.
Does not know sockets.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import urlencode

from rollout.client.errors import ResponseFormatError, ServerError
from rollout.client.types import Timeouts

T = TypeVar("T")

PauseMode = Literal["abort", "retract", "in_place", "wait"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
EndPhase = Literal["verify", "commit"]
WEIGHT_UPDATE_GROUP = "weight_update_group"
WRITE_PROFILE_S = 610.0  # longer than the server takes at most


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, whole."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP exchange.

    `admin` calls carry the admin key where there is one.  `timeout` names a field of `Timeouts`; `timeout_s` overrides.
    """

    method: Literal["GET", "POST"]
    path: str
    parse: Callable[[Reply], T]
    json: dict[str, Any] | None = None
    admin: bool = False
    timeout: Literal["control", "generate", "weights"] = "control"
    timeout_s: float | None = None

    def deadline(self, timeouts: Timeouts) -> float:
        """Seconds to wait for the answer."""
        return self.timeout_s if self.timeout_s is not None else getattr(timeouts, self.timeout)


# --- reading answers ---------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """The JSON content of an answer.  Raises `ResponseFormatError`."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ResponseFormatError(f"the server's answer is not JSON: {body[:200]!r}") from None


def error_message(body: bytes) -> str:
    """The reason in any of the error shapes that SGLang-compatible servers use."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body[:2000].decode("utf-8", "replace").strip() or "no reason given"
    if isinstance(content, dict):
        error = content.get("error")
        for candidate in (error.get("message") if isinstance(error, dict) else error, content.get("message")):
            if isinstance(candidate, str) and candidate:
                return candidate
        if "detail" in content:
            return str(content["detail"])
    return str(content)[:2000]


def check(reply: Reply) -> Reply:
    """`reply` itself; raises `ServerError` if its status is not a success."""
    if not 200 <= reply.status < 300:
        raise ServerError(reply.status, error_message(reply.body))
    return reply


def _object(reply: Reply) -> dict[str, Any]:
    content = parse_json(check(reply).body)
    if not isinstance(content, dict):
        raise ResponseFormatError(f"expected a JSON object, got {str(content)[:200]}")
    return content


def _verb_result(reply: Reply) -> dict[str, Any]:
    content = _object(reply)
    if content.get("success") is False:  # some servers say so under status 200
        raise ServerError(reply.status, error_message(reply.body))
    return content


def _json(reply: Reply) -> Any:
    return parse_json(check(reply).body)


def _text(reply: Reply) -> str:
    return check(reply).body.decode("utf-8", "replace").strip()


def _nothing(reply: Reply) -> None:
    check(reply)


def _field(name: str, kind: type[T]) -> Callable[[Reply], T]:
    def parse(reply: Reply) -> T:
        value = _object(reply).get(name)
        if not isinstance(value, kind):
            raise ResponseFormatError(f"the answer has no {name}, or it is not a {kind.__name__}")
        return value

    return parse


def _is_healthy(reply: Reply) -> bool:
    if reply.status == 503:
        return False
    check(reply)
    return True


# --- information -------------------------------------------------------------------------------------------------


def health(timeout_s: float) -> Call[bool]:
    return Call("GET", "/health", _is_healthy, timeout_s=timeout_s)


def model_info() -> Call[dict[str, Any]]:
    return Call("GET", "/model_info", _object)


def server_info() -> Call[dict[str, Any]]:
    return Call("GET", "/server_info", _object)


def loads() -> Call[dict[str, Any]]:
    return Call("GET", "/v1/loads", _object)


def weight_version() -> Call[str]:
    return Call("GET", "/weight_version", _field("weight_version", str))


def tokenize(prompt: str, add_special_tokens: bool) -> Call[list]:
    body = {"prompt": prompt, "add_special_tokens": add_special_tokens}
    return Call("POST", "/tokenize", _field("tokens", list), body)


def detokenize(tokens: Sequence[int], skip_special_tokens: bool) -> Call[str]:
    body = {"tokens": list(tokens), "skip_special_tokens": skip_special_tokens}
    return Call("POST", "/detokenize", _field("text", str), body)


# --- running requests --------------------------------------------------------------------------------------------


def abort(rid: str) -> Call[None]:
    return Call("POST", "/abort_request", _nothing, {"rid": rid, "abort_all": False}, admin=True)


def abort_all() -> Call[None]:
    return Call("POST", "/abort_request", _nothing, {"rid": "", "abort_all": True}, admin=True)


PAUSE_WAIT_TIMEOUT_S = 1920.0  # the server gives requests 1800 s to end


def pause(mode: PauseMode) -> Call[dict[str, Any]]:
    timeout_s = PAUSE_WAIT_TIMEOUT_S if mode == "wait" else None
    body = {"mode": mode}
    return Call("POST", "/pause_generation", _object, body, admin=True, timeout="weights", timeout_s=timeout_s)


def continue_generation(abort_below_weight_version: str | None) -> Call[dict[str, Any]]:
    body = {} if abort_below_weight_version is None else {"abort_below_weight_version": abort_below_weight_version}
    return Call("POST", "/continue_generation", _object, body, admin=True, timeout="weights")


def flush_cache() -> Call[str]:
    return Call("POST", "/flush_cache", _text, {}, admin=True)


def release_memory_occupation(tags: Sequence[MemoryTag] | None) -> Call[dict[str, Any]]:
    return _weight_verb("/release_memory_occupation", {} if tags is None else {"tags": list(tags)})


def resume_memory_occupation(tags: Sequence[MemoryTag] | None) -> Call[dict[str, Any]]:
    return _weight_verb("/resume_memory_occupation", {} if tags is None else {"tags": list(tags)})


def start_profile(
    output_dir: str | None, num_steps: int | None, with_stack: bool, record_shapes: bool
) -> Call[dict[str, Any]]:
    body = {"with_stack": with_stack, "record_shapes": record_shapes}
    body |= _stated({"output_dir": output_dir, "num_steps": num_steps})
    return Call("POST", "/start_profile", _object, body, admin=True)


def stop_profile() -> Call[dict[str, Any]]:
    return Call("POST", "/stop_profile", _object, {}, admin=True, timeout_s=WRITE_PROFILE_S)


# --- weights -----------------------------------------------------------------------------------------------------


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _weight_verb(path: str, body: dict[str, Any]) -> Call[dict[str, Any]]:
    return Call("POST", path, _verb_result, body, admin=True, timeout="weights")


def init_weights_update_group(
    master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str | None
) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {
        "master_address": master_address,
        "master_port": master_port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": group_name,
    }
    if backend is not None:
        body["backend"] = backend
    return _weight_verb("/init_weights_update_group", body)


def destroy_weights_update_group(group_name: str) -> Call[dict[str, Any]]:
    return _weight_verb("/destroy_weights_update_group", {"group_name": group_name})


def begin_weight_update(
    weight_version: str | None,
    coverage: str,
    manifest: Sequence[Mapping[str, Any]] | None,
    base_version: str | None,
    base_digest: str | None,
    lease_s: float | None,
    update_id: str | None,
) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {
        "update_id": update_id,
        "weight_version": weight_version,
        "manifest": None if manifest is None else [dict(entry) for entry in manifest],
        "base_version": base_version,
        "base_digest": base_digest,
        "lease_s": lease_s,
    }
    return _weight_verb("/begin_weight_update", {"coverage": coverage} | _stated(body))


def weight_update(update_id: str | None) -> Call[dict[str, Any]]:
    query = "" if update_id is None else "?" + urlencode({"update_id": update_id})
    return Call("GET", f"/weight_update{query}", _object)


def update_weights_from_distributed(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
    load_format: str | None,
    weight_version: str | None,
    flush_cache: bool,
    update_id: str | None,
) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "flush_cache": flush_cache,
    }
    optional = {"load_format": load_format, "weight_version": weight_version, "update_id": update_id}
    return _weight_verb("/update_weights_from_distributed", body | _stated(optional))


def update_weights_from_ipc(
    zmq_handles: Mapping[str, str], weight_version: str | None, flush_cache: bool, update_id: str | None
) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {"zmq_handles": dict(zmq_handles), "flush_cache": flush_cache}
    optional = {"weight_version": weight_version, "update_id": update_id}
    return _weight_verb("/update_weights_from_ipc", body | _stated(optional))


def update_weights_from_disk(
    model_path: str, weight_version: str | None, load_format: str | None, update_id: str | None
) -> Call[dict[str, Any]]:
    optional = {"weight_version": weight_version, "load_format": load_format, "update_id": update_id}
    return _weight_verb("/update_weights_from_disk", {"model_path": model_path} | _stated(optional))


def pull_weights(
    local_checkpoint_dir: str,
    source_dir: str,
    target_version: int,
    update_memory: bool,
    weight_version: str | None,
    update_id: str | None,
) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {
        "local_checkpoint_dir": local_checkpoint_dir,
        "source_dir": source_dir,
        "target_version": target_version,
        "update_memory": update_memory,
    }
    return _weight_verb("/pull_weights", body | _stated({"weight_version": weight_version, "update_id": update_id}))


def update_weights_from_tensor(
    serialized_named_tensors: Sequence[bytes | str] | None,
    load_format: str | None,
    format: str | None,
    shm_name: str | None,
    shm_bytes: int | None,
    shm_unlink: bool,
    weight_version: str | None,
    flush_cache: bool,
    update_id: str | None,
) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {"flush_cache": flush_cache}
    if serialized_named_tensors is not None:
        body["serialized_named_tensors"] = [
            item if isinstance(item, str) else base64.b64encode(item).decode() for item in serialized_named_tensors
        ]
    if shm_unlink:
        body["shm_unlink"] = True
    optional = {
        "load_format": load_format,
        "format": format,
        "shm_name": shm_name,
        "shm_bytes": shm_bytes,
        "weight_version": weight_version,
        "update_id": update_id,
    }
    return _weight_verb("/update_weights_from_tensor", body | _stated(optional))


def end_weight_update(phase: EndPhase | None, update_id: str | None) -> Call[dict[str, Any]]:
    return _weight_verb("/end_weight_update", _stated({"phase": phase, "update_id": update_id}))


def abort_weight_update(update_id: str | None) -> Call[dict[str, Any]]:
    return _weight_verb("/abort_weight_update", _stated({"update_id": update_id}))


def update_weight_version(new_version: str, abort_all_requests: bool, update_id: str | None) -> Call[dict[str, Any]]:
    body = {"new_version": new_version, "abort_all_requests": abort_all_requests}
    return _weight_verb("/update_weight_version", body | _stated({"update_id": update_id}))


def get_weights_by_name(name: str, truncate_size: int) -> Call[Any]:
    body = {"name": name, "truncate_size": truncate_size}
    return Call("POST", "/get_weights_by_name", _json, body, admin=True, timeout="weights")


def weights_checker(action: str, keep_content: bool, skip_tensor_list: Sequence[str] | None) -> Call[dict[str, Any]]:
    body: dict[str, Any] = {"action": action}
    if keep_content:
        body["keep_content"] = True
    if skip_tensor_list is not None:
        body["skip_tensor_list"] = list(skip_tensor_list)
    return _weight_verb("/weights_checker", body)
