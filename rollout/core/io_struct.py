"""Every message that crosses between the main process and the scheduler: typed structs in msgpack.

Knows shapes of messages and how to encode them.  Does not know sockets.  Nothing here is pickled.

    main -> scheduler   SchedulerInput  = requests, aborts, control verbs, in one order
    scheduler -> main   SchedulerOutput = token deltas and finished records, replies to control verbs

A control verb is one `*ReqInput` here, one route, and one handler; every verb is answered by one `ControlReqOutput`
that carries the verb's `request_id`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollout.core.expert_io_struct import ExpertVerb
from rollout.core.message import ControlReqInput, Message
from rollout.core.sampling_params import SamplingParams
from rollout.core.weight_io_struct import WeightVerb

# --- main -> scheduler: requests ---------------------------------------------------------------------------------


class ReplayedRoutes(msgspec.Struct, kw_only=True):
    """Logical expert ids `[rows, L, K]`, little-endian uint16, MoE layers only, for the tokens from `start` on."""

    data: bytes
    shape: tuple[int, int, int]
    start: int = 0


class TokenizedGenerateReqInput(Message):
    """Samples to produce of one prompt, which travels once; each `rid` is unique among requests in flight."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: no prompt log-probabilities
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    extra_key: str | None = None  # partitions the prefix cache
    max_kv_version_lag: int | None = None  # commits that its KV may be behind; None: the server's, -1: no limit
    priority: int = 0  # lower ones are admitted first
    dp_rank: int = 0  # the data-parallel rank that runs it
    replay: ReplayedRoutes | None = None  # takes the place of the routers' choices; `extra_key` is of these routes
    session_id: str | None = None  # whose prefix is kept for a while after it has ended
    siblings: list[tuple[str, int | None]] = []  # rid and sampling seed of each sample but the first

    def samples(self) -> list[TokenizedGenerateReqInput]:
        """One for each sample, without siblings; all hold the same list of ids."""
        if not self.siblings:
            return [self]
        first, params = msgspec.structs.replace(self, siblings=[]), self.sampling_params
        return [first] + [
            msgspec.structs.replace(
                first,
                rid=rid,
                sampling_params=params if seed is None else msgspec.structs.replace(params, sampling_seed=seed),
            )
            for rid, seed in self.siblings
        ]


class AbortReqInput(Message):
    """Abort the exact `rids`, or everything.  Not answered: each aborted request gets its final `ReqOutput`."""

    rids: list[str] = []
    abort_all: bool = False


# --- main -> scheduler: control verbs ----------------------------------------------------------------------------


PauseMode = Literal["abort", "retract", "in_place", "wait"]


class PauseGenerationReqInput(ControlReqInput):
    """`wait`: requests that have begun run to their end first, for at most `wait_s` seconds; no other begins.

    `wait_id` names such a pause for whoever gives it up.
    """

    mode: PauseMode = "abort"
    wait_s: float = 600.0
    wait_id: str | None = None


class GiveUpPauseReqInput(ControlReqInput):
    """Take back a pause of mode `wait` whose caller is gone, or which failed on another replica."""

    wait_id: str


class ContinueGenerationReqInput(ControlReqInput):
    """Requests whose tokens or KV began under weights older than `abort_below_weight_version` are aborted first."""

    abort_below_weight_version: str | None = None


class FlushCacheReqInput(ControlReqInput):
    retract: bool = False  # requests that hold KV give it back and compute it again, instead of being in the way


MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


class ReleaseMemoryOccupationReqInput(ControlReqInput):
    """Give the memory of `tags` back to the system; None or empty: of all that have theirs."""

    tags: list[MemoryTag] | None = None


class ResumeMemoryOccupationReqInput(ControlReqInput):
    """Take the memory of `tags` again; None or empty: of all that were released."""

    tags: list[MemoryTag] | None = None


class GetSessionsReqInput(ControlReqInput):
    """What KV each session keeps."""


class FinishSessionReqInput(ControlReqInput):
    """Nothing needs to be kept for this session any more; one that is not known is no mistake."""

    session_id: str


class GetStateReqInput(ControlReqInput):
    """Counts, memory, version and health of the scheduler: feeds /server_info, /get_load, /v1/loads, /metrics."""


MAX_PROFILED_STEPS = 50


