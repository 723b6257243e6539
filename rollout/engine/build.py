"""Builds a scheduler with everything it owns from the server's settings.

Only this module knows all the parts; they do not know each other's constructors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer

from capture.slot_store import RouteSlotStore
from rollout.attention.registry import create_attention_backend
from rollout.control.eplb_parts import expert_layout, initial_placement
from rollout.core.args.server_args import ServerArgs
from rollout.core.console import say
from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import MemoryTag, SchedulerReady
from rollout.core.specs.layer_specs import WindowKV
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.layout import layout_of
from rollout.distributed.parallel import Parallel
from rollout.engine.adapters import load_adapters, telling_of
from rollout.engine.build_control import build_control
from rollout.engine.build_drafts import (
    DraftParts,
    LoadedDraft,
    build_drafting,
    draft_tensors,
    draft_token_bytes,
    load_draft,
    max_logits_rows,
)
from rollout.engine.build_graphs import bytes_to_reserve, capture_all
from rollout.engine.deterministic import attention_name, batch_invariance, check_deterministic
from rollout.engine.device import claim_device, with_device
from rollout.engine.load_kernels import load_kernels_of
from rollout.engine.partial_results import PartialBytes, partial_bytes_of
from rollout.engine.warm_up import StepSize, activation_bytes
from rollout.executor.model_runner import ModelRunner
from rollout.executor.recorded_forward import RecordedForward
from rollout.families.registry import served_model_config
from rollout.kernels.ops import plain_torch_reason, select_ops
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.memory.allocator import keep_freed_memory
from rollout.memory.available import Kept, available_memory_bytes, kv_pool_tokens
from rollout.memory.cache_manager import CacheManager, SequenceMemory
from rollout.memory.device_pages import select_pages
from rollout.memory.kv_events import KVEvents
from rollout.memory.kv_pool import KVPool, kv_bytes_per_token, slot_table_bytes, stored_dtype
from rollout.memory.state_pool import SnapshotRows, StatePool, num_state_rows, state_bytes_per_row
from rollout.memory.state_rows import StateRows
from rollout.memory.window_pages import WindowPages, WindowSizes, check_window_bytes, window_sizes
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.kv_scales import KVScales, read_kv_scales
from rollout.model.load import load_model
from rollout.model.model_state import ModelState
from rollout.model.weight_loading import WeightIndex
from rollout.sampling.base import Sampler
from rollout.sampling.native_sampler import select_sampler
from rollout.sampling.row_lists import RowLists
from rollout.scheduler.channel import Channel, RawChannel, SharedChannel
from rollout.scheduler.decode_batch import DecodeBatch
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.policy import MAX_PREFILL_TOKENS, Policy, RequestQueues
from rollout.scheduler.records import RecordReader
from rollout.scheduler.scheduler import Scheduler
from rollout.scheduler.step import StepRunner
from rollout.scheduler.stop import StopChecker
from rollout.text.tokenizer_files import has_tokenizer, read_tokenizer


@dataclass(frozen=True)
class Limits:
    """The limits that the settings give on this machine."""

    context_length: int
    num_slots: int
    num_state_rows: int  # 0: the model has no recurrent layers
    window: WindowSizes | None  # None: window layers use the main KV pool


def build_scheduler(
    args: ServerArgs,
    channel: RawChannel,
    progress: Callable[[int, int], None] | None = None,
    parallel: Parallel | None = None,
) -> tuple[Scheduler, SchedulerReady]:
    """Load the model and wire the parts of one rank, by default the only one.

    Raises `StartupError` with one line that names the fault and a remedy.
    """
    args, parallel = with_device(args), parallel or Parallel()
    if parallel.layout != layout_of(args):
        raise StartupError("several ranks are several processes: `lockstep serve` starts them")
    device = claim_device(args, parallel.position.world_rank)
    _set_threads(args, parallel)
    config = served_model_config(args)
    if args.captures_routes and not config.is_moe:
        raise StartupError(f"{config.architecture} has no routers: start without --enable-return-routed-experts")
    if (held := args.cpu_weight_format) != "plain" and not config.is_moe:
        raise StartupError(f"--cpu-weight-format {held} is for experts, and {config.architecture} has none")
    if args.quantize_weight_updates and config.stored_format != "fp8":
        raise StartupError(
            "--quantize-weight-updates quantises as an FP8 checkpoint is; this config.json has no quantization_config"
        )
    dtype = getattr(torch, config.torch_dtype if args.dtype == "auto" else args.dtype)
    is_fp8 = args.kv_cache_dtype == "fp8_e4m3"
    kv_scales = read_kv_scales(args.model_path, args.quantization_param_path, is_fp8, config, parallel)
    placement = initial_placement(args, config, device, parallel)
    kernels = load_kernels_of(args, device)
    formats = args.cpu_weight_format, args.cpu_linear_format, args.quantization
    deterministic = args.enable_deterministic_inference
    ops = select_ops(dtype, device, kernels.available, *formats, deterministic=deterministic)
    plain_reason = plain_torch_reason(ops, kernels.reason, dtype)
    if plain_reason and kernels.available:  # else `load_kernels_of` has warned
        say(f"running on plain torch, several times slower: {plain_reason}", "WARNING")
    pages = select_pages(device) if args.enable_memory_saver else None

    def memory_of(tag: MemoryTag) -> AbstractContextManager[object]:
        return nullcontext() if pages is None else pages.pool(tag)

    backend = _moe_backend(args, config)
    model = load_model(
        args.model_path, config, dtype, device, placement, ops, progress, parallel, backend, memory_of("weights")
    )
    draft = load_draft(args, model, device, ops, backend, partial(memory_of, "weights"))
    model_bytes = _bytes_of(model.weights) + (0 if draft is None else _bytes_of(draft.weights))
    of_draft = None if draft is None else draft.state(args.weight_version)
    state = ModelState(model, placement, args.weight_version, load_adapters(args, model), of_draft)
    sampler = select_sampler(dtype, device, kernels.available, args.sampling_mask_max_tokens, deterministic)
    kv_dtype = stored_dtype(args.kv_cache_dtype, dtype, model.kv_layers)
    of_attention: dict[str, Any] = {"attention": attention_name(args, device), "kv_dtype": kv_dtype, "draft": draft}
    of_attention["kernels_available"] = kernels.available
    step: dict[str, Any] = {"device": device, "parallel": parallel, "wants_routes": args.captures_routes}
    largest = partial(activation_bytes, state, sampler, **step, **of_attention)
    partials = partial_bytes_of(model, device, **of_attention)
    limits = _limits(args, config, model, kv_dtype, model_bytes, parallel, device, largest, partials, draft)
    window_slots = None if limits.window is None else limits.window.num_slots
    with memory_of("kv_cache"):
        kv_pool = KVPool(limits.num_slots, model.kv_layers, dtype, device, window_slots, kv_dtype, kv_scales.layers)
        rows = limits.num_state_rows
        state_pool = StatePool(rows, model.state_layers, dtype, device) if rows else None
    sizes = len(config.moe_layer_ids), config.num_experts_per_tok, config.num_experts
    route_store = RouteSlotStore(limits.num_slots, *sizes) if args.captures_routes else None
    attention = create_attention_backend(attention_name(args, device), kv_pool, kernels.available, parallel.tp)
    is_alone = parallel.layout.world_size == 1
    recorded = RecordedForward(model) if ops.batch_invariant and is_alone and device.type == "cpu" else None
    runner = ModelRunner(state, kv_pool, attention, route_store, recorded, state_pool)
    inbox: Channel = channel if is_alone else SharedChannel(channel, parallel, lambda: state.epoch.mark)
    parts = DraftParts(
        limits.num_slots, attention_name(args, device), kernels.available, sampler, partial(memory_of, "kv_cache")
    )
    drafting = build_drafting(args, config, draft, parts)
    scheduler = _wire(args, config, limits, inbox, runner, sampler, parallel, ops.rest, drafting)
    layout = expert_layout(config, placement, args.nnodes)
    static_state = _static_state(args, limits, model_bytes, kv_pool, kv_scales)
    static_state |= {"max_lora_rank": state.adapters.max_rank, "prompt_attention": attention.prompts}
    static_state |= {"cpu_isa": kernels.isa, "plain_torch_reason": plain_reason} | batch_invariance(
        {
            "layers": ops.batch_invariant,
            "attention": attention.batch_invariant,
            "sampling": sampler.batch_invariant,
        },
        kernels.reason,
        kv_pool,
        model.dispatcher.order_of_sums(layout is not None and layout.num_redundant_experts > 0),
    )
    check_deterministic(args, static_state, model.parallel.tp)
    state.adapters.connect(scheduler.queues.adapters, telling_of(state.adapters, inbox.send))
    build_control(
        args, scheduler, model, layout, channel.wake, static_state, device, pages, draft_tensors(draft, drafting)
    )
    capture_all(args, runner, scheduler.cache, sampler, ops, drafting)
    keep_freed_memory()
    return scheduler, SchedulerReady(
        max_total_num_tokens=limits.num_slots,
        max_running_requests=args.max_running_requests,
        context_length=limits.context_length,
        capture_routed_experts=route_store is not None,
        num_threads=torch.get_num_threads(),
        num_parameters=sum(meta.numel for meta in model.weights.metas().values()),
        model_bytes=model_bytes,
        weight_version=args.weight_version,
        adapters=state.adapters.cards,
    )


def _set_threads(args: ServerArgs, parallel: Parallel) -> None:
    """Set this rank's number of threads.  By default the ranks of a machine divide its cores evenly."""
    ranks_here = parallel.layout.world_size // args.nnodes
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    elif ranks_here > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))


