"""The balancer's parts from the server's settings: what counts, what decides, what moves.

Knows their constructors, as `build` knows those of everything else.
"""

from __future__ import annotations

from collections.abc import Callable

from eplb.algorithms.types import ExpertLayout
from eplb.decision import RebalancePolicy
from eplb.load_counter import LoadCounter
from eplb.load_history import LoadHistory
from eplb.manager import RebalanceManager
from eplb.transfer import ExpertTransfer
from rollout.core.server_args import ServerArgs
from rollout.distributed.parallel import Parallel
from rollout.model_executor.expert_slots import ModelExpertSlots, bytes_fingerprint
from rollout.model_executor.model_runner import ModelRunner
from rollout.models.decoder import DecoderForCausalLM
from rollout.scheduler.eplb_control import EplbControl, NoExpertsToMove
from rollout.scheduler.eplb_loads import EplbLoads
from rollout.scheduler.scheduler import Scheduler


def rebalance_policy(args: ServerArgs) -> RebalancePolicy:
    return RebalancePolicy(
        every_steps=args.eplb_rebalance_num_iterations,
        threshold=args.eplb_min_rebalancing_utilization_threshold,
        algorithm=args.eplb_algorithm,
        layers_per_chunk=args.eplb_rebalance_layers_per_chunk,
    )


def start_counting(args: ServerArgs, runner: ModelRunner, parallel: Parallel) -> EplbLoads | None:
    """Loads from the first step on; None without `--enable-eplb`."""
    if not args.enable_eplb:
        return None
    config = runner.state.model.config
    sizes = len(config.moe_layer_ids), config.num_experts
    runner.load_counter = LoadCounter(*sizes)
    return EplbLoads(runner.load_counter, LoadHistory(*sizes), parallel.attn_dp)


def build_eplb(
    args: ServerArgs,
    scheduler: Scheduler,
    model: DecoderForCausalLM,
    layout: ExpertLayout | None,
    loads: EplbLoads | None,
    weight_update: Callable[[], str | None],
    wake: Callable[[], None],
) -> EplbControl | NoExpertsToMove:
    """`layout` None: there is nothing to place; `weight_update` and `wake` as `EplbControl` says."""
    config, parallel = model.config, scheduler.parallel
    if layout is None:
        what = "all experts are on one rank (--ep-size 1)" if config.is_moe else f"{config.architecture} has no experts"
        return NoExpertsToMove(scheduler, f"{what}: there is nothing to rebalance")
    history = LoadHistory(len(config.moe_layer_ids), config.num_experts) if loads is None else loads.history
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
    return EplbControl(scheduler, manager, transfer, loads, weight_update, wake)
