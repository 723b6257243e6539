"""The scheduler's report of its state, for /server_info, /get_load, /v1/loads, /health and /metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.core.messages.experts import EplbState, ExpertLoadState
from rollout.core.messages.message import AnyRank, Reply, Total, TotalFloat, Totals
from rollout.core.messages.update_state import DraftVersion, EndedUpdateState, UpdateStateReply


class PublishedWeights(msgspec.Struct, kw_only=True):
    """One of the last weight versions.  `content_digest`: of the tensors as sent; `held_digest`: of memory."""

    weight_version: str
    weight_epoch: int
    content_digest: str | None
    held_digest: str | None


class SchedulerState(Reply, kw_only=True):
    """Counts, memory, version and health of an engine.  `withheld`, `poisoned`: why nothing may be served, if so.

    `num_state_rows`: recurrent states, or pages of layers with a window; 0 where the model has neither.
    `prefix_granularity`: the length of a prefix from which a request goes on is a multiple of it.
    """

    # requests and KV slots
    num_running_reqs: Total
    num_waiting_reqs: Total
    num_used_tokens: Total
    num_cached_tokens: Total
    num_pinned_tokens: Total
    num_running_sessions: Total
    num_total_tokens: Total
    max_total_num_tokens: Total
    token_usage: float
    num_used_state_rows: Total
    num_state_rows: Total
    prefix_granularity: int = 1
    # since the start, or recently
    gen_throughput: TotalFloat
    cache_hit_rate: float
    num_retracted_reqs: Total
    num_generated_tokens: Total
    num_prompt_tokens: Total
    num_prompt_tokens_reused: Total
    num_drafts: Total = 0
    num_draft_tokens: Total = 0
    num_accepted_draft_tokens: Total = 0
    num_accepted_draft_tokens_per_pos: Totals = []  # by the place in the draft, as far as any was kept
    spec_accept_length: float = 1.0
    num_kv_event_batches: int | None
    step_time_ms: dict[str, Any]
    # gates
    paused: AnyRank
    withheld: str | None
    poisoned: str | None
    memory: dict[str, str]
    # weights and experts
    weights_path: str | None
    weight_version: str
    weight_epoch: int
    placement_epoch: int
    content_digest: str | None
    held_digest: str | None
    weight_versions: list[PublishedWeights]
    draft: DraftVersion | None = None  # None: no model drafts
    weight_update: UpdateStateReply
    ended_updates: list[EndedUpdateState]
    expert_distribution: ExpertLoadState | None
    eplb: EplbState | None
    # what does not change
    max_running_requests: int
    context_length: int
    dtype: str
    device: str
    overlap_schedule: bool  # whether a step is launched before the one before it is finished
    model_bytes: Total
    kv_bytes: Total
    kv_scales: dict[str, Any] | None  # of keys and values in FP8: source, and [smallest, largest] of "k" and "v"
    num_threads: int
    cpu_isa: str  # "" without compiled operators
    plain_torch_reason: str  # why the operators run on plain torch; "" if the device's own are loaded
    plain_linears: dict[str, str]  # why projections are held as sent despite --cpu-linear-format, by name
    prompt_attention: str  # the kernels of prompts, where the attention backend has a choice
    max_lora_rank: int | None  # of an adapter; null: the server has no slots for any
    batch_invariant: bool
    batch_invariance_note: str

    def merged(self, replies: Sequence[SchedulerState]) -> SchedulerState:
        found: SchedulerState = super().merged(replies)
        return msgspec.structs.replace(found, token_usage=found.num_used_tokens / found.max_total_num_tokens)
