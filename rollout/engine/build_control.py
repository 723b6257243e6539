"""Wires the control verbs of one rank to its scheduler: weights, memory, experts, sessions, profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from eplb.algorithms.types import ExpertLayout
from rollout.control.adapter_control import AdapterControl
from rollout.control.adapter_target import AdapterTargets
from rollout.control.control import Control
from rollout.control.draft_target import Companions, DraftTarget
from rollout.control.eplb_parts import build_eplb, fresh_plan, rebalance_policy, start_counting
from rollout.control.expert_distribution import ExpertDistribution
from rollout.control.io_thread import give_way
from rollout.control.kv_age import KVAgeLimit
from rollout.control.memory_control import MemoryControl
from rollout.control.placement_adoption import PlacementAdoption
from rollout.control.profiler import StepProfiler
from rollout.control.rank_consensus import RankConsensus
from rollout.control.registered_adapters import RegisteredAdapters
from rollout.control.session_control import SessionControl
from rollout.control.weight_checker import WeightChecker
from rollout.control.weight_commit import WeightCommit
from rollout.control.weight_control import WeightControl
from rollout.control.weight_disk import DiskRefresh
from rollout.control.weight_pace import WeightPace
from rollout.core.args.named_folders import NamedFolders
from rollout.core.args.server_args import ServerArgs
from rollout.engine.build_drafts import DraftTensors
from rollout.layers.linear import plain_linears
from rollout.memory.host_pages import MemoryPages
from rollout.memory.memory_saver import Group, MemorySaver
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.load import quantised_names
from rollout.model.weight_loading import weight_tensors
from rollout.scheduler.scheduler import Scheduler
from weight_sync.errors import TransactionStateError
from weight_sync.held_format import FP8_BLOCKS, HeldFormats
from weight_sync.held_memory import HeldMemory
from weight_sync.ledger import Coverage
from weight_sync.tensor_meta import LogicalWeights
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import Patience


def build_control(
    args: ServerArgs,
    scheduler: Scheduler,
    model: DecoderForCausalLM,
    layout: ExpertLayout | None,
    wake: Callable[[], None],
    static_state: dict[str, Any],
    device: torch.device,
    pages: MemoryPages | None,
    of_draft: DraftTensors,
) -> None:
    """Connect every verb's handler, and the work between steps, in its order.

    `layout` None: experts are not spread.  `wake()` interrupts the scheduler's wait for messages.  `static_state`: the
    fields of `SchedulerState` that do not change.  `pages` None: memory is not released.  `of_draft`: what is released
    with the model's.
    """
    runner, parallel, placement = scheduler.runner, scheduler.parallel, scheduler.runner.state.placement
    consensus = RankConsensus(parallel.weight_io, parallel.world)
    loads = start_counting(args, runner, parallel)
    adoption = PlacementAdoption(
        model.weights,
        placement,
        parallel.layout,
        parallel.position,
        consensus.exchange,
        loads=lambda: loads.current(rebalance_policy(args).choices_per_expert),
        fresh_plan=partial(fresh_plan, layout, placement),
        is_possible=layout is not None
        and args.weight_staging in ("host", "device")
        and not runner.state.adapters.places.adapts_experts,
        by_default=args.enable_eplb,
    )
    saver = None if pages is None else _memory_saver(scheduler, model, of_draft, pages)
    held = HeldMemory(keep=args.keep_staging_memory)
    patience = Patience()
    pace = WeightPace(scheduler, give_way, patience) if device.type == "cpu" else None
    updater = WeightUpdater(
        model.weights,
        device=device,
        timeout_s=args.weight_update_timeout,
        vote=consensus.vote,
        commit_vote=consensus.commit_vote,
        exchange=consensus.exchange,
        target=partial(_target, adoption, saver),
        staging=args.weight_staging,
        journal_dir=args.weight_journal_dir,
        memory=held,
        rank=parallel.position.tp_rank,
        ranks=parallel.layout.tp_size,
        pace=pace,
        patience=patience,
        clock=lambda: scheduler.now,
        max_call_bytes=args.max_weight_call_bytes,
        quantised=_held_formats(args, model),
        cast=args.cast_weight_updates,
    )
    state = runner.state
    draft = None if state.draft is None else DraftTarget(state.draft, model.weights, partial(_require_memory, saver))
    targets = AdapterTargets(state.adapters)
    registered = RegisteredAdapters(state.adapters, targets, updater)
    companions = Companions(state, targets, registered, draft)
    commit = WeightCommit(scheduler, updater, adoption, draft)
    weights = WeightControl(scheduler, updater, wake, consensus, adoption, commit, companions, args.pause_timeout)
    eplb = build_eplb(args, scheduler, model, layout, loads, lambda: weights.under_way, wake)
    checker = WeightChecker(scheduler, updater)
    disk = DiskRefresh(
        scheduler,
        updater,
        adoption,
        commit,
        companions,
        base_path=args.model_path,
        folders=NamedFolders.of(args),
        overrides=args.model_overrides,
        timeout_s=args.weight_update_timeout,
    )
    memory = MemoryControl(scheduler, updater, held, saver, keeps_copy=args.enable_weights_cpu_backup)
    kv_age = KVAgeLimit(scheduler, args.max_kv_version_lag)
    experts = ExpertDistribution(scheduler, args.expert_distribution_recorder_mode or "stat")
    static_state |= {"plain_linears": plain_linears(model)}
    control = Control(scheduler, weights, memory, experts, eplb, draft, static_state)
    profiler = StepProfiler(scheduler, NamedFolders.of(args))
    sessions = SessionControl(scheduler)
    adapters = AdapterControl(runner.state.adapters, NamedFolders.of(args), updater, registered)
    weights.add_jobs(checker.jobs | disk.jobs | memory.jobs | adapters.jobs | registered.jobs)
    commit.followers = (memory.notice_refresh, kv_age.advance, scheduler.cache.pins.retire)
    scheduler.connect(
        weights.verbs | eplb.verbs | experts.verbs | control.verbs | profiler.verbs | sessions.verbs,
        weights.queued_verbs,
        between_steps=[
            weights.advance,
            *eplb.work,
            memory.notice_refresh,
            kv_age.advance,
            control.settle_waits,
            control.drain,
            profiler.advance,
            scheduler.cache.pins.retire,
            sessions.expire,
        ],
    )


def _held_formats(args: ServerArgs, model: DecoderForCausalLM) -> HeldFormats:
    held = model.weights.held_formats()
    if args.quantize_weight_updates:
        return dict.fromkeys(quantised_names(args.model_path, model.weights), FP8_BLOCKS) | dict(held)
    return held


def _target(adoption: PlacementAdoption, saver: MemorySaver | None, coverage: Coverage) -> LogicalWeights:
    """Return the weights in which an update is staged.  Raises `TransactionStateError` if they have no memory."""
    _require_memory(saver)
    return adoption.target(coverage)


def _require_memory(saver: MemorySaver | None) -> None:
    """Raise `TransactionStateError` if the weights have no memory.  A draft's go and come with the model's."""
    if saver is not None and not saver.is_provided("weights"):
        raise TransactionStateError(
            "the memory of the weights is released: POST /resume_memory_occupation with the tag weights first"
        )


def _memory_saver(
    scheduler: Scheduler, model: DecoderForCausalLM, of_draft: DraftTensors, pages: MemoryPages
) -> MemorySaver:
    runner, table = scheduler.runner, scheduler.cache.pool.table
    states = [] if runner.state_pool is None else runner.state_pool.tensors
    tables = [table] if table.is_cpu else []  # on a device small next to KV, and not made in its pool
    tensors: dict[Group, Sequence[torch.Tensor]] = {
        "weights": weight_tensors(model),
        "draft": of_draft.weights,
        "kv_cache": [*runner.kv_pool.tensors, *states, *tables, *of_draft.kv],
    }
    return MemorySaver(tensors, pages)
