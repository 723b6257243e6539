"""`Req`: one sample in the making: a sequence in memory (`CachedSequence`), and its append-only record.

A retraction gives up the memory of the sequence and leaves the record: ids, log-probabilities, versions and route rows
that exist are never recomputed or replaced.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout.core.adapter_names import key_of_kv
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.messages.pooling import PoolingParams
from rollout.core.messages.req_output import DraftTally, FinishReason, HiddenDtype, HiddenStatesRows, VersionSpan
from rollout.core.sampling_params import SamplingParams
from rollout.grammar.restriction import Restriction
from rollout.memory.sequence import CachedSequence
from rollout.model.adapters import ServedAdapter
from rollout.model.model_state import ServingEpoch
from rollout.sampling.batch_info import SamplingRow
from rollout.scheduler.alternatives import AlternativesRecord
from rollout.text.detokenizer import IncrementalDetokenizer

_HIDDEN_DTYPES: dict[torch.dtype, HiddenDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


class VersionMarks:
    """Append-only record of the weights that made the entries of a growing list.

    Contents are identified by their weight epoch; an epoch that gets another label has a mark of its own.
    """

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[tuple[str, int, int]] = []  # label, weight epoch, index of the first entry

    def note(self, epoch: ServingEpoch, length: int) -> None:
        """Note that the entries from index `length` on come from `epoch`."""
        if not self._marks or self._marks[-1][:2] != (epoch.weight_version, epoch.weight_epoch):
            self._marks.append((epoch.weight_version, epoch.weight_epoch, length))

    @property
    def last_version(self) -> str | None:
        return self._marks[-1][0] if self._marks else None

    def spans(self, length: int) -> list[VersionSpan]:
        """Return the spans of a list that has `length` entries by now."""
        ends = [start for _, _, start in self._marks[1:]] + [length]
        marked = zip(self._marks, ends)
        return [VersionSpan(version, start, end, epoch) for (version, epoch, start), end in marked if start < end]


@dataclass(eq=False, slots=True)
class PoolRecord:
    """Append-only record of a request that pools: the hidden states before `next_position` have entered it.

    `total_D`: the sum of these in float64, on the model's device, for a mean.
    """

    params: PoolingParams
    next_position: int = 0
    total_D: torch.Tensor | None = None
    rows: list[np.ndarray] = field(default_factory=list)  # float32 [n, C]
    versions: VersionMarks = field(default_factory=VersionMarks)  # over positions


@dataclass(eq=False, slots=True)
class HiddenRecord:
    """Append-only record of hidden states: `num_rows` rows [L, D] of the tokens from `params.start` on.

    `data` has their numbers, of `dtype`, which is None before the first row.
    """

    params: HiddenStatesParams
    num_rows: int = 0
    data: bytearray = field(default_factory=bytearray)
    dtype: HiddenDtype | None = None
    hidden_size: int = 0
    versions: VersionMarks = field(default_factory=VersionMarks)  # over rows

    @property
    def next_position(self) -> int:
        return self.params.start + self.num_rows

    def append(self, rows_nLD: torch.Tensor, epoch: ServingEpoch) -> None:
        """Append the next rows, which are on the host and computed by `epoch`."""
        self.versions.note(epoch, self.num_rows)
        self.num_rows += len(rows_nLD)
        self.dtype, self.hidden_size = _HIDDEN_DTYPES[rows_nLD.dtype], rows_nLD.shape[2]
        self.data += rows_nLD.contiguous().view(torch.uint8).numpy().tobytes()

    def message(self) -> HiddenStatesRows | None:
        """Return the rows so far; None if there is none."""
        if self.dtype is None:
            return None
        return HiddenStatesRows(
            data=bytes(self.data),
            dtype=self.dtype,
            shape=(self.num_rows, len(self.params.layers), self.hidden_size),
            start=self.params.start,
            versions=self.versions.spans(self.num_rows),
        )


@dataclass(eq=False, slots=True)
class OutputRecord:
    """Append-only record with one entry for each sampled token, parallel to `output_ids`; or with pooled rows.

    `restriction` follows the tokens, and has the ones that may come next; None: all may.
    """

    logprobs: list[float] = field(default_factory=list)
    alternatives: AlternativesRecord = field(default_factory=AlternativesRecord)
    kept_ids: list[np.ndarray] = field(default_factory=list)  # int32 [m]
    num_mask_ids: int = 0  # of all of them
    mask_logprobs: list[float] = field(default_factory=list)  # of the token within its mask
    kept_logprobs: list[np.ndarray] = field(default_factory=list)  # float32 [m]
    versions: VersionMarks = field(default_factory=VersionMarks)
    pool: PoolRecord | None = None  # None: the request pools nothing
    hidden: HiddenRecord | None = None  # None: it wants no hidden states
    restriction: Restriction | None = None
    drafts: DraftTally | None = None  # None: none of its steps verified a draft


@dataclass(eq=False, slots=True)
class PromptRecord:
    """Append-only record of the log-probabilities of prompt tokens `start ..`.

    Entry 0 is None, as nothing predicts its token.
    """

    start: int
    values: list[float | None] = field(default_factory=lambda: [None])
    alternatives: AlternativesRecord = field(default_factory=AlternativesRecord)  # without a row for entry 0
    versions: VersionMarks = field(default_factory=VersionMarks)

    @property
    def next_position(self) -> int:
        """The position whose forward yields the next missing entry: the entry of token p comes from position p - 1."""
        return self.start + len(self.values) - 1


@dataclass(eq=False, slots=True)
class SavedRows:
    """Rows of tokens `0 .. n - 1`, kept over a retraction: route rows [n, L, K] and their weight epochs [n] int32."""

    routes: np.ndarray
    epochs: np.ndarray


@dataclass(eq=False, slots=True)
class Times:
    """The times of a request, in seconds of this process's monotonic clock: arrival, first KV slots, first token."""

    received: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None