def _moe_backend(args: ServerArgs, config: ModelConfig) -> MoeBackend:
    """Return the MoE backend, sized for a step of one chunk of prompts and a token of every running request."""
    tokens = _max_prompt_tokens(args, config.max_position_embeddings) + args.max_running_requests
    return MoeBackend(args.moe_a2a_backend, tokens, args.deepep_mode)


def _max_prompt_tokens(args: ServerArgs, context_length: int) -> int:
    """Return the most prompt tokens of one step."""
    return args.step_prompt_tokens if args.step_prompt_tokens > 0 else max(context_length, MAX_PREFILL_TOKENS)


def _bytes_of(weights: WeightIndex) -> int:
    """Return the bytes of this rank's share of the weights, with every copy of an expert."""
    return sum(place.num_bytes for name in weights.metas() for place in weights.places(name))


def _wire(
    args: ServerArgs,
    config: ModelConfig,
    limits: Limits,
    channel: Channel,
    runner: ModelRunner,
    sampler: Sampler,
    parallel: Parallel,
    rest: Callable[[], None],
    drafting: Drafting | None,
) -> Scheduler:
    events = _kv_events(args, runner.state, parallel)
    cache = CacheManager(
        num_slots=limits.num_slots,
        max_requests=args.max_running_requests,
        max_context=limits.context_length,
        device=runner.kv_pool.k[0].device,
        disable_radix_cache=args.disable_radix_cache,
        events=events,
        max_pinned_tokens=int(limits.num_slots * args.session_pin_fraction),
        pin_timeout=args.session_pin_timeout,
        clock=lambda: channel.now,
        states=_sequence_memory(args, limits, runner),
    )
    if drafting is not None:
        cache.on_flush = drafting.flush
    lists = partial(RowLists.of_engine, args.max_running_requests, limits.context_length)
    queues = RequestQueues(DecodeBatch())
    stop = StopChecker(config.eos_token_ids, _tokenizer(args), args.sampling_mask_max_tokens)
    return Scheduler(
        channel=channel,
        runner=runner,
        cache=cache,
        queues=queues,
        policy=Policy(
            queues,
            cache,
            chunked_prefill_size=args.step_prompt_tokens,
            max_running_requests=args.max_running_requests,
        ),
        steps=StepRunner(runner, sampler, cache, stop, config.vocab_size, lists, drafting),
        records=RecordReader(cache, runner.kv_pool, runner.state, runner.route_store),
        stop=stop,
        max_queued_requests=args.max_queued_requests,
        random_seed=args.random_seed,
        overlaps=args.overlaps,
        parallel=parallel,
        rest=rest,
        kv_events=events,
    )


