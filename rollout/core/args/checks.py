"""The checks of a server's settings, each alone and in combination, before anything is read or started."""

from __future__ import annotations

from eplb.algorithms.registry import PLANNERS
from rollout.core.adapter_names import fault_of_name
from rollout.core.args.addresses import is_address, objection_to_base_url
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError

MAX_LORA_RANK = 256
WEIGHT_FORMATS = ("plain", "w8", "fp8", "int4", "int4-128")
QUANTISATIONS = ("fp8", "int4", "int4-128")


def check_settings(args: ServerArgs) -> None:
    """Raise `StartupError` for the first setting or combination that cannot work."""
    _check_ranks(args)
    _check_requests(args)
    _check_memory(args)
    _check_adapters(args)
    _check_drafts(args)
    _check_placement(args)
    _check_weights(args)
    _check_network(args)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise StartupError(message)


def _check_ranks(args: ServerArgs) -> None:
    """Check machines, devices and ranks."""
    _require(args.pp_size == 1, "--pp-size must be 1 in this version")
    _require(args.nnodes >= 1, "--nnodes must be at least 1")
    _require(0 <= args.node_rank < args.nnodes, f"--node-rank must be in 0..{args.nnodes - 1} (--nnodes)")
    _require(
        args.nnodes == 1 or is_address(args.dist_init_addr),
        "--nnodes needs --dist-init-addr HOST:PORT, the same on every machine",
    )
    _require(args.base_gpu_id >= 0, "--base-gpu-id must not be negative")
    _require(
        not args.base_gpu_id or args.device in ("cuda", "auto"),
        f"--base-gpu-id counts CUDA devices: it needs --device cuda or auto, got --device {args.device}",
    )
    _require(
        args.deepep_mode == "auto" or args.moe_a2a_backend == "deepep",
        f"--deepep-mode {args.deepep_mode} needs --moe-a2a-backend deepep",
    )


def _check_network(args: ServerArgs) -> None:
    """Check addresses and keys."""
    for flag, key in (("--api-key", args.api_key), ("--admin-api-key", args.admin_api_key)):
        _require(key is None or bool(key), f"{flag} is empty: leave it out, or give a key")
        _require(key is None or key == key.strip(), f"{flag} begins or ends with a space")
    _require(1 <= args.port <= 65535, f"--port must be in 1..65535, got {args.port}")
    _require(
        "@" not in (args.register_url or ""),  # which is not repeated here
        "--register-url must not contain a user or password: it appears in logs and in /server_info",
    )
    objection = None if args.register_url is None else objection_to_base_url(args.register_url)
    _require(
        objection is None,
        f"--register-url must be http://HOST:PORT of a router, got {args.register_url!r}: {objection}",
    )
    _require(args.receive_timeout > 0, "--receive-timeout must be positive")
    if not args.is_local and args.api_key is None and not args.allow_unauthenticated:
        raise StartupError(
            f"--host {args.host} is reachable from other machines: give --api-key, "
            "or --allow-unauthenticated if every caller is trusted"
        )


def _check_requests(args: ServerArgs) -> None:
    """Check the model, steps and requests."""
    _require(
        not (args.skip_tokenizer_init and (args.tool_call_parser or args.reasoning_parser)),
        "--tool-call-parser and --reasoning-parser need text, but --skip-tokenizer-init produces none",
    )
    _require(args.latent_norm_eps is None or args.latent_norm_eps > 0, "--latent-norm-eps must be positive")
    _ = args.model_overrides
    _require(args.max_running_requests >= 1, "--max-running-requests must be at least 1")
    _require(
        args.step_prompt_tokens == -1 or args.step_prompt_tokens >= 1,
        "--chunked-prefill-size must be at least 1, or -1 for no limit",
    )
    _require(args.cuda_graph_max_bs is None or args.cuda_graph_max_bs >= 1, "--cuda-graph-max-bs must be positive")
    _require(args.piecewise_cuda_graph_max_tokens >= 0, "--piecewise-cuda-graph-max-tokens must not be negative")
    _require(args.num_threads is None or args.num_threads >= 1, "--num-threads must be at least 1")
    _require(args.pause_timeout is None or args.pause_timeout > 0, "--pause-timeout must be positive")
    _require(args.drain_timeout >= 0, "--drain-timeout must not be negative")
    _require(args.max_queued_requests >= 1, "--max-queued-requests must be at least 1")
    _require(args.max_logprob_entries >= 0, "--max-logprob-entries must not be negative")
    _require(args.max_request_mb >= 1, "--max-request-mb must be at least 1")
    _require(args.sampling_mask_max_tokens >= 1, "--sampling-mask-max-tokens must be at least 1")


def _check_memory(args: ServerArgs) -> None:
    """Check KV and other memory."""
    _require(
        args.quantization_param_path is None or args.kv_cache_dtype == "fp8_e4m3",
        "--quantization-param-path has scales of keys and values in FP8: give --kv-cache-dtype fp8_e4m3",
    )
    _require(args.max_total_tokens is None or args.max_total_tokens >= 2, "--max-total-tokens must be at least 2")
    _require(args.context_length is None or args.context_length >= 2, "--context-length must be at least 2")
    _require(0.0 < args.memory_fraction <= 0.95, "--mem-fraction-static must be in (0, 0.95]")
    _require(args.state_snapshot_interval >= 1, "--state-snapshot-interval must be at least 1")
    _require(0.0 <= args.session_pin_fraction <= 0.9, "--session-pin-fraction must be in 0..0.9")
    _require(
        not (args.session_pin_fraction and args.disable_radix_cache),
        "--session-pin-fraction needs a prefix cache, which --disable-radix-cache turns off",
    )
    _require(args.session_record_mb >= 0, "--session-record-mb must be at least 0")
    _require(args.session_pin_timeout > 0, "--session-pin-timeout must be positive")
    _require(args.max_kv_version_lag >= -1, "--max-kv-version-lag must be -1 (no limit) or at least 0")
    _require(
        args.enable_memory_saver or not args.enable_weights_cpu_backup,
        "--enable-weights-cpu-backup needs --enable-memory-saver",
    )
    _require(
        args.kv_events is None or not args.disable_radix_cache,
        "--kv-events-config publishes the prefix cache, which --disable-radix-cache turns off",
    )


