"""Every message that crosses between the main process and the scheduler: typed structs in msgpack.

    main -> scheduler   SchedulerInput  = requests, aborts, control verbs, in one order
    scheduler -> main   SchedulerOutput = token deltas and finished records, replies to control verbs

A control verb is declared here or in one of the files whose `VERBS` are taken in, see `message`; every verb is answered
by one `ControlReqOutput` that carries the verb's `request_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Union

import msgspec

from rollout.core.messages import adapters as adapter_io_struct
from rollout.core.messages import experts as expert_io_struct
from rollout.core.messages import profile as profile_io_struct
from rollout.core.messages import sessions as session_io_struct
from rollout.core.messages import weight_check as weight_check_io_struct
from rollout.core.messages import weights as weight_io_struct
from rollout.core.messages.adapters import AdaptersChanged
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.message import (
    GET_AND_POST,
    AnyRank,
    ControlReqInput,
    ControlReqOutput,
    Endpoint,
    Message,
    NoReply,
    Reply,
    Total,
)
from rollout.core.messages.pooling import PoolingParams
from rollout.core.messages.req_output import AdapterCard, ReqOutput
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.messages.update_state import CommitReply
from rollout.core.sampling_params import SamplingLogprobsMode, SamplingParams

# --- main -> scheduler: requests ---------------------------------------------------------------------------------


class ReplayedRoutes(msgspec.Struct, kw_only=True):
    """Logical expert ids `[rows, L, K]`, little-endian uint16, MoE layers only, for the tokens from `start` on."""

    data: bytes
    shape: tuple[int, int, int]
    start: int = 0


class TokenizedGenerateReqInput(Message):
    """Samples to produce of one prompt, which is sent once; each `rid` is unique among requests in flight.

    The main process makes it when a request arrives, fills in what it finds out, and keeps one for each sample.
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    stream_rows: bool = False  # each output of the stream has the versions and the routes of its tokens
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: no prompt log-probabilities
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_sampling_mask: bool = False
    sampling_logprobs_mode: SamplingLogprobsMode = "selected"
    max_mask_ids: int | None = None  # of all its sampling masks together; None: no limit but that of each
    extra_key: str | None = None  # partitions the prefix cache
    lora_name: str | None = None  # its adapter; None: the base model
    max_kv_version_lag: int | None = None  # commits that its KV may be behind; None: the server's, -1: no limit
    priority: int = 0  # lower ones are admitted first
    dp_rank: int = 0  # the data-parallel rank that runs it
    replay: ReplayedRoutes | None = None  # takes the place of the routers' choices; `extra_key` is of these routes
    session_id: str | None = None  # whose prefix is kept for a while after it has ended
    pooling: PoolingParams | None = None  # it pools its prompt, and generates nothing
    hidden_states: HiddenStatesParams | None = None  # None: none are wanted
    siblings: list[tuple[str, int | None]] = []  # rid and sampling seed of each sample but the first

    @staticmethod
    def of_samples(samples: Sequence[TokenizedGenerateReqInput]) -> TokenizedGenerateReqInput:
        """Join samples of the same prompt to one message: the inverse of `samples`."""
        first, *others = samples
        siblings = [(sample.rid, sample.sampling_params.sampling_seed) for sample in others]
        return msgspec.structs.replace(first, siblings=siblings)

    def samples(self) -> list[TokenizedGenerateReqInput]:
        """Return one message for each sample, without siblings; all hold the same list of ids."""
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


class PauseReply(Reply, kw_only=True):
    """`num_running`, `num_waiting`: requests that hold KV, and that wait; `num_aborted`: by this pause."""

    paused: AnyRank
    mode: PauseMode
    num_running: Total
    num_waiting: Total
    num_aborted: Total


class PauseGenerationReqInput(ControlReqInput[PauseReply]):
    """Stop stepping; the answer comes once that has happened.  What becomes of the requests that run is `mode`'s.

    `wait`: requests that have begun run to their end first, for at most `wait_s` seconds; no other begins.
    `wait_id` names such a pause, for `GiveUpPauseReqInput`.
    """

    endpoint = Endpoint(
        path="/pause_generation",
        timeout_s=60.0,
        client_waits="weights",
        shape="status",
        hidden=frozenset({"wait_s", "wait_id"}),
    )

    mode: PauseMode = "abort"
    wait_s: float = 600.0
    wait_id: str | None = None


class GiveUpPauseReply(Reply, kw_only=True):
    paused: AnyRank


class GiveUpPauseReqInput(ControlReqInput[GiveUpPauseReply]):
    """Cancel a pause of mode `wait` whose caller disconnected, or which failed on another replica."""

    endpoint = Endpoint(timeout_s=60.0)

    wait_id: str


