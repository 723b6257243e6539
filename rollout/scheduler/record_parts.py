"""Parts of a record as messages: sampling masks, and the log-probabilities of a prompt."""

from __future__ import annotations

from rollout.core.messages.req_output import PromptLogprobs, SamplingMaskDelta
from rollout.scheduler.req import PromptRecord, Req


def mask_delta(req: Req, first: int) -> SamplingMaskDelta:
    """Return the masks of the tokens from `first` on."""
    record = req.output
    kept_ids = record.kept_ids[first:]
    return SamplingMaskDelta(
        counts=[len(ids) for ids in kept_ids],
        token_ids=b"".join(ids.astype("<i4").tobytes() for ids in kept_ids),
        logprobs=record.mask_logprobs[first:],
        kept_logprobs=(
            b"".join(values.astype("<f4").tobytes() for values in record.kept_logprobs[first:])
            if req.source.sampling_logprobs_mode == "support"
            else None
        ),
    )


def prompt_logprobs(record: PromptRecord) -> PromptLogprobs:
    """Return what a prompt record holds by now."""
    return PromptLogprobs(
        start=record.start,
        values=record.values,
        versions=record.versions.spans(len(record.values)),
        alternatives=record.alternatives.message(),
    )