def _check_drafts(args: ServerArgs) -> None:
    """Check the settings of drafts."""
    _require(
        args.speculative_algorithm in (None, "NGRAM", "STANDALONE") or args.drafts_by_mtp,
        f"--speculative-algorithm must be NGRAM, STANDALONE or NEXTN, got {args.speculative_algorithm!r}",
    )
    is_standalone = args.speculative_algorithm == "STANDALONE"
    _require(
        is_standalone == (args.speculative_draft_model_path is not None),
        "--speculative-algorithm STANDALONE and --speculative-draft-model-path need each other",
    )
    deepest = 8 if args.drafts_by_mtp else 64
    _require(
        1 <= args.speculative_num_steps <= deepest,
        f"--speculative-num-steps must be from 1 to {deepest}, got {args.speculative_num_steps}",
    )
    most = args.speculative_num_draft_tokens
    _require(1 <= most <= 64, f"--speculative-num-draft-tokens must be from 1 to 64, got {most}")
    _require(args.speculative_ngram_capacity >= 0, "--speculative-ngram-capacity must be at least 0")


def _check_adapters(args: ServerArgs) -> None:
    """Check the adapters."""
    _require(args.lora_paths is None or args.enable_lora, "--lora-paths needs --enable-lora")
    _require(args.lora_target_modules is None or args.enable_lora, "--lora-target-modules needs --enable-lora")
    if not args.enable_lora:
        return
    _require(
        args.attention_backend != "flashinfer_expanded",
        "--attention-backend flashinfer_expanded does not apply adapters to keys and values: give flashinfer",
    )
    _require(args.max_loras_per_batch > 0, f"--max-loras-per-batch must be at least 1, got {args.max_loras_per_batch}")
    _require(
        args.moe_a2a_backend != "deepep" or args.max_loras_per_batch < 1 << 15,
        f"--moe-a2a-backend deepep takes a --max-loras-per-batch below 32768, got {args.max_loras_per_batch}",
    )
    names = list(args.adapter_folders)
    for fault in map(fault_of_name, names):
        _require(fault is None, f"--lora-paths: {fault}")
    _require(
        len(names) <= args.max_loras_per_batch,
        f"--lora-paths names {len(names)} adapters, but --max-loras-per-batch is {args.max_loras_per_batch}",
    )
    targets = args.lora_targets
    _require(
        targets is None or targets == ("all",) or (bool(targets) and "all" not in targets),
        f"--lora-target-modules takes names of modules, or all alone, got {str(args.lora_target_modules)[:200]!r}",
    )
    rank = args.max_lora_rank
    _require(rank is None or 1 <= rank <= MAX_LORA_RANK, f"--max-lora-rank must be in 1..{MAX_LORA_RANK}, got {rank}")


def _check_placement(args: ServerArgs) -> None:
    """Check the placement of experts."""
    _require(args.ep_num_redundant_experts >= 0, "--ep-num-redundant-experts must not be negative")
    _require(args.eplb_algorithm in PLANNERS, f"--eplb-algorithm must be one of {', '.join(PLANNERS)}")
    _require(args.eplb_rebalance_num_iterations >= 1, "--eplb-rebalance-num-iterations must be at least 1")
    _require(
        0.0 <= args.eplb_min_rebalancing_utilization_threshold <= 1.0,
        "--eplb-min-rebalancing-utilization-threshold must be in 0..1",
    )
    _require(
        args.eplb_rebalance_layers_per_chunk is None or args.eplb_rebalance_layers_per_chunk >= 1,
        "--eplb-rebalance-layers-per-chunk must be at least 1",
    )
    _require(
        not args.enable_eplb or args.ep_size > 1,
        "--enable-eplb balances experts over ranks: give --ep-size of at least 2",
    )


def _check_weights(args: ServerArgs) -> None:
    """Check weights and their updates."""
    _require(args.cpu_weight_format in WEIGHT_FORMATS, f"--cpu-weight-format must be {' or '.join(WEIGHT_FORMATS)}")
    _require(args.cpu_linear_format in WEIGHT_FORMATS, f"--cpu-linear-format must be {' or '.join(WEIGHT_FORMATS)}")
    _require(
        args.quantization in (None, *QUANTISATIONS),
        f"--quantization must be {' or '.join(QUANTISATIONS)}, got {args.quantization}",
    )
    formats = {
        "--cpu-weight-format": args.cpu_weight_format,
        "--cpu-linear-format": args.cpu_linear_format,
        "--quantization": args.quantization,
    }
    for flag, form in formats.items():
        _require(
            not args.quantize_weight_updates or form in (None, "plain", "fp8"),
            f"--quantize-weight-updates and {flag} {form} quantise the same weights: give one",
        )
    _require(args.weight_update_timeout > 0, "--weight-update-timeout must be positive")
    _require(
        args.max_weight_call_bytes is None or args.max_weight_call_bytes > 0,
        "--max-weight-call-bytes must be positive",
    )
    _require(0 < args.max_payload_bytes < 2**32, "--max-payload-bytes must be in 1..4294967295")
    _require(
        args.weight_journal_dir is None or args.weight_staging == "journal",
        "--weight-journal-dir needs --weight-staging journal",
    )
    _require(bool(args.weight_version), "--weight-version must not be empty")