def _kv_events(args: ServerArgs, state: ModelState, parallel: Parallel) -> KVEvents | None:
    """Return the publisher of prefix cache events.  Of ranks that share requests, only the first publishes."""
    if args.kv_events is None or not parallel.position.is_dp_leader:
        return None
    return KVEvents(
        args.kv_events,
        parallel.position.dp_rank,
        lambda: (state.epoch.weight_version, state.epoch.weight_epoch),
    )


def _limits(
    args: ServerArgs,
    config: ModelConfig,
    model: DecoderForCausalLM,
    kv_dtype: torch.dtype,
    model_bytes: int,
    parallel: Parallel,
    device: torch.device,
    largest_step: Callable[[StepSize], int],
    partials: PartialBytes,
    draft: LoadedDraft | None,
) -> Limits:
    """Return the limits, the same on all ranks; the ranks of one machine share its memory.

    `largest_step` runs the largest step, and returns the memory that it takes in addition to weights and KV.  Attention
    takes `partials` more in steps with tokens that decode.  Recurrent states and pages of windows get their memory
    before KV slots do.
    """
    context_length = min(args.context_length or config.max_position_embeddings, config.max_position_embeddings)
    max_tokens = _max_prompt_tokens(args, context_length) + args.max_running_requests
    rows = max_logits_rows(args, max_tokens)
    activations = largest_step(StepSize(max_tokens, rows, context_length))
    activations += partials(range(1, rows + 1), context_length)
    # Free memory is read after the first step: libraries take memory of their own at their first call.
    memory = parallel.world.gather_ints([available_memory_bytes(device), activations])
    available, activations = min(left for left, _ in memory), max(taken for _, taken in memory)
    window = window_sizes(
        model.kv_layers,
        context_length=context_length,
        step_tokens=_max_prompt_tokens(args, context_length),
        max_running_requests=args.max_running_requests,
    )
    table_bytes = 0
    if device.type == "cpu":
        available //= parallel.layout.world_size // args.nnodes
    else:
        table_bytes = slot_table_bytes(args.max_running_requests, context_length, 1 if window is None else 2)
    kept = Kept(
        staging=_staging_bytes(args, model_bytes),
        activations=activations,
        graphs=bytes_to_reserve(
            args,
            model,
            lambda sizes: partials(sizes, context_length),
            0 if draft is None else len(draft.model.kv_layers),
        ),
        tables=table_bytes,
    )
    usable = int(available * args.memory_fraction) - kept.total
    state_bytes = 0
    num_rows, row_bytes = 0, state_bytes_per_row(model.state_layers, model.dtype)
    if row_bytes:
        num_rows = num_state_rows(args.max_state_rows, args.max_running_requests, row_bytes, usable)
        state_bytes += num_rows * row_bytes
    token_bytes = kv_bytes_per_token(model.kv_layers, kv_dtype) + draft_token_bytes(draft)
    if window is not None:
        if row_bytes:
            raise StartupError("a model with both recurrent layers and window layers is not supported")
        window_bytes = kv_bytes_per_token([x for x in model.kv_layers if isinstance(x, WindowKV)], kv_dtype)
        check_window_bytes(window.num_slots * window_bytes, usable)
        state_bytes += window.num_slots * window_bytes
        token_bytes -= window_bytes
    wanted = args.max_total_tokens
    if wanted and device.type == "cpu":  # memory that is not used is not taken
        return Limits(context_length, wanted, num_rows, window)
    num_slots = kv_pool_tokens(
        available,
        token_bytes,
        kept=replace(kept, states=state_bytes),
        weight_bytes=model_bytes,
        mem_fraction=args.memory_fraction,
        context_length=context_length,
        max_running_requests=args.max_running_requests,
        wanted=wanted,
    )
    return Limits(context_length, num_slots, num_rows, window)