class Req(CachedSequence):
    """See the module docstring."""

    __slots__ = (
        "adapter",
        "arrival",
        "cached_tokens",
        "end_ids",
        "finished",
        "given_up_epochs",
        "may_pin",
        "num_retractions",
        "num_sent",
        "oldest_epoch",
        "output",
        "prompt_record",
        "sampling_row",
        "saved_rows",
        "source",
        "stop_text",
        "times",
    )

    def __init__(
        self,
        source: TokenizedGenerateReqInput,
        *,
        arrival: int,
        seed: int,
        end_ids: frozenset[int],
        stop_text: IncrementalDetokenizer | None = None,
        adapter: ServedAdapter | None = None,
        restriction: Restriction | None = None,
        sibling: Req | None = None,
    ) -> None:
        """Begin with an empty record.  `sibling`: another sample of the same message, which has the same lists."""
        self.sampling_row = _sampling_row(source, seed, end_ids, restriction is not None)
        if sibling is not None:
            self.sampling_row.shared = sibling.sampling_row.shared
        super().__init__(self.sampling_row.shared.prompt, self.sampling_row.output_ids)
        self.source = source
        self.adapter = adapter  # None: the base model alone
        self.arrival = arrival
        self.end_ids = end_ids  # token ids that finish the request
        self.stop_text = stop_text  # of the output, with special tokens; None without stop strings
        pool = None if source.pooling is None else PoolRecord(source.pooling)
        hidden = None if source.hidden_states is None else HiddenRecord(source.hidden_states)
        self.output = OutputRecord(pool=pool, hidden=hidden, restriction=restriction)
        wants_prompt = source.return_logprob and 0 <= source.logprob_start_len < len(source.input_ids)
        self.prompt_record = PromptRecord(source.logprob_start_len) if wants_prompt else None
        self.cached_tokens = 0  # prefix hit of the last admission before any retraction
        self.saved_rows: SavedRows | None = None
        self.oldest_epoch: int | None = None  # of KV given up in retractions
        self.given_up_epochs: np.ndarray | None = None  # int32, of the prompt's KV that the last retraction gave up
        self.num_retractions = 0
        self.times = Times()
        self.num_sent = 0  # output tokens already sent to the main process
        self.finished: FinishReason | None = None
        self.may_pin = True  # False once its session has ended

    @property
    def has_begun(self) -> bool:
        """True for a waiting request that ran before."""
        return self.num_retractions > 0

    @property
    def rid(self) -> str:
        return self.source.rid

    @property
    def sampling_params(self) -> SamplingParams:
        return self.source.sampling_params

    @property
    def cache_key(self) -> str | None:
        """The key of its KV under a weight epoch: `extra_key`, and the content of its adapter."""
        if self.adapter is None:
            return self.source.extra_key
        label = self.adapter.label
        return key_of_kv(self.source.extra_key, label.name, label.version, label.content_digest)

    @property
    def restriction(self) -> Restriction | None:
        """The tokens that it may sample next; None: all."""
        return self.output.restriction

    @property
    def adapter_slot(self) -> int:
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def max_len(self) -> int:
        return self.prompt_len + self.sampling_params.max_new_tokens

    @property
    def extend_len(self) -> int:
        """The number of known tokens whose KV is still to be computed."""
        return self.num_tokens - self.device_len

    @property
    def samples(self) -> bool:
        """False for a request that only scores its prompt."""
        return self.sampling_params.max_new_tokens > 0

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known token ids of positions `start .. end - 1`."""
        prompt_ids, prompt = self.source.input_ids, self.prompt_len
        if end <= prompt:
            return prompt_ids[start:end]
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return prompt_ids[start:] + self.output_ids[: end - prompt]

    @property
    def matchable_len(self) -> int:
        """The longest prefix that a cache hit may skip.

        Tokens whose logits or hidden states are wanted are computed, too.
        """
        limit = super().matchable_len
        pool, hidden = self.output.pool, self.output.hidden
        if pool is not None and pool.params.reads_all:
            limit = min(limit, pool.next_position)
        if hidden is not None:
            limit = min(limit, hidden.next_position)
        return limit if self.prompt_record is None else min(limit, self.prompt_record.next_position)

    @property
    def session_to_pin(self) -> str | None:
        """The session for which the request's prefix stays in the cache once it has finished."""
        stays = self.may_pin and self.finished is not None and self.finished.type != "abort"
        return self.source.session_id if stays else None

    def check(self) -> None:
        assert 0 <= self.cached_len <= self.device_len <= self.num_tokens <= max(self.max_len, self.prompt_len)


@dataclass(frozen=True, slots=True)
class Extend:
    """`count` tokens of `req` from position `start`; `completes` its known tokens."""

    req: Req
    start: int
    count: int
    completes: bool


def _sampling_row(
    source: TokenizedGenerateReqInput, seed: int, end_ids: frozenset[int], is_restricted: bool
) -> SamplingRow:
    """Return the request's settings for the sampler, the same in every batch."""
    wants_logprobs = source.return_logprob
    return SamplingRow(
        source.sampling_params,
        seed,
        tuple(end_ids),
        source.input_ids,
        [],
        wants_logprob=wants_logprobs,
        top_logprobs=source.top_logprobs_num if wants_logprobs else 0,
        chosen_ids=(source.token_ids_logprob or ()) if wants_logprobs else (),
        wants_mask=source.return_sampling_mask,
        is_restricted=is_restricted,
    )