class ContinueReply(CommitReply, kw_only=True):
    """With the reply of a commit, where a weight update that was sent without begin and end was settled."""

    paused: AnyRank
    num_aborted: Total


class ContinueGenerationReqInput(ControlReqInput[ContinueReply]):
    """End a pause.  Also settles a weight update that was sent without begin and end.

    Requests whose tokens or KV began under weights older than `abort_below_weight_version` are aborted first.
    """

    endpoint = Endpoint(path="/continue_generation", shape="status")

    abort_below_weight_version: str | None = None


class FlushCacheReqInput(ControlReqInput[NoReply]):
    """Empty the prefix cache.  Text; 400 unless idle or paused within `timeout` seconds.

    `retract`: requests that hold KV give it back and compute it again, instead of being in the way.
    """

    endpoint = Endpoint(path="/flush_cache", methods=GET_AND_POST, timeout_s=30.0, hidden=frozenset({"retract"}))

    retract: bool = False


MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


class ReleaseReply(Reply, kw_only=True):
    """`memory`: the state of every tag."""

    released: list[MemoryTag]
    num_bytes: int
    memory: dict[str, str]


class ReleaseMemoryOccupationReqInput(ControlReqInput[ReleaseReply]):
    """Give the memory of `tags` back to the system; null or empty: of all that have theirs.

    409 while requests run or if it was released already.
    """

    endpoint = Endpoint(path="/release_memory_occupation", methods=GET_AND_POST)

    tags: list[MemoryTag] | None = None


class ResumeReply(Reply, kw_only=True):
    resumed: list[MemoryTag]
    memory: dict[str, str]


class ResumeMemoryOccupationReqInput(ControlReqInput[ResumeReply]):
    """Take the memory of `tags` again; null or empty: of all that were released.  409 if it is not released."""

    endpoint = Endpoint(path="/resume_memory_occupation", methods=GET_AND_POST)

    tags: list[MemoryTag] | None = None


class GetStateReqInput(ControlReqInput[SchedulerState]):
    """Counts, memory, version and health of the scheduler."""

    endpoint = Endpoint(timeout_s=10.0)


class ShutdownReqInput(ControlReqInput[NoReply]):
    """Finish what runs within `drain_s` seconds, abort the rest, answer, and exit 0."""

    drain_s: float = 5.0


VERBS: tuple[type[ControlReqInput[Any]], ...] = (
    PauseGenerationReqInput,
    GiveUpPauseReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    GetStateReqInput,
    ShutdownReqInput,
    *session_io_struct.VERBS,
    *profile_io_struct.VERBS,
    *weight_io_struct.VERBS,
    *weight_check_io_struct.VERBS,
    *expert_io_struct.VERBS,
    *adapter_io_struct.VERBS,
)
"""Every control verb."""

SchedulerInput = TokenizedGenerateReqInput | AbortReqInput | ControlReqInput[Any]

# --- scheduler -> main -------------------------------------------------------------------------------------------


class BatchTokenOutput(Message):
    outputs: list[ReqOutput]


class SchedulerReady(Message):
    """Sent once by every data-parallel rank, when it can serve."""

    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    capture_routed_experts: bool
    num_threads: int
    num_parameters: int  # of the whole model
    model_bytes: int  # of this rank's share
    weight_version: str
    adapters: list[AdapterCard] = []


class SchedulerFailed(Message):
    """Sent by a scheduler that is about to exit with an error."""

    message: str
    traceback: str = ""


SchedulerOutput = BatchTokenOutput | ControlReqOutput[Any] | AdaptersChanged | SchedulerReady | SchedulerFailed


_encoder = msgspec.msgpack.Encoder()
_input_decoder: msgspec.msgpack.Decoder[SchedulerInput] = msgspec.msgpack.Decoder(
    Union[(TokenizedGenerateReqInput, AbortReqInput, *VERBS)]
)
_output_decoder: msgspec.msgpack.Decoder[SchedulerOutput] = msgspec.msgpack.Decoder(SchedulerOutput)


def encode(message: Any) -> bytes:
    """Encode any message above as msgpack bytes."""
    return _encoder.encode(message)


def decode_input(data: bytes) -> SchedulerInput:
    """Decode a message to the scheduler.  Raises `msgspec.ValidationError` if it is no `SchedulerInput`."""
    return _input_decoder.decode(data)


def decode_output(data: bytes) -> SchedulerOutput:
    """Decode a message of the scheduler.  Raises `msgspec.ValidationError` if it is no `SchedulerOutput`."""
    return _output_decoder.decode(data)
