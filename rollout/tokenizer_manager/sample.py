"""`SampleRecord`: one sample in the main process, appended to as the scheduler's messages come in."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.core.errors import LockstepError
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishedRecord, ReqOutput, SamplingMaskDelta
from rollout.tokenizer_manager.alternatives import AlternativesBuffer


@dataclass(slots=True)
class MaskRecord:
    """The contents of the `SamplingMaskDelta`s of a sample, one after the other."""

    counts: list[int] = field(default_factory=list)
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list)
    kept_logprobs: bytearray = field(default_factory=bytearray)

    def append(self, delta: SamplingMaskDelta) -> None:
        self.counts += delta.counts
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.kept_logprobs += delta.kept_logprobs or b""


@dataclass(slots=True)
class SampleRecord:
    """Lists named `output_*` run parallel to `output_ids`.  Times are seconds of a monotonic clock.

    `source` is what the scheduler gets for this sample, but for the routes that it brings along.
    """

    source: TokenizedGenerateReqInput
    created_at: float
    weight_version: str
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_alternatives: AlternativesBuffer = field(init=False)
    output_mask: MaskRecord = field(default_factory=MaskRecord)
    finished: FinishedRecord | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        source = self.source
        self.output_alternatives = AlternativesBuffer(source.top_logprobs_num, len(source.token_ids_logprob or ()))

    @property
    def rid(self) -> str:
        return self.source.rid

    @property
    def prompt_ids(self) -> list[int]:
        return self.source.input_ids

    @property
    def session_id(self) -> str | None:
        return self.source.session_id

    @property
    def dp_rank(self) -> int:
        return self.source.dp_rank

    @property
    def max_len(self) -> int:
        """Tokens of the prompt and the longest output."""
        return len(self.source.input_ids) + self.source.sampling_params.max_new_tokens

    def give_up(self) -> None:
        """Forget what grows with the tokens of a finished sample, as its answer holds that by now."""
        assert self.finished is not None
        self.output_ids, self.output_logprobs, self.output_mask = [], [], MaskRecord()
        self.output_alternatives = AlternativesBuffer(0, 0)
        self.finished.routed_experts = self.finished.prompt_logprobs = None

    def append(self, output: ReqOutput, now: float) -> None:
        """Add what the scheduler reports at time `now`.

        Raises `LockstepError` if a message before this one was lost or its lists do not match.
        """
        self.output_ids += output.token_ids
        self.weight_version = output.weight_version
        if output.logprobs is not None:
            self.output_logprobs += output.logprobs.values
            if output.logprobs.alternatives is not None:
                self.output_alternatives.append(output.logprobs.alternatives)
        if output.mask is not None:
            self.output_mask.append(output.mask)
        if self.output_ids and self.first_token_at is None:
            self.first_token_at = now - (output.finished.since_first_token_s if output.finished else 0.0)
        if output.finished is not None:
            self.finished = output.finished
            self.finished_at = now
        self._check(output)

    def _check(self, output: ReqOutput) -> None:
        count = len(self.output_ids)
        if count != output.num_output_tokens:
            raise LockstepError(f"request {self.rid}: {output.num_output_tokens} tokens were made, {count} arrived")
        source, mask = self.source, self.output_mask
        if source.return_sampling_mask and not (
            len(mask.counts) == len(mask.logprobs) == count and 4 * sum(mask.counts) == len(mask.token_ids)
        ):
            raise LockstepError(f"request {self.rid}: {count} tokens with sampling masks of {len(mask.counts)}")
        if source.return_logprob and not (len(self.output_logprobs) == count and self.output_alternatives.holds(count)):
            raise LockstepError(
                f"request {self.rid}: {count} tokens with {len(self.output_logprobs)} log-probabilities, or with "
                "another number of related entries"
            )