def _sequence_memory(args: ServerArgs, limits: Limits, runner: ModelRunner) -> SequenceMemory | None:
    most, keeps_prefixes = args.max_running_requests, not args.disable_radix_cache
    if limits.window is not None:
        return WindowPages(
            limits.window, most, limits.context_length, runner.kv_pool.k[0].device, keeps_prefixes=keeps_prefixes
        )
    if (states := runner.state_pool) is not None:
        rows = SnapshotRows(most, limits.num_state_rows - most)
        return StateRows(rows, args.state_snapshot_interval, states.copy, keeps_prefixes=keeps_prefixes)
    return None


def _staging_bytes(args: ServerArgs, model_bytes: int) -> int:
    """Return the bytes that a refresh needs on the device of the weights, in addition to the KV pool."""
    beside = args.weight_staging == "device" or (args.weight_staging == "host" and args.device == "cpu")
    return model_bytes if beside else 0


def _tokenizer(args: ServerArgs) -> Tokenizer | None:
    """Return the tokenizer that finds stop strings.  Without one (None) the server refuses them."""
    folder = args.tokenizer_path or args.model_path
    return None if args.skip_tokenizer_init or not has_tokenizer(folder) else read_tokenizer(folder).backend


def _static_state(
    args: ServerArgs, limits: Limits, model_bytes: int, kv_pool: KVPool, kv_scales: KVScales
) -> dict[str, Any]:
    return {
        "max_running_requests": args.max_running_requests,
        "context_length": limits.context_length,
        "dtype": str(kv_pool.dtype).removeprefix("torch."),
        "device": args.device,
        "overlap_schedule": args.overlaps and args.speculative_algorithm is None,
        "model_bytes": model_bytes,
        "kv_scales": kv_scales.facts,
        "kv_bytes": sum(tensor.nbytes for tensor in kv_pool.tensors),
        "num_threads": torch.get_num_threads(),
    }
