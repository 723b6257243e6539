"""verl's rollout on this server: `actor_rollout_ref.rollout.name=lockstep`.

    actor_rollout_ref.model.external_lib=rollout.integrations.verl        importing this module registers the name
    actor_rollout_ref.rollout.engine_kwargs.lockstep.num_threads=8        further settings of the server

It is verl's own SGLang replica, whose server starts `lockstep serve` and whose tokenizer manager speaks HTTP.  verl's
adapter in the trainer sends weights, releases and resumes memory.  It needs SGLang's Python package, though none of its
kernels.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter
from verl.workers.rollout.sglang_rollout.utils import lora_rank_of, sglang_lora_target_modules

from capture.codec import encode_compatible
from capture.routed_experts import RoutedExperts
from rollout.client import AsyncRolloutClient, GenerationOutput, ServerError
from rollout.core.errors import BadRequest, StartupError
from rollout.integrations.child_server import ChildServer

NAME = "lockstep"
CONFLICT = 409


class LockstepHttpServer(SGLangHttpServer):
    """The actor that owns one server."""

    async def launch_server(self, master_address: str | None = None, master_port: int | None = None) -> None:
        """Start the server and wait until it serves.  Raises `StartupError`."""
        if self.nnodes > 1:
            raise StartupError("verl cannot start a replica on several machines: use one replica for each machine")
        settings = self._settings()
        self._server = ChildServer(settings)
        await self._server.wait_ready()
        self._server_port = self._server.port
        # Without a tokenizer in the engine verl takes routes as a tensor, with one as SGLang's text.
        as_routes = _all_layers if self.config.skip_tokenizer_init else encode_compatible
        kept_on = None if settings["enable_memory_saver"] else settings["device"]
        self.tokenizer_manager = HttpTokenizerManager(self._server.url, as_routes, kept_on)

    def _settings(self) -> dict[str, Any]:
        config = self.config
        given = dict(config.engine_kwargs.get(NAME) or {})
        # All ranks of a server are on one device.
        device = given.get("device") or (f"cuda:{self.base_gpu_id}" if torch.cuda.is_available() else "cpu")
        # A server whose weights and KV are on a GPU cannot release their memory, and refuses these flags.
        may_release = torch.device(device).type == "cpu"
        # A replica that shares its memory with the trainer gets its weights back on resume, before new ones come.
        shares_memory = self.rollout_mode in (RolloutMode.HYBRID, RolloutMode.COLOCATED)
        settings = {
            "model_path": self.model_config.local_path,
            "host": self._server_address,
            "allow_unauthenticated": True,  # the trainer's adapter and the agents send no key
            "dtype": config.dtype,
            "device": device,
            "mem_fraction_static": config.gpu_memory_utilization,
            "context_length": config.max_model_len,
            "max_running_requests": config.get("max_num_seqs", None),
            "skip_tokenizer_init": config.skip_tokenizer_init,
            "tp_size": config.tensor_model_parallel_size * config.data_parallel_size,
            "dp_size": config.data_parallel_size,
            "enable_dp_attention": config.data_parallel_size > 1,
            "ep_size": config.expert_parallel_size,
            "enable_memory_saver": may_release,
            "enable_weights_cpu_backup": may_release and shares_memory,
            "enable_return_routed_experts": config.enable_rollout_routing_replay,
        }
        if self.lora_as_adapter:
            targets = ",".join(sglang_lora_target_modules(self.model_config.target_modules))
            rank = lora_rank_of(self.model_config)
            settings |= {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": targets}
        return settings | given


class HttpTokenizerManager:
    """The part of SGLang's tokenizer manager that verl uses, over a server.

    `kept_on`: the device whose memory the server does not release; None: it does.
    """

    def __init__(self, url: str, as_routes: Callable[[RoutedExperts], Any], kept_on: str | None = None) -> None:
        self._client = AsyncRolloutClient(url)
        self._as_routes = as_routes
        self._kept_on = kept_on

    async def generate_request(self, request: Any, _: Any = None) -> AsyncIterator[dict[str, Any]]:
        """Yield one answer in SGLang's form.  Raises `BadRequest`, `ClientError`."""
        if request.image_data or request.video_data:
            raise BadRequest("images and videos are not supported")
        output = await self._client.generate(
            input_ids=request.input_ids,
            sampling_params=request.sampling_params,
            rid=request.rid,
            return_logprob=bool(request.return_logprob),
            logprob_start_len=-1 if request.logprob_start_len is None else request.logprob_start_len,
            top_logprobs_num=request.top_logprobs_num or 0,
            return_routed_experts=bool(request.return_routed_experts),
            lora_path=request.lora_path,
        )
        assert isinstance(output, GenerationOutput)  # one prompt, one sample
        routes = output.routed_experts
        meta = output.meta_info | ({} if routes is None else {"routed_experts": self._as_routes(routes)})
        yield {"text": output.text, "output_ids": output.output_ids, "meta_info": meta}

    async def pause_generation(self, request: Any) -> None:
        await self._client.pause(request.mode)

    async def continue_generation(self, _: Any) -> None:
        await self._client.continue_generation()

    async def release_memory_occupation(self, request: Any, _: Any = None) -> None:
        """Release the memory that the tags of `request` name.  Raises `BadRequest`, `ClientError`."""
        self._require_release("release_memory_occupation")
        await self._client.release_memory_occupation(request.tags)

    async def resume_memory_occupation(self, request: Any, _: Any = None) -> None:
        """Take back the memory that the tags of `request` name.  Raises `BadRequest`, `ClientError`."""
        self._require_release("resume_memory_occupation")
        await self._client.resume_memory_occupation(request.tags)

    async def flush_cache(self) -> None:
        await self._client.flush_cache()

    async def start_profile(self, output_dir: str | None = None, **given: Any) -> None:
        """Trace the steps from now on.  Raises `BadRequest` for what the server's profiler lacks, `ClientError`."""
        given = {name: value for name, value in given.items() if value}  # the others ask for nothing
        if unknown := sorted(given.keys() - {"num_steps", "with_stack", "record_shapes"}):
            raise BadRequest(f"start_profile: not part of this server: {', '.join(unknown)}")
        folder = None if output_dir is None else str(Path(output_dir).absolute())  # may be relative to this process
        await self._client.start_profile(folder, **given)

    async def stop_profile(self) -> None:
        """Write the trace, unless it ended by itself before.  Raises `ClientError`."""
        try:
            await self._client.stop_profile()
        except ServerError as error:
            if error.status != CONFLICT:
                raise

    def _require_release(self, verb: str) -> None:
        if self._kept_on is not None:
            raise BadRequest(
                f"{verb}: memory is released on a CPU only, but this server runs on {self._kept_on}; "
                "set actor_rollout_ref.rollout.free_cache_engine=False"
            )


