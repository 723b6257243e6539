"""Every setting of a server, one documented field each; the command line is derived from the fields.

Combinations that cannot work are refused.  No value is rewritten after parsing.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from eplb.algorithms.registry import PLANNERS
from rollout.core.args.addresses import is_loopback
from rollout.core.args.hub import model_name
from rollout.core.args.kv_events_config import KVEventsConfig, parse_kv_events
from rollout.core.errors import StartupError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def _arg(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Flags are spelled as SGLang's where SGLang has them (`max_total_tokens` is `--max-total-tokens`)."""

    model_path: str = _arg("", "checkpoint folder in Hugging Face format", required=True)
    tokenizer_path: str | None = _arg(None, "tokenizer folder; default: the model folder")
    served_model_name: str | None = _arg(None, "name in /v1/models; default: the name of the model folder")
    skip_tokenizer_init: bool = _arg(False, "serve token ids only; no text in or out")
    host: str = _arg("127.0.0.1", "address to listen on")
    port: int = _arg(30000, "port to listen on")
    receive_timeout: float = _arg(
        60.0, "seconds in which a client must send its request; a client that sends 128 KiB a second gets more time"
    )
    api_key: str | None = _arg(
        None,
        "key that every request must send as `Authorization: Bearer KEY`; @FILE or $LOCKSTEP_API_KEY",
        secret=True,
    )
    admin_api_key: str | None = _arg(
        None, "key for control endpoints instead of the API key; @FILE or $LOCKSTEP_ADMIN_API_KEY", secret=True
    )
    allow_unauthenticated: bool = _arg(False, "allow a non-loopback --host without --api-key")
    allowed_hosts: str | None = _arg(
        None, "comma-separated host names that clients may use for a server without a key; *: any"
    )

    tool_call_parser: Literal["qwen", "qwen25", "hermes", "qwen3_coder", "glm45", "glm47"] | None = _arg(
        None, "format of the model's tool calls, which chats return as tool_calls; default: they stay text"
    )
    reasoning_parser: Literal["qwen3", "glm45", "deepseek-r1", "deepseek_r1"] | None = _arg(
        None, "format of the model's reasoning, which chats return apart from the content; default: it stays there"
    )
    register_url: str | None = _arg(
        None,
        "router (sglang-router, smg, vllm-router): the server registers when it is ready, and leaves before it drains",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = _arg(
        "auto", "dtype of weights and KV; auto: the checkpoint's"
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3"] = _arg(
        "auto",
        "dtype of keys and values in the cache; auto: as --dtype. fp8_e4m3 takes half the memory of bfloat16: "
        "each number is rounded to 8 bits, at the checkpoint's scales (k_scale, v_scale), else at 1. Not for latent "
        "attention",
    )
    quantization_param_path: str | None = _arg(
        None,
        "JSON file with a scale of each rank and layer for keys and values in FP8; it replaces the checkpoint's",
    )
    latent_norm_eps: float | None = _arg(
        None,
        "epsilon of the norms of latent attention (q_a_layernorm, kv_a_layernorm); it must equal the trainer's. "
        "Default: 1e-6, as in transformers, for any rms_norm_eps",
    )
    json_model_override_args: str | None = _arg(
        None,
        "JSON object of settings that replace settings of config.json, such as "
        '\'{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}\'; '
        "objects are merged; --hf-overrides is the same flag",
    )
    device: str = _arg("auto", "torch device; auto: $LOCKSTEP_DEVICE, else cuda if torch finds a GPU, else cpu")
    base_gpu_id: int = _arg(0, "CUDA device of the first rank on each machine; the next ranks use the devices after it")
    num_threads: int | None = _arg(None, "compute threads; default: all cores")
    disable_native_kernels: bool = _arg(False, "run on plain torch even if compiled or Triton kernels exist")
    cpu_isa: str = _arg("auto", "instruction set of the CPU operators; auto: $LOCKSTEP_CPU_ISA, or the best that works")
    cpu_weight_format: str = _arg(
        "plain",
        "format of experts on a CPU; w8: 8 bits, a power-of-two scale for 32 elements; fp8: blocks of 128 x 128 as "
        "published; int4, int4-128: 4 bits, a scale for 32 or 128 elements",
    )
    cpu_linear_format: str = _arg(
        "plain",
        "format of projections on a CPU, as --cpu-weight-format: of attention, dense layers and shared experts",
    )
    quantization: str | None = _arg(
        None,
        "format of experts and projections on CUDA; fp8: blocks of 128 x 128 as published; int4, int4-128: 4 bits, a "
        "scale for 32 or 128 elements; default: as sent, FP8 and INT4 as values",
    )
    attention_backend: str = _arg(
        "auto",
        "native_cpu, flashinfer, torch_native, fixed_splits; auto: the fastest of these that fits the model. "
        "flashinfer_expanded: as flashinfer, and prompts of latent attention meet keys and values of heads where that "
        "takes fewer operations",
    )
    enable_deterministic_inference: bool = _arg(
        False,
        "give a token the same bits in every batch, on a GPU too. Refused if a part of the engine cannot",
    )
    disable_cuda_graph: bool = _arg(False, "on a GPU: launch each kernel of a decode step instead of a CUDA graph")
    cuda_graph_max_bs: int | None = _arg(None, "maximum requests of a captured decode step; default: 256")
    piecewise_cuda_graph_max_tokens: int = _arg(2048, "maximum tokens of a step that is captured in pieces; 0: none")
    random_seed: int | None = _arg(None, "seed for requests without one; default: from the system")
    weight_version: str = _arg("default", "version label of the weights loaded at start")

    context_length: int | None = _arg(None, "maximum length of prompt plus output in tokens; default: the model's")
    max_total_tokens: int | None = _arg(None, "KV pool size in tokens; default: from the free memory")
    mem_fraction_static: float | None = _arg(
        None,
        "fraction of the free memory for the staging copy of weights and the KV pool; default: 0.9 on CUDA, where all "
        "other memory is measured or counted, else 0.6",
    )
    max_running_requests: int = _arg(256, "maximum requests that decode together")
    chunked_prefill_size: int | None = _arg(
        None, "maximum prompt tokens of one step; -1: no limit; default: 8192 on CUDA, else 2048"
    )
    max_queued_requests: int = _arg(8192, "maximum waiting requests; more are refused with 503")
    max_logprob_entries: int = _arg(
        1 << 22,
        "maximum log-probabilities (top and chosen) and sampling-mask ids of a request. The compact form may hold "
        "8 times as many log-probabilities, columns 16 times as many ids",
    )
    max_request_mb: int = _arg(
        2048,
        "maximum megabytes of one request, in the main process and in the scheduler each. All tokens, "
        "log-probabilities, masks and routes of its samples count, together with the data of its prompts. The same "
        "limit holds hidden states of all requests together",
    )
    disable_radix_cache: bool = _arg(False, "disable prefix reuse")
    disable_overlap_schedule: bool | None = _arg(
        None,
        "finish each step before the next is launched; default: on a CPU. Use --enable-overlap-schedule to overlap "
        "steps on a CPU, too",
    )
    disable_custom_all_reduce: bool = _arg(
        False, "sum small tensors of several GPUs by NCCL, not in memory of one another's devices"
    )
    max_state_rows: int | None = _arg(
        None,
        "rows of the state pool of a model with gated delta layers. Each running request and each prefix snapshot "
        "takes one (default: twice --max-running-requests)",
    )
    state_snapshot_interval: int = _arg(64, "tokens between snapshots of a recurrent state for prefix hits")
    session_pin_fraction: float = _arg(
        0.0, "fraction of the KV pool that sessions may keep from eviction between their requests; 0: none"
    )
    session_pin_timeout: float = _arg(60.0, "seconds that a session's prefix is kept after its last request")
    session_record_mb: int = _arg(
        256, "megabytes of the HTTP process for the turns of sessions' chats, see GET /sessions/ID/record; 0: none"
    )
    max_kv_version_lag: int = _arg(
        -1, "maximum commits between a request's KV and the weights; older KV is computed again; -1: no limit"
    )

    kv_events_config: str | None = _arg(
        None, "JSON: publish changes of the prefix cache over ZMQ for routers, in the format of SGLang and vLLM"
    )

    speculative_algorithm: str | None = _arg(
        None,
        "NGRAM: look up tokens that followed the same text before; STANDALONE: let a small model propose them; NEXTN "
        "(or EAGLE): let the checkpoint's own layer propose them; a step verifies several; answers are the same",
    )
    speculative_draft_model_path: str | None = _arg(
        None, "Hugging Face checkpoint folder of the small model of STANDALONE, with the same vocabulary"
    )
    speculative_num_steps: int = _arg(3, "maximum tokens that a model or a layer drafts for a request in one step")
    speculative_num_draft_tokens: int = _arg(8, "maximum drafted tokens of a request in one step")
    speculative_ngram_capacity: int = _arg(
        0, "tokens of ended requests that are kept, so that a later sample of the same prompt drafts from them"
    )

    enable_lora: bool = _arg(False, "serve LoRA adapters of the model")
    lora_paths: str | None = _arg(
        None, "adapters to load at start: NAME=FOLDER of PEFT, several with commas or spaces between them"
    )
    max_loras_per_batch: int = _arg(8, "adapter slots: the most versions of adapters in memory, and in one step")
    max_lora_rank: int | None = _arg(
        None, "greatest rank of an adapter, up to 256; default: the greatest in --lora-paths, or 16"
    )
    lora_target_modules: str | None = _arg(
        None,
        "modules with memory for adapters: ends of their names with spaces or commas between them, or all "
        "(default: all but routed experts; these too if an adapter of --lora-paths adapts them)",
    )

    enable_return_routed_experts: bool = _arg(False, "record each token's experts so that requests may ask for them")
    return_routed_experts_by_default: bool = _arg(
        False, "return routed experts to every request, even if a proxy removed the field; implies recording"
    )
    vllm_routed_experts: Literal["npy", "dict", "packed"] = _arg(
        "npy", "form of routed experts in /inference/v1/generate: vLLM's npy, prime-rl's dict or SkyRL's packed"
    )

    return_sampling_mask: bool = _arg(
        False, "return the ids that top-k, top-p and min-p kept at each token, to requests that use one of them"
    )
    sampling_mask_max_tokens: int = _arg(
        4096, "maximum ids in a token's sampling mask; a request that exceeds it ends with 400"
    )

    incremental_streaming_output: bool = _arg(
        False, "send each token of a stream of /generate once; default: each event has all tokens so far"
    )

    init_expert_location: str = _arg(
        "trivial", "initial expert slots: trivial, or JSON text or a file with a map or with counts"
    )
    ep_num_redundant_experts: int = _arg(0, "additional expert slots of each MoE layer, beyond one for each expert")
    expert_distribution_recorder_mode: Literal["stat", "per_pass", "per_token"] | None = _arg(
        None, "default mode of /start_expert_distribution_record; default: stat"
    )

    enable_eplb: bool = _arg(False, "count the load of experts, and move them between ranks if that makes steps faster")
    eplb_algorithm: str = _arg("auto", "planner of expert placements", choices=tuple(PLANNERS))
    eplb_rebalance_num_iterations: int = _arg(1000, "steps between two checks of the balance of ranks")
    eplb_min_rebalancing_utilization_threshold: float = _arg(
        1.0, "move no experts if the mean over the largest load of a rank is at least this, 0 to 1"
    )
    eplb_rebalance_layers_per_chunk: int | None = _arg(
        None, "maximum MoE layers whose experts move between two steps; default: as many as a tenth of a second allows"
    )

    weight_update_timeout: float = _arg(300.0, "maximum seconds for a rendezvous or to receive one bucket")
    max_weight_call_bytes: int | None = _arg(
        None, "maximum bytes of tensors in one call of a weight update; default: twice the model's"
    )
    weight_folders: str | None = _arg(
        None,
        "colon-separated folders that calls may name: model_path, source_dir and local_checkpoint_dir of weight "
        "calls, folders of profiles, files of dumps. Default: any; without a key the server writes only to "
        "temporary folders and next to the model",
    )
    max_payload_bytes: int = _arg(48 << 20, "maximum payload of /update_weights_from_tensor, before base64")
    weight_staging: Literal["host", "device", "journal", "in_place"] = _arg(
        "host", "place of new weights until the commit: a copy in host or device memory, or the model itself"
    )
    weight_journal_dir: str | None = _arg(
        None, "folder for the old weights of --weight-staging journal; default: $TMPDIR"
    )
    keep_staging_memory: bool = _arg(
        True, "keep the memory of a weight update for the next one, instead of releasing it to the system"
    )
    quantize_weight_updates: bool = _arg(
        False,
        "quantise unquantised weight updates for an FP8 checkpoint, in the checkpoint's own format",
    )
    cast_weight_updates: bool = _arg(
        False,
        "cast floating-point tensors of weight updates to the model's dtypes, as at the start. Otherwise a cast "
        "that loses precision needs a call with cast: true",
    )
    pause_timeout: float | None = _arg(
        None, "seconds after which a pause ends by itself and its weight update is dropped; default: never"
    )
    drain_timeout: float = _arg(10.0, "seconds for running requests and weight verbs to finish after SIGTERM")
    strict_requests: bool = _arg(
        False, "refuse requests with unknown fields; default: answers list them in ignored_fields"
    )
    enable_metrics: bool = _arg(True, "serve /metrics and /dashboard")
    log_level: Literal["debug", "info", "warning", "error"] = _arg("info", "verbosity")

    enable_memory_saver: bool = _arg(False, "allow /release_memory_occupation and /resume_memory_occupation")
    enable_weights_cpu_backup: bool = _arg(
        False, "keep released weights in a temporary file ($TMPDIR) and restore them on resume"
    )

    tp_size: int = _arg(1, "ranks of one engine, 1 to 64; they share attention heads and experts")
    enable_dp_attention: bool = _arg(
        False, "split attention into --dp-size groups of ranks, each with its own requests"
    )
    dp_size: int = _arg(1, "data-parallel ranks: attention groups of one engine, or independent engines")
    ep_size: int = _arg(1, "ranks that share whole experts; the rest of --tp-size splits each expert")
    moe_a2a_backend: Literal["none", "all_to_all", "deepep"] = _arg(
        "none", "transport of tokens to experts on other ranks; none: every rank sees all tokens"
    )
    deepep_mode: Literal["auto", "normal", "low_latency"] = _arg(
        "auto", "mode of deepep: normal for many tokens, low_latency for small steps; auto: by the size of each step"
    )
    nnodes: int = _arg(1, "machines of one engine; start the server on each of them")
    node_rank: int = _arg(0, "index of this machine; 0 serves HTTP")
    dist_init_addr: str | None = _arg(None, "HOST:PORT on machine 0 for the rendezvous of several machines")
    # A setting that this version does not have; echoed to external-engine clients as its off value.
    pp_size: int = _arg(1, "pipeline ranks; this version supports 1")

    @property
    def captures_routes(self) -> bool:
        return self.enable_return_routed_experts or self.return_routed_experts_by_default

    @property
    def step_prompt_tokens(self) -> int:
        """The maximum prompt tokens of one step, or -1 for no limit; a device `auto` counts as a CPU."""
        if self.chunked_prefill_size is not None:
            return self.chunked_prefill_size
        return 8192 if self.device.startswith("cuda") else 2048

    @property
    def memory_fraction(self) -> float:
        """The fraction of the free memory that the engine takes; a device `auto` counts as a CPU."""
        if self.mem_fraction_static is not None:
            return self.mem_fraction_static
        return 0.9 if self.device.startswith("cuda") else 0.6

    @property
    def drafts_by_mtp(self) -> bool:
        """True where the layer that predicts several tokens at once drafts: SGLang has two names for it."""
        return self.speculative_algorithm in ("NEXTN", "EAGLE")

    @property
    def overlaps(self) -> bool:
        """True where a step is launched before the one before it is finished; a device `auto` counts as a CPU."""
        disabled = self.disable_overlap_schedule
        return not (self.device.startswith(("cpu", "auto")) if disabled is None else disabled)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Raises `StartupError`."""
        return parse_kv_events(self.kv_events_config, self.dp_size, self.allow_unauthenticated)

    @property
    def model_overrides(self) -> dict[str, Any]:
        """The settings that stand in the place of those in `config.json`.  Raises `StartupError`."""
        try:
            overrides: dict[str, Any] = json.loads(self.json_model_override_args or "{}")
        except ValueError as error:
            raise StartupError(f"--json-model-override-args is not JSON: {error}") from None
        if not isinstance(overrides, dict):
            given = str(self.json_model_override_args)[:60]
            raise StartupError(f"--json-model-override-args must be a JSON object, got {given!r}")
        return overrides

    @property
    def is_local(self) -> bool:
        """True where only programs on this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def name(self) -> str:
        return self.served_model_name or model_name(self.model_path)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in /v1/models: `name`, and the path where no other name was given, as SGLang and vLLM have it."""
        return (self.name,) if self.served_model_name else tuple(dict.fromkeys((self.name, self.model_path)))

    @property
    def adapter_folders(self) -> dict[str, str]:
        """The folder of each adapter by name, in order.  Raises `StartupError`."""
        folders: dict[str, str] = {}
        for entry in [] if self.lora_paths is None else self.lora_paths.split(","):
            name, equals, folder = entry.strip().partition("=")
            if not (name and equals and folder):
                raise StartupError(f"--lora-paths takes NAME=FOLDER, got {entry[:200]!r}")
            if name in folders or name in self.names:
                raise StartupError(f"--lora-paths: {name!r} is the name of another adapter, or of the model")
            folders[name] = folder
        return folders

    @property
    def lora_targets(self) -> tuple[str, ...] | None:
        """The ends of the names of modules with memory for adapters; None: the default.  ("all",): all of them."""
        names = self.lora_target_modules
        return None if names is None else tuple(filter(None, (name.strip() for name in names.split(","))))

    def public_dict(self) -> dict[str, Any]:
        """Return all fields but the keys, for /server_info."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("secret")}