class StartProfileReqInput(ControlReqInput):
    """Trace the next `num_steps` steps (None: all, up to `MAX_PROFILED_STEPS`), into `output_dir` (None: the system's
    temporary folder)."""

    prefix: str
    activities: list[Literal["CPU", "GPU"]]
    output_dir: str | None = None
    num_steps: int | None = None
    with_stack: bool = False
    record_shapes: bool = False


class StopProfileReqInput(ControlReqInput):
    """Write the trace; answered when it is there."""


class ShutdownReqInput(ControlReqInput):
    """Finish what runs within `drain_s` seconds, abort the rest, answer, and exit 0."""

    drain_s: float = 5.0


SchedulerInput = (
    TokenizedGenerateReqInput
    | AbortReqInput
    | PauseGenerationReqInput
    | GiveUpPauseReqInput
    | ContinueGenerationReqInput
    | FlushCacheReqInput
    | GetSessionsReqInput
    | FinishSessionReqInput
    | ReleaseMemoryOccupationReqInput
    | ResumeMemoryOccupationReqInput
    | GetStateReqInput
    | StartProfileReqInput
    | StopProfileReqInput
    | ShutdownReqInput
    | WeightVerb
    | ExpertVerb
)

# --- scheduler -> main -------------------------------------------------------------------------------------------


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


class RoutedExpertsPayload(msgspec.Struct, kw_only=True):
    """Rows `[num_rows, L, K]` of logical expert ids, MoE layers only, raw little-endian `dtype` bytes."""

    data: bytes
    dtype: Literal["uint8", "uint16"]
    num_rows: int
    start: int
    versions: list[VersionSpan] = []  # spans over rows: which version computed them


class LogprobDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Log-probabilities of the tokens in one `ReqOutput`; lists run parallel to its `token_ids`.

    `top` holds per token (values, ids), best first; `chosen` holds per token the values of `token_ids_logprob`.
    """

    values: list[float]
    top: list[tuple[list[float], list[int]]] | None = None
    chosen: list[list[float]] | None = None


class PromptLogprobs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Log-probabilities of prompt tokens `start .. prompt_len - 1`; entry 0 of each list is None.

    `versions` are spans over the entries that have a value: which weights computed them.
    """

    start: int
    values: list[float | None]
    versions: list[VersionSpan] = []
    top: list[tuple[list[float], list[int]] | None] | None = None
    chosen: list[list[float] | None] | None = None


class FinishedRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known only when a request ends (also when it is aborted)."""

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


class ReqOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of one request since its last `ReqOutput`.

    Streaming requests get one every step; others only one, with `finished` set.  `num_output_tokens` counts
    all tokens so far, so that a lost message would be noticed.
    """

    rid: str
    token_ids: list[int]
    num_output_tokens: int
    weight_version: str
    logprobs: LogprobDelta | None = None
    finished: FinishedRecord | None = None


class BatchTokenOutput(Message):
    outputs: list[ReqOutput]


class ControlReqOutput(Message):
    """Answer of one data-parallel rank to one control verb.  `data` is plain JSON-like content specific to the verb."""

    request_id: str
    success: bool
    message: str = ""
    status_code: int = 200
    data: dict[str, Any] = {}
    dp_rank: int = 0


class SchedulerReady(Message):
    """Sent once by every data-parallel rank, when it can serve."""

    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    capture_routed_experts: bool
    num_threads: int
    model_bytes: int
    weight_version: str


class SchedulerFailed(Message):
    """Sent by a scheduler that is about to exit with an error."""

    message: str
    traceback: str = ""


SchedulerOutput = BatchTokenOutput | ControlReqOutput | SchedulerReady | SchedulerFailed


_encoder = msgspec.msgpack.Encoder()
_input_decoder = msgspec.msgpack.Decoder(SchedulerInput)
_output_decoder = msgspec.msgpack.Decoder(SchedulerOutput)


def encode(message: Any) -> bytes:
    """Any message above as msgpack bytes."""
    return _encoder.encode(message)


def decode_input(data: bytes) -> SchedulerInput:
    """Raises `msgspec.ValidationError` on anything that is not one of `SchedulerInput`."""
    return _input_decoder.decode(data)


def decode_output(data: bytes) -> SchedulerOutput:
    """Raises `msgspec.ValidationError` on anything that is not one of `SchedulerOutput`."""
    return _output_decoder.decode(data)
