"""The control verbs of the profiler: both by GET and POST, as SGLang has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from rollout.core.messages.message import GET_AND_POST, ControlReqInput, Endpoint, Limits, Reply

MAX_PROFILED_STEPS = 50


class ProfileReply(Reply, kw_only=True):
    """`files`: of all ranks."""

    files: list[str]


class StartProfileReqInput(ControlReqInput[ProfileReply]):
    """Record the next `num_steps` steps with torch's profiler (null: all, up to 50), one file a rank, into `output_dir`
    (null: the system's temporary folder); the `files` are written at the stop, or after `num_steps`.

    `num_steps` and `max_iterations` are one setting, of SGLang's and of vLLM's clients.
    """

    endpoint = Endpoint(
        path="/start_profile",
        methods=GET_AND_POST,
        tag="profile",
        timeout_s=60.0,
        other_names={"max_iterations": "num_steps"},
        refuses=frozenset({"start_step", "delay_iterations", "profile_by_stage", "profile_stages", "merge_profiles"}),
    )

    output_dir: Annotated[str, Limits(pattern="^/+[^/]", max_length=4096)] | None = None
    profile_prefix: Annotated[str, Limits(pattern=r"^[\w.-]{1,64}$")] = "lockstep"
    num_steps: Annotated[int, Limits(ge=1, le=MAX_PROFILED_STEPS)] | None = None
    activities: list[Literal["CPU", "GPU"]] = msgspec.field(default_factory=lambda: ["CPU", "GPU"])
    with_stack: bool = False
    record_shapes: bool = False


class StopProfileReqInput(ControlReqInput[ProfileReply]):
    """Write the trace; answered when it is there."""

    endpoint = Endpoint(path="/stop_profile", methods=GET_AND_POST, tag="profile", timeout_s=600.0)


VERBS: tuple[type[ControlReqInput[Any]], ...] = (StartProfileReqInput, StopProfileReqInput)
