"""What is sent to a scheduler for the samples of a prompt, and the answer of one that was never sent."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.core.io_struct import FinishedRecord, FinishReason, ReplayedRoutes, ReqOutput, TokenizedGenerateReqInput
from rollout.tokenizer_manager.replay import cache_key
from rollout.tokenizer_manager.request import GenerateReqInput
from rollout.tokenizer_manager.sample import SampleRecord


def generate_message(
    records: Sequence[SampleRecord], replay: ReplayedRoutes | None, request: GenerateReqInput
) -> TokenizedGenerateReqInput:
    """Samples of one prompt for one data-parallel rank."""
    first, siblings = records[0], records[1:]
    options = first.options
    return TokenizedGenerateReqInput(
        rid=first.rid,
        input_ids=first.prompt_ids,
        sampling_params=first.params,
        stream=request.stream,
        return_logprob=options.return_logprob,
        logprob_start_len=options.logprob_start_len,
        top_logprobs_num=options.top_logprobs_num,
        token_ids_logprob=options.token_ids_logprob,
        return_routed_experts=bool(options.return_routed_experts),
        routed_experts_start_len=options.routed_experts_start_len,
        extra_key=request.extra_key if replay is None else cache_key(request.extra_key, replay),
        replay=replay,
        max_kv_version_lag=request.max_kv_version_lag,
        priority=request.priority,
        dp_rank=first.dp_rank,
        session_id=request.session_id,
        siblings=[(record.rid, record.params.sampling_seed) for record in siblings],
    )


def aborted_before_prefill(record: SampleRecord) -> ReqOutput:
    """Its whole answer."""
    return ReqOutput(
        rid=record.rid,
        token_ids=[],
        num_output_tokens=0,
        weight_version=record.weight_version,
        finished=FinishedRecord(reason=FinishReason(type="abort", message="Abort before prefill")),
    )
