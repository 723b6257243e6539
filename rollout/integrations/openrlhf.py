"""The parts of vLLM that OpenRLHF uses, over this server: the engine of its rollout actors, and the trainer's group.

    PYTHONPATH=.../rollout/integrations/openrlhf_path        there `import vllm` finds a package that hands these on

An actor starts a server with its arguments, or uses the one at LOCKSTEP_URL; LOCKSTEP_FLAGS are flags for the former.
Weights come one parameter a call, as OpenRLHF sends them, and are in force after the last one, all at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rollout.client import AsyncRolloutClient, ClientError, GenerationOutput
from rollout.core.errors import BadRequest
from rollout.integrations.child_server import ChildServer
from weight_sync.process_group import GroupHandle, init_process_group, resolve_backend
from weight_sync.tensor_meta import dtype_name

GROUP_NAME = "openrlhf"
JOIN_S = 300.0
SLEEP_FLAG = "--enable-memory-saver"
_SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
_NO_SAMPLING = ("n", "logprobs")


@dataclass
class SamplingParams:
    """The fields that OpenRLHF sets; another one is a `TypeError`."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None

    def as_sglang(self) -> dict[str, Any]:
        """Return the parameters under the names of `/generate`."""
        given = {_SGLANG_NAMES.get(name, name): value for name, value in vars(self).items() if name not in _NO_SAMPLING}
        return {name: value for name, value in given.items() if value is not None}


