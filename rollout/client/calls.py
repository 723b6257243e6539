"""The methods of both clients, each written once: the call that it sends, and how the answer is read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from rollout.client.brackets import Pause
from rollout.client.errors import ServerTimeout
from rollout.client.generation_calls import GenerationCalls
from rollout.client.method import method
from rollout.client.retries import repeated
from rollout.client.streams import Events
from rollout.client.transport import Connection
from rollout.client.types import RouteLayout, Timeouts
from rollout.client.weight_calls import WeightCalls
from rollout.client.wire import (
    Call,
    JsonObject,
    Steps,
    is_healthy,
    method_call,
    nothing,
    object_of,
    reply_of,
    text_of,
    verb_call,
    verb_result,
)
from rollout.core.messages.adapters import LoadLoraAdapterReqInput, UnloadLoraAdapterReqInput
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    MemoryTag,
    PauseGenerationReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.message import AnyReply, ControlReqInput
from rollout.core.messages.profile import StartProfileReqInput, StopProfileReqInput

PAUSE_WAIT_TIMEOUT_S = 1920.0  # the server gives requests 1800 s to end


class Calls(GenerationCalls, WeightCalls):
    """The calls of both clients."""

    _http_client: type
    _semaphore: type

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:30000",
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeouts: Timeouts | None = None,
        route_layout: RouteLayout | None = None,
        max_connections: int | None = None,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Take the server's address, its keys and deadlines; `max_connections` limits the generations on their way.

        Further generations wait.  None: 4096, or half of `ulimit -n` if that is less.
        Other calls never wait for generations: a pause reaches the server however many there are.
        """
        self._settings: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key,
            "admin_api_key": admin_api_key,
            "timeouts": timeouts,
            "route_layout": route_layout,
            "max_connections": max_connections,
        }
        self._has_transport = transport is not None
        self.base_url = base_url
        self._layout = route_layout
        self._connection = Connection(base_url, api_key, admin_api_key, timeouts, max_connections)
        self._places: Any = self._semaphore(self._connection.max_connections)
        self._retry_s = self._connection.timeouts.retry
        self._http: Any = self._http_client(**self._connection.options(), transport=transport or self._new_transport())

    def _new_transport(self) -> httpx.BaseTransport | httpx.AsyncBaseTransport | None:
        """Return the transport of HTTP; None: httpx's own."""
        return None

    def _stream_events(self, call: Call[None], body: Mapping[str, Any]) -> Events:
        """Return the reader of a stream that `call` begins, or goes on with; its request was `body`."""
        return Events(call, body, self._layout, self._retry_s)

    # --- control -------------------------------------------------------------------------------------------------

    @method
    def abort(self, rid: str) -> Call[None]:
        """Abort the request with exactly this id; it answers with what it has.  Unknown ids are ignored."""
        return Call("POST", "/abort_request", nothing, {"rid": rid, "abort_all": False}, admin=True)

    @method
    def abort_all(self) -> Call[None]:
        """Abort every request; each answers with what it has."""
        return Call("POST", "/abort_request", nothing, {"rid": "", "abort_all": True}, admin=True)

    @method
    def pause(self, mode: PauseMode = "abort") -> Call[JsonObject]:
        """Stop generating; new requests wait.  Running ones are aborted, retracted, kept in place, or awaited."""
        return _pause(mode)

    @method
    def continue_generation(self, abort_below_weight_version: str | None = None) -> Call[JsonObject]:
        """End a pause; first abort requests with tokens or KV older than the last weights of this label."""
        return _continue(abort_below_weight_version)

    def paused(self, mode: PauseMode = "retract") -> Pause:
        """Return a context manager (`with` or `async with`) for a pause that ends with the block, even on an error.

        Raises as `pause` and `continue_generation` do.  Where the block raised, a failed end is a note on its error.
        """
        resume = repeated(_continue(None), self._retry_s)
        return Pause(self, repeated(_pause(mode), self._retry_s), resume)

    @method
    def flush_cache(self) -> Call[str]:
        """Empty the prefix cache; refused while requests run."""
        return verb_call(FlushCacheReqInput, text_of)

    @method
    def release_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> Call[JsonObject]:
        """Make the server give memory back to the system; refused while requests run.  None: all that it can."""
        return method_call(ReleaseMemoryOccupationReqInput, locals())

    @method
    def resume_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> Call[JsonObject]:
        """Let the server take released memory again.  None: all of it."""
        return method_call(ResumeMemoryOccupationReqInput, locals())

    @method
    def load_adapter(self, lora_name: str, lora_path: str, *, pinned: bool = False) -> Call[JsonObject]:
        """Load an adapter from a folder of PEFT that the server can read, as the next version of its name.

        Later requests get it, and requests that run keep their version.  `pinned`: the server keeps this version until
        its name is unloaded.  The answer has `version` and `content_digest`.
        """
        return method_call(LoadLoraAdapterReqInput, locals())

    @method
    def unload_adapter(self, lora_name: str, *, retire: bool = False) -> Call[JsonObject]:
        """Remove all versions of an adapter.  Raises `ServerError`: 409 while requests use one, 404 for other names.

        `retire`: take the name away also then; these requests go on, and then its slots are free.
        """
        return method_call(UnloadLoraAdapterReqInput, locals())

    @method
    def start_profile(
        self,
        output_dir: str | None = None,
        num_steps: int | None = None,
        *,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> Call[JsonObject]:
        """Record every step from now on with torch's profiler; the `files` come at the stop or after `num_steps`."""
        return method_call(StartProfileReqInput, locals())

    @method
    def stop_profile(self) -> Call[JsonObject]:
        """Write what was recorded; answers when the `files` are there."""
        return method_call(StopProfileReqInput, locals())

    @method
    def report_trainer_metrics(self, values: Mapping[str, float], step: int | None = None) -> Call[JsonObject]:
        """Show numbers of the trainer, such as its KL divergence and its reward, on the server's dashboard over time.

        At most 16 names in all.  Raises `ServerError` with status 404 on a server with --no-enable-metrics.
        """
        body = {"values": dict(values), "step": step}
        return Call("POST", "/dashboard/trainer_metrics", verb_result, body, admin=True)

    @method
    def control(self, /, verb: type[ControlReqInput[AnyReply]], **fields: Any) -> Call[AnyReply]:
        """Call any control verb of `rollout.core.messages.io_struct.VERBS` with these fields; return its typed reply.

        Not for `/flush_cache` and `/get_weights_by_name`, which answer with something else.
        """
        return verb_call(verb, reply_of(verb), **fields)

    # --- information ---------------------------------------------------------------------------------------------

    @method
    def model_info(self) -> Call[JsonObject]:
        """Return path, tokenizer and weight version of the served model."""
        return Call("GET", "/model_info", object_of)

    @method
    def server_info(self) -> Call[JsonObject]:
        """Return the server's launch arguments and internal state."""
        return Call("GET", "/server_info", object_of)

    @method
    def loads(self) -> Call[JsonObject]:
        """Return the numbers of running and waiting requests, and of tokens in use."""
        return Call("GET", "/v1/loads", object_of)

    @method
    def health(self, timeout: float = 5.0) -> Call[bool]:
        """Return True if the server serves.

        False: it does not serve yet or any longer, or cannot be reached within `timeout`.
        """
        return _health(timeout)

    @method
    def wait_until_ready(self, timeout: float = 300.0, poll: float = 0.2) -> Steps[None]:
        """Return as soon as the server serves.  Raises `ServerTimeout` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left > 0 and (yield _health(min(left, 5.0))):
                return
            if deadline - time.monotonic() <= poll:
                raise ServerTimeout(f"the server at {self.base_url} was not ready within {timeout:g} s")
            yield poll


def _pause(mode: PauseMode) -> Call[JsonObject]:
    timeout_s = PAUSE_WAIT_TIMEOUT_S if mode == "wait" else None
    return verb_call(PauseGenerationReqInput, verb_result, timeout_s=timeout_s, retry="refused", mode=mode)


def _continue(label: str | None) -> Call[JsonObject]:
    return verb_call(ContinueGenerationReqInput, verb_result, retry="refused", abort_below_weight_version=label)


def _health(timeout_s: float) -> Call[bool]:
    return Call("GET", "/health", is_healthy, timeout_s=timeout_s, unanswered=False)
