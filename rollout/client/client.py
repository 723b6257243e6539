"""`RolloutClient`: the synchronous client.  Safe to share between threads.

Sends and waits; what is sent and how answers are read is in `wire` and `generation`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import httpx

from rollout.client import generation, wire
from rollout.client.errors import ResponseFormatError, ServerTimeout, ServerUnreachable
from rollout.client.sse import DONE, SseDecoder
from rollout.client.transport import client_error, client_options, request_arguments
from rollout.client.types import GenerateOptions, GenerationOutput, RouteLayout, Timeouts

T = TypeVar("T")


class RolloutClient:
    """A rollout server at `base_url`.  `AsyncRolloutClient` has the same methods as coroutines.

    Every method may raise `ServerError` (the server refused), `ServerUnreachable`, `ServerTimeout`,
    `ResponseFormatError`, and `BadRequest` for arguments that cannot be sent.  The methods of weight refresh return the
    server's answer and are what a `weight_sync` sender asks of its control side.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:30000",
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeouts: Timeouts | None = None,
        route_layout: RouteLayout | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._timeouts = timeouts or Timeouts()
        self._layout = route_layout
        self._http = httpx.Client(**client_options(base_url), transport=transport)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, call: wire.Call[T]) -> T:
        arguments = request_arguments(call, self._timeouts, self._api_key, self._admin_api_key)
        try:
            response = self._http.request(**arguments)
        except httpx.HTTPError as error:
            raise client_error(error, call, self._timeouts, self.base_url) from error
        return call.parse(wire.Reply(response.status_code, response.content))

    # --- generation ----------------------------------------------------------------------------------------------

    def generate(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationOutput | list[GenerationOutput]:
        """Samples for one prompt (text or `input_ids`) or a batch; a list for a batch or n > 1, prompt by prompt."""
        return self._run(generation.generate(prompt, options, self._layout))

    def stream(
        self, prompt: str | Sequence[str] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationOutput, None, None]:
        """The outputs of a generation as they grow, each cumulative.  Closing the iterator aborts the request."""
        call = generation.stream(prompt, options)
        arguments = request_arguments(call, self._timeouts, self._api_key, self._admin_api_key)
        return self._events(call, arguments)

    def _events(self, call: wire.Call[None], arguments: dict[str, Any]) -> Generator[GenerationOutput, None, None]:
        decoder = SseDecoder()
        body = call.json or {}
        try:
            with self._http.stream(**arguments) as response:
                if not response.is_success:
                    call.parse(wire.Reply(response.status_code, response.read()))
                for chunk in response.iter_bytes():
                    for event in decoder.feed(chunk):
                        if event == DONE:
                            return
                        yield generation.parse_event(event, body, self._layout)
        except httpx.HTTPError as error:
            raise client_error(error, call, self._timeouts, self.base_url) from error
        raise ResponseFormatError("the stream ended before it was done")

    def abort(self, rid: str) -> None:
        """Abort the request with exactly this id; it answers with what it has.  Unknown ids are ignored."""
        self._run(wire.abort(rid))

    def abort_all(self) -> None:
        """Abort every request; each answers with what it has."""
        self._run(wire.abort_all())

    def pause(self, mode: wire.PauseMode = "abort") -> dict[str, Any]:
        """Stop generating; new requests wait.  Running ones are aborted, retracted, kept in place, or awaited."""
        return self._run(wire.pause(mode))

    def continue_generation(self, abort_below_weight_version: str | None = None) -> dict[str, Any]:
        """End a pause; first abort what has tokens or KV of older weights than those that last had this label."""
        return self._run(wire.continue_generation(abort_below_weight_version))

    def flush_cache(self) -> str:
        """Empty the prefix cache; refused while requests run."""
        return self._run(wire.flush_cache())

    def release_memory_occupation(self, tags: Sequence[wire.MemoryTag] | None = None) -> dict[str, Any]:
        """Make the server give memory back to the system; refused while requests run.  None: all that it can."""
        return self._run(wire.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Sequence[wire.MemoryTag] | None = None) -> dict[str, Any]:
        """Let the server take released memory again.  None: all of it."""
        return self._run(wire.resume_memory_occupation(tags))

    def start_profile(
        self,
        output_dir: str | None = None,
        num_steps: int | None = None,
        *,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> dict[str, Any]:
        """Record every step from now on with torch's profiler; the `files` come at the stop or after `num_steps`."""
        call = wire.start_profile(output_dir, num_steps, with_stack, record_shapes)
        return self._run(call)

    def stop_profile(self) -> dict[str, Any]:
        """Write what was recorded; answers when the `files` are there."""
        return self._run(wire.stop_profile())

    # --- information ---------------------------------------------------------------------------------------------

    def model_info(self) -> dict[str, Any]:
        """Path, tokenizer and weight version of the served model."""
        return self._run(wire.model_info())

    def server_info(self) -> dict[str, Any]:
        """The server's launch arguments and internal state."""
        return self._run(wire.server_info())

    def loads(self) -> dict[str, Any]:
        """Running and waiting requests, and tokens in use."""
        return self._run(wire.loads())

    def health(self, timeout: float = 5.0) -> bool:
        """True if the server serves; False if it does not yet, no longer, or cannot be reached within `timeout`."""
        try:
            return self._run(wire.health(timeout))
        except (ServerUnreachable, ServerTimeout):
            return False

    def wait_until_ready(self, timeout: float = 300.0, poll: float = 0.2) -> None:
        """Return as soon as the server serves.  Raises `ServerTimeout` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left > 0 and self.health(min(left, 5.0)):
                return
            if deadline - time.monotonic() <= poll:
                raise ServerTimeout(f"the server at {self.base_url} was not ready within {timeout:g} s")
            time.sleep(poll)

    def tokenize(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `prompt`."""
        return self._run(wire.tokenize(prompt, add_special_tokens))

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._run(wire.detokenize(tokens, skip_special_tokens))

    # --- weights -------------------------------------------------------------------------------------------------

    def weight_version(self) -> str:
        """Label of the weights that serve now."""
        return self._run(wire.weight_version())

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = wire.WEIGHT_UPDATE_GROUP,
        backend: str | None = None,
    ) -> dict[str, Any]:
        """Make the server join a process group; returns once all ranks have met, so join on another thread.

        `backend` None: the one that fits the server's device.
        """
        call = wire.init_weights_update_group(master_address, master_port, rank_offset, world_size, group_name, backend)
        return self._run(call)

    def destroy_weights_update_group(self, group_name: str = wire.WEIGHT_UPDATE_GROUP) -> dict[str, Any]:
        """Make the server leave a process group."""
        return self._run(wire.destroy_weights_update_group(group_name))

    def begin_weight_update(
        self,
        weight_version: str | None = None,
        coverage: str = "full",
        manifest: Sequence[Mapping[str, Any]] | None = None,
        *,
        base_version: str | None = None,
        base_digest: str | None = None,
        lease_s: float | None = None,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Open a refresh of all tensors (`coverage` "full") or of some ("partial").

        `manifest`: {"name", "dtype", "shape", "fingerprint"} of the tensors to come.  `base_version`, `base_digest`:
        refused unless these weights are in force.  `lease_s`: how long the next bucket or the end may take.
        `update_id`: a name for this refresh; then every call must carry it, and begin may be repeated.
        """
        call = wire.begin_weight_update(
            weight_version, coverage, manifest, base_version, base_digest, lease_s, update_id
        )
        return self._run(call)

    def weight_update(self, update_id: str | None = None) -> dict[str, Any]:
        """The open refresh: what came, what is missing, its lease; and why the last one failed.

        With an `update_id`: what became of that one (`outcome`: open, verified, committed, lost, aborted, unknown).
        """
        return self._run(wire.weight_update(update_id))

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = wire.WEIGHT_UPDATE_GROUP,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Make the server receive these tensors; answers when it has them, so broadcast on another thread."""
        call = wire.update_weights_from_distributed(
            names, dtypes, shapes, group_name, load_format, weight_version, flush_cache, update_id
        )
        return self._run(call)

    def update_weights_from_ipc(
        self,
        zmq_handles: Mapping[str, str],
        weight_version: str | None = None,
        flush_cache: bool = False,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Make the server receive a checkpoint from a parameter server beside it; answers at the end of that.

        `zmq_handles`: address of the parameter server's socket by the server's device ("GPU-..." or "cpu").
        """
        return self._run(wire.update_weights_from_ipc(zmq_handles, weight_version, flush_cache, update_id))

    def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Make the server load a checkpoint folder of its machine; refused, and nothing changed, if it does not fit."""
        return self._run(wire.update_weights_from_disk(model_path, weight_version, load_format, update_id))

    def pull_weights(
        self,
        local_checkpoint_dir: str,
        source_dir: str,
        target_version: int,
        update_memory: bool = False,
        weight_version: str | None = None,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Make the server bring a checkpoint folder of its machine to a version published in `source_dir`.

        `update_memory`: and then the weights that serve, under `weight_version` (default: the number of the version).
        """
        call = wire.pull_weights(
            local_checkpoint_dir, source_dir, target_version, update_memory, weight_version, update_id
        )
        return self._run(call)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[bytes | str] | None = None,
        *,
        load_format: str | None = None,
        format: str | None = None,
        shm_name: str | None = None,
        shm_bytes: int | None = None,
        shm_unlink: bool = False,
        weight_version: str | None = None,
        flush_cache: bool = False,
        update_id: str | None = None,
    ) -> dict[str, Any]:
        """Send tensors in the body, one payload a rank (bytes, or their base64), or name shared memory that holds them.

        `format` "safetensors": a payload, or the shared memory, is a safetensors file; None: SGLang's pickles.
        """
        call = wire.update_weights_from_tensor(
            serialized_named_tensors,
            load_format,
            format,
            shm_name,
            shm_bytes,
            shm_unlink,
            weight_version,
            flush_cache,
            update_id,
        )
        return self._run(call)

    def end_weight_update(self, phase: wire.EndPhase | None = None, update_id: str | None = None) -> dict[str, Any]:
        """Verify what came and switch to it; refused, and nothing changed, if anything is missing or wrong.

        `phase` "verify" or "commit": only that half, so that several servers can switch together.  With the
        `update_id` of a refresh that is in force already it answers as before.
        """
        return self._run(wire.end_weight_update(phase, update_id))

    def abort_weight_update(self, update_id: str | None = None) -> dict[str, Any]:
        """Drop an open refresh; the old weights serve on."""
        return self._run(wire.abort_weight_update(update_id))

    def update_weight_version(
        self, new_version: str, abort_all_requests: bool = False, update_id: str | None = None
    ) -> dict[str, Any]:
        """Rename the weights that serve now."""
        return self._run(wire.update_weight_version(new_version, abort_all_requests, update_id))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first `truncate_size` entries of a tensor along its first dimension, as nested lists."""
        return self._run(wire.get_weights_by_name(name, truncate_size))

    def weights_checker(
        self, action: str = "checksum", keep_content: bool = False, skip_tensor_list: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Prove what serves: `checksum`, `snapshot`, `compare` (an error where tensors differ), `reset_tensors`."""
        return self._run(wire.weights_checker(action, keep_content, skip_tensor_list))