class AsyncEngineArgs:
    """Keyword arguments of the engine.  Tuning of vLLM's kernels, processes and memory has no effect."""

    WITHOUT_EFFECT = frozenset(
        {
            *("enforce_eager", "worker_extension_cls", "distributed_executor_backend", "trust_remote_code"),
            *("gpu_memory_utilization", "max_logprobs"),
        }
    )

    def __init__(self, **given: Any) -> None:
        """Translate the arguments into settings of the server.  Raises `BadRequest` for one that it cannot honour."""
        given = {name: value for name, value in given.items() if name not in self.WITHOUT_EFFECT and value is not None}
        if (mode := given.pop("logprobs_mode", "processed_logprobs")) != "processed_logprobs":
            raise BadRequest(
                f"logprobs_mode {mode!r}: this server returns log-probabilities of logits divided by the temperature"
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # A server whose weights and KV are on a GPU cannot give their memory back, and refuses these flags.
        may_sleep = given.pop("enable_sleep_mode", False) and device == "cpu"
        self.settings: dict[str, Any] = {
            "model_path": given.pop("model"),
            "tp_size": given.pop("tensor_parallel_size", 1),
            "random_seed": given.pop("seed", None),
            "context_length": given.pop("max_model_len", None),
            "disable_radix_cache": not given.pop("enable_prefix_caching", True),
            "dtype": given.pop("dtype", "auto"),
            "device": device,
            "enable_memory_saver": may_sleep,
            "enable_weights_cpu_backup": may_sleep,
        }
        if isinstance(given.get("hf_overrides"), dict):  # vLLM's may also be a function
            self.settings["json_model_override_args"] = json.dumps(given.pop("hf_overrides"))
        if given:
            raise BadRequest(f"this server does not have these arguments of vLLM's engine: {', '.join(sorted(given))}")


class Logprob(NamedTuple):
    """An entry like vLLM's."""

    logprob: float


@dataclass
class Completion:
    """One sample: ids, text, "stop" or "length", and for each token its log-probability by its id."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    """The result that a generation yields, once."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = True


class AsyncLLMEngine:
    """The part of vLLM's engine that OpenRLHF uses."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        self._settings = args.settings
        self._flags = shlex.split(os.environ.get("LOCKSTEP_FLAGS", ""))
        self._url = os.environ.get("LOCKSTEP_URL")
        device = self._settings["device"]
        self._awake_on = device if self._url is None and device != "cpu" and SLEEP_FLAG not in self._flags else None
        self._server: ChildServer | None = None
        self._client_when_ready: asyncio.Task[AsyncRolloutClient] | None = None
        self._updates = 0
        self._open_update: str | None = None
        self._released: list[str] = []
        self._running = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self._running)

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLMEngine:
        return cls(args)

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Yield the finished answer, once.  Raises `ClientError`, `BadRequest`."""
        if set(prompt) != {"prompt_token_ids"} or sampling_params.n != 1:
            raise BadRequest("a prompt must be one list of token ids for one sample; images are not supported")
        client = await self._client()
        self._running += 1
        try:
            output = await client.generate(
                input_ids=prompt["prompt_token_ids"],
                sampling_params=sampling_params.as_sglang(),
                rid=request_id,
                return_logprob=True,
            )
        finally:
            self._running -= 1
        assert isinstance(output, GenerationOutput)  # one prompt, one sample
        yield RequestOutput(request_id, list(prompt["prompt_token_ids"]), [_completion(output, sampling_params)])

    async def pause_generation(self, mode: str = "abort") -> None:
        """Pause generation.  `mode` is vLLM's name: "keep" leaves requests where they are, any other aborts them."""
        await (await self._client()).pause("in_place" if mode == "keep" else "abort")

    async def resume_generation(self) -> None:
        await (await self._client()).continue_generation()

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV back.  After `BadRequest` or `ClientError` nothing has changed."""
        if self._awake_on is not None:
            raise BadRequest(
                f"sleep: memory is released on a CPU only, but this server runs on {self._awake_on}: unset enable_sleep"
            )
        await (await self._client()).release_memory_occupation(["weights", "kv_cache"])
        self._released = ["weights", "kv_cache"]

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back, where it was given up.  After `ClientError` nothing has changed."""
        wanted = [tag for tag in self._released if tags is None or tag in tags]
        if wanted:
            await (await self._client()).resume_memory_occupation(wanted)  # type: ignore[arg-type]
        self._released = [tag for tag in self._released if tag not in wanted]

    async def is_sleeping(self) -> bool:
        """Return whether memory is given back.  The first call starts the server."""
        await self._client()
        return bool(self._released)

    async def reset_prefix_cache(self) -> None:
        """Do nothing: a prefix that was cached under other weights is never used."""

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[None]:
        """Call a method of OpenRLHF's worker extension.  Raises `ClientError`, and `BadRequest` for an unknown one."""
        if method == "init_process_group":
            await self._join(*args)
        elif method == "update_weight":
            await self._receive(*args)
        else:
            raise BadRequest(f"collective_rpc {method!r} is not supported by this server")
        return [None]

    async def _join(
        self, address: str, port: int, rank_offset: int, world_size: int, _: str, backend: str, use_ray: bool = False
    ) -> None:
        if use_ray:
            raise BadRequest("weights over Ray's collectives are not supported: set sync_with_ray to false")
        client = await self._client()
        if self._open_update is not None:  # of a trainer that has ended
            await self._drop_update(client, self._open_update)
        await client.init_weights_update_group(address, port, rank_offset, world_size, GROUP_NAME, backend)

    async def _receive(self, name: str, dtype: torch.dtype, shape: Sequence[int], is_last: bool = False) -> None:
        client = await self._client()
        is_first = self._open_update is None
        update = self._open_update = self._open_update or f"openrlhf-{uuid.uuid4().hex}"
        try:
            if is_first:
                self._updates += 1
                await client.begin_weight_update(f"openrlhf-{self._updates}", update_id=update)
            await client.update_weights_from_distributed(
                [name], [dtype_name(dtype)], [list(shape)], GROUP_NAME, update_id=update
            )
            if is_last:
                await client.end_weight_update(update_id=update)
                self._open_update = None
        except BaseException:
            await self._drop_update(client, update)
            raise

    async def _drop_update(self, client: AsyncRolloutClient, update: str) -> None:
        """Make the next parameter the first of a new update."""
        if self._open_update == update:
            self._open_update = None
        with contextlib.suppress(ClientError):  # it may never have begun, or have ended already
            await client.abort_weight_update(update)

    async def _client(self) -> AsyncRolloutClient:
        if self._client_when_ready is None:
            self._client_when_ready = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._client_when_ready)

    async def _start(self) -> AsyncRolloutClient:
        if self._url is None:
            self._server = ChildServer(self._settings, self._flags)
            await self._server.wait_ready()
            self._url = self._server.url
        return AsyncRolloutClient(self._url)


class StatelessProcessGroup(NamedTuple):
    """The meeting place of the trainer and the engines."""

    host: str
    port: int
    rank: int
    world_size: int

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> StatelessProcessGroup:
        return cls(host, port, rank, world_size)


class PyNcclCommunicator:
    """The trainer's side of the group: NCCL for a GPU, gloo for a CPU."""

    def __init__(self, group: StatelessProcessGroup, device: Any = None) -> None:
        """Join the group.  Raises `TransportError`."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")
        backend = resolve_backend(None, device)
        self._group: GroupHandle = init_process_group(
            group.host, group.port, group.rank, group.world_size, GROUP_NAME, backend, JOIN_S
        )

    def broadcast(self, tensor: torch.Tensor, src: int = 0, stream: Any = None) -> None:
        self._group.start_broadcast(tensor).wait()


def random_uuid() -> str:
    return uuid.uuid4().hex


def _completion(output: GenerationOutput, params: SamplingParams) -> Completion:
    logprobs = None
    if params.logprobs is not None:
        logprobs = [
            {token: Logprob(logprob)} for token, logprob in zip(output.output_ids, output.logprobs or [], strict=True)
        ]
    reason = output.finish_reason.type if output.finish_reason is not None else "abort"
    return Completion(output.output_ids, output.text or "", reason, logprobs)
