"""The scheduler's output for a request: tokens, and everything recorded of them.  For messages of `io_struct`."""

from __future__ import annotations

from typing import Literal

import msgspec

HiddenDtype = Literal["bfloat16", "float16", "float32", "float64"]


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`stop` carries `matched`, `length` carries `length`, `abort` carries `message` and for refusals `status_code`."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None


class VersionSpan(msgspec.Struct, array_like=True, frozen=True):
    """Half-open span `[start, end)` of token positions that one weight version explains.

    `weight_epoch` tells contents apart that had the same label: it counts the commits of this server.
    """

    version: str
    start: int
    end: int
    weight_epoch: int = 0


class AdapterLabel(msgspec.Struct, array_like=True, frozen=True):
    """The adapter that made a request's tokens, with the base weights: one content, named by its digest.

    `version` counts the contents that the server had under this name, from 0.
    """

    name: str
    version: int
    content_digest: str


class AdapterCard(msgspec.Struct, frozen=True):
    """A version of an adapter in memory.

    `source`: the folder that it was read from, None for tensors; a `pinned` version is never evicted.
    """

    label: AdapterLabel
    source: str | None = None
    pinned: bool = False


class RoutedExpertsPayload(msgspec.Struct, kw_only=True):
    """Rows `[num_rows, L, K]` of logical expert ids, MoE layers only, raw little-endian `dtype` bytes."""

    data: bytes
    dtype: Literal["uint8", "uint16"]
    num_rows: int
    start: int
    versions: list[VersionSpan] = []  # spans over rows: which version computed them


class Alternatives(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Log-probabilities of other tokens at the places of n tokens: little-endian rows, one after the other.

    `top_logprobs` [n, top_logprobs_num] of `dtype`, best first, and their `top_ids`, int32; `chosen_logprobs` [n, C] of
    the C ids of `token_ids_logprob`.
    """

    dtype: Literal["float32", "float64"] = "float32"
    top_logprobs: bytes = b""
    top_ids: bytes = b""
    chosen_logprobs: bytes = b""


class LogprobDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Log-probabilities of the tokens in one `ReqOutput`; `values` runs parallel to its `token_ids`."""

    values: list[float]
    alternatives: Alternatives | None = None


class SamplingMaskDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The sampling masks of the tokens in one `ReqOutput`: `counts` ids a token, `token_ids` little-endian int32.

    `logprobs`: of each token among the ids of its mask; `kept_logprobs`, float32: of all ids, in the mode `support`.
    """

    counts: list[int]
    token_ids: bytes
    logprobs: list[float]
    kept_logprobs: bytes | None = None


class PromptLogprobs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Log-probabilities of prompt tokens `start .. prompt_len - 1`; entry 0 is None, and has no row in `alternatives`.

    `versions` are spans over the entries that have a value: which weights computed them.
    """

    start: int
    values: list[float | None]
    versions: list[VersionSpan] = []
    alternatives: Alternatives | None = None


class PooledRows(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The rows that a request pooled: `[num_rows, num_columns]`, little-endian float32.

    `versions` are spans over the prompt's positions that the rows were made of: which weights computed them.
    """

    data: bytes
    num_rows: int
    num_columns: int
    versions: list[VersionSpan] = []


class HiddenStatesRows(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Hidden states `shape` [tokens, layers, hidden size] of the tokens from `start` on: little-endian `dtype`.

    `versions` are spans over the rows: which weights computed them.
    """

    data: bytes
    dtype: HiddenDtype
    shape: tuple[int, int, int]
    start: int
    versions: list[VersionSpan] = []


class DraftTally(msgspec.Struct):
    """Counts of one request: steps that verified a draft, the drafted tokens, and the kept ones of them.

    `steps_by_kept[n]`: the steps that kept n drafted tokens.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_kept: int = 0
    steps_by_kept: list[int] = []

    def note(self, drafted: int, kept: int) -> None:
        """Take in one draft."""
        self.num_steps += 1
        self.num_drafted += drafted
        self.num_kept += kept
        self.steps_by_kept += [0] * (kept + 1 - len(self.steps_by_kept))
        self.steps_by_kept[kept] += 1


class FinishedRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The facts of a request that are known only when it ends (also when it is aborted)."""

    reason: FinishReason
    since_first_token_s: float = 0.0  # a duration, as the clocks of two machines differ
    queue_s: float = 0.0  # from its arrival at the scheduler to its first KV
    cached_tokens: int = 0
    num_retractions: int = 0
    weight_versions: list[VersionSpan] = []  # over output tokens
    prefill_weight_versions: list[VersionSpan] = []  # over prompt tokens: which version wrote their KV
    kv_weight_version_oldest: str | None = None
    kv_weight_epoch_oldest: int | None = None
    routed_experts: RoutedExpertsPayload | None = None
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledRows | None = None  # None: it pools nothing, or ended before
    hidden_states: HiddenStatesRows | None = None  # None: none were wanted, or it ended before its first forward
    drafts: DraftTally | None = None  # None: the server drafts nothing


class StreamedRows(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The versions of the tokens in one `ReqOutput`, as spans over all output tokens, and the rows of routes so far.

    `routes` has the rows that the output before did not have; None: none were asked for.
    """

    versions: list[VersionSpan]
    routes: RoutedExpertsPayload | None = None


class ReqOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of one request since its last `ReqOutput`.

    Streaming requests get one every step; others only one, with `finished` set.  `num_output_tokens` counts
    all tokens so far, so that a lost message would be noticed.  `rows` are of requests that ask for `stream_rows`, but
    not of the last output: its `finished` has all rows.
    """

    rid: str
    token_ids: list[int]
    num_output_tokens: int
    weight_version: str
    logprobs: LogprobDelta | None = None
    mask: SamplingMaskDelta | None = None
    finished: FinishedRecord | None = None
    adapter: AdapterLabel | None = None  # None: the base model alone
    rows: StreamedRows | None = None

    @classmethod
    def never_ran(cls, rid: str, weight_version: str, message: str, status_code: int | None = None) -> ReqOutput:
        """Return the whole output of a request that is refused, or aborted before the scheduler gets it."""
        reason = FinishReason(type="abort", message=message, status_code=status_code)
        return cls(
            rid=rid,
            token_ids=[],
            num_output_tokens=0,
            weight_version=weight_version,
            finished=FinishedRecord(reason=reason),
        )