def _all_layers(routes: RoutedExperts) -> torch.Tensor:
    """Return the routes of all hidden layers, int32 [rows, layers, k], with zeros for layers without experts."""
    ids = np.zeros((len(routes), routes.num_hidden_layers, routes.top_k), dtype=np.int32)
    ids[:, list(routes.moe_layer_ids)] = routes.signed_ids()
    return torch.from_numpy(ids)


class LockstepReplica(SGLangReplica):
    """A replica whose servers are `LockstepHttpServer`s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(LockstepHttpServer)


class LockstepServerAdapter(ServerAdapter):
    """The trainer's adapter."""

    async def resume(self, tags: list[str]) -> None:
        """Resume what was released.

        With LoRA (`sleep_level` 1) verl releases the KV cache alone.  Its worker asks for the weights all the same,
        unless the rollout's name is "sglang".
        """
        if self.sleep_level == 1:
            tags = [tag for tag in tags if tag != "weights"]
        if tags:
            await super().resume(tags)

    def wrap_lora_params(self, peft_config: dict[str, Any], weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Return the adapter's configuration and tensors as verl sends them.

        PEFT 0.21 puts sets into the configuration of MoE models, which verl 0.9.1 then cannot write as JSON.
        """
        config = {key: sorted(value) if isinstance(value, set) else value for key, value in peft_config.items()}
        return super().wrap_lora_params(config, weights)


RolloutReplicaRegistry.register(NAME, lambda: LockstepReplica)
_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{LockstepServerAdapter.__name__}"
