"""`SampleRecord`: one sample in the main process, appended to as the scheduler's messages come in.

Shapes of the alternatives to its tokens: n tokens, K likeliest ones at each place, C chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from rollout.core.errors import LockstepError
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.req_output import AdapterLabel, Alternatives, FinishedRecord, ReqOutput, SamplingMaskDelta
from rollout.tokenizer_manager.streamed_rows import RowsSoFar


class AlternativeArrays(NamedTuple):
    """`top_logprobs` and `top_ids` [n, K], `chosen_logprobs` [n, C]; float32 or float64, int32."""

    top_logprobs: np.ndarray
    top_ids: np.ndarray
    chosen_logprobs: np.ndarray


@dataclass(slots=True)
class AlternativesBuffer:
    """Rows of the messages of a sample, one after the other; its request states K and C."""

    num_top: int
    num_chosen: int
    dtype: str = "float32"
    top_logprobs: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    chosen_logprobs: bytearray = field(default_factory=bytearray)

    def append(self, message: Alternatives) -> None:
        self.dtype = message.dtype
        self.top_logprobs += message.top_logprobs
        self.top_ids += message.top_ids
        self.chosen_logprobs += message.chosen_logprobs

    def holds(self, count: int) -> bool:
        """Return whether there are rows of exactly `count` tokens."""
        item = np.dtype(self.dtype).itemsize
        sizes = (len(self.top_logprobs), len(self.top_ids), len(self.chosen_logprobs))
        return sizes == (item * count * self.num_top, 4 * count * self.num_top, item * count * self.num_chosen)

    def arrays(self, count: int, first: int = 0) -> AlternativeArrays:
        """Return a copy of the rows of tokens `first .. count - 1`: the buffer may grow meanwhile."""
        floats = np.dtype(self.dtype).newbyteorder("<")
        return AlternativeArrays(
            _rows(self.top_logprobs, floats, first, count, self.num_top),
            _rows(self.top_ids, np.dtype("<i4"), first, count, self.num_top),
            _rows(self.chosen_logprobs, floats, first, count, self.num_chosen),
        )


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


@dataclass(slots=True, weakref_slot=True, eq=False)
class SampleRecord:
    """Lists named `output_*` run parallel to `output_ids`.  Times are seconds of a monotonic clock.

    `source` is the message that the scheduler gets for this sample, without the routes that it brings along.
    `num_before`: tokens before the first one, in the record of a tail (`tail`).  `rows`: the versions and the routes
    so far, of a request that asks for `stream_rows`, until it has finished.
    """

    source: TokenizedGenerateReqInput
    created_at: float
    weight_version: str
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_alternatives: AlternativesBuffer = field(init=False)
    output_mask: MaskRecord = field(default_factory=MaskRecord)
    finished: FinishedRecord | None = None
    adapter: AdapterLabel | None = None  # as the scheduler names it
    first_token_at: float | None = None
    finished_at: float | None = None
    ends_alone: bool = False  # its end came without a token, as that of an abort
    num_before: int = 0
    rows: RowsSoFar | None = None

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

    @property
    def num_tokens(self) -> int:
        """Tokens of the output, with the ones before a tail."""
        return self.num_before + len(self.output_ids)

    def give_up(self) -> None:
        """Forget what grows with the tokens of a finished sample, as its answer holds that by now."""
        assert self.finished is not None
        self.output_ids, self.output_logprobs, self.output_mask = [], [], MaskRecord()
        self.output_alternatives = AlternativesBuffer(0, 0)
        self.finished.routed_experts = self.finished.prompt_logprobs = self.finished.hidden_states = None

    def append(self, output: ReqOutput, now: float) -> None:
        """Add what the scheduler reports at time `now`.

        Raises `LockstepError` if a message before this one was lost or its lists do not match.
        """
        self.output_ids += output.token_ids
        self.weight_version, self.adapter = output.weight_version, output.adapter
        if output.logprobs is not None:
            self.output_logprobs += output.logprobs.values
            if output.logprobs.alternatives is not None:
                self.output_alternatives.append(output.logprobs.alternatives)
        if output.mask is not None:
            self.output_mask.append(output.mask)
        if self.output_ids and self.first_token_at is None:
            self.first_token_at = now - (output.finished.since_first_token_s if output.finished else 0.0)
        if output.rows is not None:
            self.rows = self.rows or RowsSoFar()
            self.rows.append(output.rows)
        if output.finished is not None:
            self.finished, self.rows, self.ends_alone = output.finished, None, not output.token_ids
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


class RequestObserver(Protocol):
    """Notified of every sample's first token and end; the metrics are one."""

    def on_first_token(self, record: SampleRecord) -> None: ...

    def on_finished(self, record: SampleRecord) -> None: ...


def message_arrays(message: Alternatives | None, count: int, num_top: int, num_chosen: int) -> AlternativeArrays:
    """Return views of the rows of `count` tokens in one message; None holds no tokens."""
    message = message or Alternatives()
    floats = np.dtype(message.dtype).newbyteorder("<")
    return AlternativeArrays(
        np.frombuffer(message.top_logprobs, floats).reshape(count, num_top),
        np.frombuffer(message.top_ids, "<i4").reshape(count, num_top),
        np.frombuffer(message.chosen_logprobs, floats).reshape(count, num_chosen),
    )


def _rows(buffer: bytearray, dtype: np.dtype, first: int, end: int, width: int) -> np.ndarray:
    size = width * dtype.itemsize
    return np.frombuffer(buffer[first * size : end * size], dtype).reshape(end - first, width)
