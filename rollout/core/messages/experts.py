"""The control verbs that concern experts: the load recorder and the placement."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rollout.core.messages.message import GET_AND_POST, ControlReqInput, Endpoint, Int64, Limits, Name, Reply

RecorderModeName = Literal["stat", "per_pass", "per_token"]
_TIMEOUT_S = 60.0


class ExpertLoadWindow(msgspec.Struct, kw_only=True):
    """The expert load of the last `window` passes; balancedness by MoE layer."""

    window: int
    num_passes: int
    rank_balancedness: list[float | None]
    slot_balancedness: list[float | None]
    rank_loads: list[Any]


class ExpertLoadState(msgspec.Struct, kw_only=True):
    """State of the load recorder.  `drift`: of the last refresh, with numbers by MoE layer."""

    mode: RecorderModeName
    recording: bool
    num_passes: int
    num_tokens: int
    moe_layer_ids: list[int]
    windows: list[ExpertLoadWindow]
    drift: dict[str, Any] | None


class EplbState(msgspec.Struct, kw_only=True):
    """State of the balancer.  `stuck`: why it makes no progress; null if it does.

    `decision`, `outcome`: facts of the last plan and of its moves.  `rebalances`: both of the last that moved experts,
    oldest first, with their `number` and `age_s`, the seconds since they ended.  `drift`: of the counted loads over a
    refresh.
    """

    stage: str
    stuck: str | None
    num_evaluations: int
    last_evaluation_age_s: float
    stage_age_s: float
    chunks_left: int
    decision: dict[str, Any] | None
    outcome: dict[str, Any] | None
    rebalances: list[dict[str, Any]]
    choices_per_expert: float
    drift: dict[str, Any] | None
    counts_loads: bool


class StartExpertDistributionReply(Reply, kw_only=True):
    mode: RecorderModeName
    num_passes_dropped: int | UnsetType = UNSET


class StartExpertDistributionReqInput(ControlReqInput[StartExpertDistributionReply]):
    """Count the experts that tokens choose, from the next step on.  `mode` null: the server's."""

    endpoint = Endpoint(
        path="/start_expert_distribution_record", methods=GET_AND_POST, tag="experts", timeout_s=_TIMEOUT_S
    )

    mode: RecorderModeName | None = None


class StopExpertDistributionReply(Reply, kw_only=True):
    mode: RecorderModeName
    num_passes: int


class StopExpertDistributionReqInput(ControlReqInput[StopExpertDistributionReply]):
    """Count no further; what was recorded stays until it is dumped."""

    endpoint = Endpoint(
        path="/stop_expert_distribution_record", methods=GET_AND_POST, tag="experts", timeout_s=_TIMEOUT_S
    )


class DumpExpertDistributionReply(Reply, kw_only=True):
    """`dump`: of `eplb.load_dump.LoadDump.to_message`."""

    dump: dict[str, Any]


class DumpExpertDistributionReqInput(ControlReqInput[DumpExpertDistributionReply]):
    """Return the recorded expert load in the reply, or write it to a new file on the server's machine.

    More than `max_numbers` are refused.  `path` must not exist.
    """

    endpoint = Endpoint(
        path="/dump_expert_distribution_record",
        methods=GET_AND_POST,
        tag="experts",
        timeout_s=_TIMEOUT_S,
        hidden=frozenset({"max_numbers"}),
        accepts={"format": (Literal["json", "safetensors"] | None, None), "path": (Name | None, None)},
    )

    reset: bool = True
    max_numbers: int | None = None


class ExpertLoadsReply(Reply, kw_only=True):
    """The tokens that each logical expert of each MoE layer got in the last `num_passes` forward passes, [L, E]."""

    num_passes: int
    expert_loads: list[list[int]]


class GetExpertLoadsReqInput(ControlReqInput[ExpertLoadsReply]):
    """Return the recorded load of each expert in the last `window` passes."""

    endpoint = Endpoint(timeout_s=10.0)

    window: int


class ExpertLocationReply(Reply, kw_only=True):
    placement_epoch: int
    weight_version: str
    weight_epoch: int
    ep_size: int
    num_logical_experts: int
    num_physical_experts: int
    moe_layer_ids: list[int]
    physical_to_logical_map: list[list[int]]
    logical_to_physical_map: list[list[int]]  # first slot of each expert


class GetExpertLocationReqInput(ControlReqInput[ExpertLocationReply]):
    """The expert map in force: which logical expert every slot holds, and since which epoch."""

    endpoint = Endpoint(
        path="/expert_location", methods=("GET",), query=("GET",), tag="experts", timeout_s=_TIMEOUT_S, shape="bare"
    )


class EplbRebalanceReply(Reply, kw_only=True):
    """`decision`, `outcome`: facts of the plan and of the moves.  The map and its split come with a dry run."""

    rebalanced: bool
    dry_run: bool
    decision: dict[str, Any]
    placement_epoch: int
    outcome: dict[str, Any] | UnsetType = UNSET
    physical_to_logical_map: list[list[int]] | UnsetType = UNSET
    split: list[list[float]] | UnsetType = UNSET


class EplbRebalanceReqInput(ControlReqInput[EplbRebalanceReply]):
    """Move experts to where their load is even, or say what would be moved; the reason is in the reply.

    By the loads so far, or to the given placement, unless it is a `dry_run`.  Null: as the server was started.
    `physical_to_logical_map` [L, P], `split` [L, P] (how an expert's tokens are divided over its slots): as
    `lockstep eplb-plan --output` writes them.
    """

    endpoint = Endpoint(path="/eplb_rebalance", tag="experts", timeout_s=300.0)

    dry_run: bool = False
    algorithm: str | None = None
    layers_per_chunk: Annotated[int, Limits(ge=1, lt=2**63)] | None = None
    max_stall_s: Annotated[float, Limits(gt=0, allow_inf_nan=False)] | None = None
    physical_to_logical_map: list[list[Int64]] | None = None
    split: list[list[float]] | None = None


VERBS: tuple[type[ControlReqInput[Any]], ...] = (
    StartExpertDistributionReqInput,
    StopExpertDistributionReqInput,
    DumpExpertDistributionReqInput,
    GetExpertLoadsReqInput,
    GetExpertLocationReqInput,
    EplbRebalanceReqInput,
)
