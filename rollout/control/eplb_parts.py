"""The balancer's parts from the server's settings: initial placement, load history, policy and transfer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from eplb.algorithms.registry import make_plan
from eplb.algorithms.types import ExpertLayout, Plan
from eplb.decision import RebalancePolicy
from eplb.errors import EplbError
from eplb.expert_location import ExpertLocationMetadata
from eplb.init_location import TRIVIAL, load_location
from eplb.load_history import LoadHistory
from eplb.manager import RebalanceManager
from eplb.placement import ExpertPlacement
from eplb.transfer import ExpertTransfer
from rollout.control.eplb_control import EplbControl, NoExpertsToMove
from rollout.control.expert_distribution import recorded_model
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.executor.model_runner import ModelRunner
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.expert_slots import ModelExpertSlots, bytes_fingerprint
from rollout.scheduler.scheduler import Scheduler


def rebalance_policy(args: ServerArgs) -> RebalancePolicy:
    return RebalancePolicy(
        every_steps=args.eplb_rebalance_num_iterations,
        threshold=args.eplb_min_rebalancing_utilization_threshold,
        algorithm=args.eplb_algorithm,
        layers_per_chunk=args.eplb_rebalance_layers_per_chunk,
    )


def start_counting(args: ServerArgs, runner: ModelRunner, parallel: Parallel) -> LoadHistory:
    """Count loads from the first step on; nothing is counted without `--enable-eplb`."""
    config = runner.state.model.config
    sizes = len(config.moe_layer_ids), config.num_experts
    history = LoadHistory(*sizes, parallel.attn_dp.all_reduce, is_counted=args.enable_eplb)
    if args.enable_eplb:
        runner.route_observers.append(lambda _, epoch, ids_TLK: history.note(ids_TLK, epoch.weight_epoch))
    return history


def build_eplb(
    args: ServerArgs,
    scheduler: Scheduler,
    model: DecoderForCausalLM,
    layout: ExpertLayout | None,
    history: LoadHistory,
    weight_update: Callable[[], str | None],
    wake: Callable[[], None],
) -> EplbControl | NoExpertsToMove:
    """Build the balancer.  `layout` None: there is nothing to place; `weight_update`, `wake`: see `EplbControl`.

    Raises `StartupError` where experts do not divide over the machines as the planner needs.
    """
    config, parallel = model.config, scheduler.parallel
    if layout is None:
        what = "all experts are on one rank (--ep-size 1)" if config.is_moe else f"{config.architecture} has no experts"
        return NoExpertsToMove(f"{what}: there is nothing to rebalance")
    _require_nodes(args, layout)
    slots, position, per_rank = ModelExpertSlots(model), parallel.position, parallel.layout.moe_tp_size
    policy = rebalance_policy(args)
    manager = RebalanceManager(policy, layout, history, sum(slots.part_bytes), lambda: scheduler.now)
    transfer = ExpertTransfer(
        slots,
        parallel.tp,
        ep_rank=position.ep_rank,
        peers=[rank * per_rank + position.moe_tp_rank for rank in range(parallel.layout.ep_size)],
        fingerprint=bytes_fingerprint,
        deadline_s=policy.deadline_s,
    )
    return EplbControl(scheduler, manager, transfer, weight_update, wake)


def initial_placement(
    args: ServerArgs, config: ModelConfig, device: torch.device, parallel: Parallel
) -> ExpertPlacement:
    """Return the expert map at start as this rank sees it, empty for a dense model.  Raises `StartupError`."""
    location = _location(args, config)
    try:
        sizes = parallel.position.ep_rank, parallel.layout.ep_size
        return ExpertPlacement(location, device, *sizes, routes_alone=args.moe_a2a_backend != "none")
    except EplbError as error:
        flags = "--ep-size, --ep-num-redundant-experts and --init-expert-location"
        raise StartupError(f"{flags} do not fit: {error}") from None


def _location(args: ServerArgs, config: ModelConfig) -> ExpertLocationMetadata:
    given = {
        "--init-expert-location": args.init_expert_location != TRIVIAL,
        "--ep-num-redundant-experts": args.ep_num_redundant_experts > 0,
        "--expert-distribution-recorder-mode": args.expert_distribution_recorder_mode is not None,
        "--enable-eplb": args.enable_eplb,
        "--ep-size": args.ep_size > 1,
        "--moe-a2a-backend": args.moe_a2a_backend != "none",
    }
    for flag, is_given in given.items():
        if is_given and not config.is_moe:
            raise StartupError(f"{config.architecture} has no experts: start without {flag}")
    try:
        return load_location(args.init_expert_location, recorded_model(config), args.ep_num_redundant_experts)
    except EplbError as error:
        raise StartupError(f"--init-expert-location: {error}") from None


def expert_layout(config: ModelConfig, placement: ExpertPlacement, num_nodes: int) -> ExpertLayout | None:
    """Return how experts are spread over ranks; None if there is nothing to place.

    Nothing binds the experts of a router without groups to one another, so each is a group of its own.
    """
    if config.moe is None or placement.ep_size == 1:
        return None
    num_nodes = num_nodes if placement.ep_size % num_nodes == 0 else 1  # ranks that share experts share a machine
    num_groups = config.moe.router.num_groups
    return ExpertLayout(
        num_logical_experts=placement.num_logical_experts,
        num_physical_experts=placement.num_physical_experts,
        num_ranks=placement.ep_size,
        num_nodes=num_nodes,
        num_groups=num_groups if num_groups > 1 else placement.num_logical_experts,
    )


def _require_nodes(args: ServerArgs, layout: ExpertLayout) -> None:
    """Raise `StartupError` where the planner of every evaluation could not divide the experts over the machines."""
    if args.eplb_algorithm not in ("deepseek_hierarchical", "balanced_by_node"):
        return
    if layout.num_nodes != args.nnodes:
        raise StartupError(
            f"--eplb-algorithm {args.eplb_algorithm}: --ep-size {layout.num_ranks} does not divide over "
            f"--nnodes {args.nnodes}, so ranks of several machines share experts"
        )
    if layout.num_groups % layout.num_nodes:
        raise StartupError(
            f"--eplb-algorithm {args.eplb_algorithm}: the {layout.num_groups} expert groups do not divide over "
            f"--nnodes {args.nnodes}"
        )
    experts = layout.num_logical_experts // layout.num_nodes
    if layout.slots_per_rank > experts:
        raise StartupError(
            f"--eplb-algorithm {args.eplb_algorithm}: a rank has {layout.slots_per_rank} slots, but a machine has "
            f"{experts} experts: give a smaller --ep-num-redundant-experts"
        )


def fresh_plan(layout: ExpertLayout | None, placement: ExpertPlacement, counts_LE: np.ndarray) -> Plan:
    """Return a new placement for an update that writes all weights anyway."""
    assert layout is not None, "there is nothing to place"
    current_LP = placement.metadata.physical_to_logical_map.numpy()
    return make_plan("auto", counts_LE, layout, current_LP, copies_are_free=True)
