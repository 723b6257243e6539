"""`SampleRecord`: what the main process knows of one sample, appended to as the scheduler reports.

Knows the message `ReqOutput`.  Does not know text, JSON or who waits for the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.core.errors import LockstepError
from rollout.core.io_struct import FinishedRecord, ReqOutput
from rollout.core.sampling_params import SamplingParams
from rollout.tokenizer_manager.request import OutputOptions

TopLogprobs = tuple[list[float], list[int]]


@dataclass(slots=True)
class SampleRecord:
    """Lists named `output_*` run parallel to `output_ids`.  Times are seconds of a monotonic clock."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    options: OutputOptions
    created_at: float
    weight_version: str
    dp_rank: int = 0
    session_id: str | None = None
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top: list[TopLogprobs] = field(default_factory=list)
    output_chosen: list[list[float]] = field(default_factory=list)
    finished: FinishedRecord | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def append(self, output: ReqOutput, now: float) -> None:
        """Add what the scheduler reports at time `now`.

        Raises `LockstepError` if a message before this one was lost or its lists do not match.
        """
        self.output_ids += output.token_ids
        self.weight_version = output.weight_version
        if output.logprobs is not None:
            self.output_logprobs += output.logprobs.values
            self.output_top += output.logprobs.top or []
            self.output_chosen += output.logprobs.chosen or []
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
        options = self.options
        if not options.return_logprob:
            return
        columns = [self.output_logprobs]
        if options.top_logprobs_num:
            columns.append(self.output_top)  # type: ignore[arg-type]
        if options.token_ids_logprob:
            columns.append(self.output_chosen)  # type: ignore[arg-type]
        if any(len(column) != count for column in columns):
            lengths = [len(column) for column in columns]
            raise LockstepError(f"request {self.rid}: {count} tokens with log-probability lists of {lengths}")
