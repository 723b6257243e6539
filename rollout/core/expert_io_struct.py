"""The control verbs that concern experts: the load recorder and the placement, as messages to the scheduler.

A verb is a struct here and a member of `ExpertVerb`; how it is carried out is `rollout.scheduler`'s business.
"""

from __future__ import annotations

from typing import Literal

from rollout.core.message import ControlReqInput

RecorderModeName = Literal["stat", "per_pass", "per_token"]


class StartExpertDistributionReqInput(ControlReqInput):
    mode: RecorderModeName | None = None  # None: the server's


class StopExpertDistributionReqInput(ControlReqInput):
    pass


class DumpExpertDistributionReqInput(ControlReqInput):
    """Answered by `eplb.load_dump.LoadDump.to_message` under `dump`; more than `most_numbers` are refused."""

    reset: bool = True
    most_numbers: int | None = None


class GetExpertLocationReqInput(ControlReqInput):
    """The map in force, with its epoch and the weights' of the same moment."""


class EplbRebalanceReqInput(ControlReqInput):
    """Plan from the loads so far, or take the given placement, and move experts unless it is a `dry_run`.

    None: as the server was started.  `physical_to_logical_map` [L, P], `split` [L, P]: how an expert's tokens are
    divided over its slots.
    """

    dry_run: bool = False
    algorithm: str | None = None
    layers_per_chunk: int | None = None
    most_stall_s: float | None = None
    physical_to_logical_map: list[list[int]] | None = None
    split: list[list[float]] | None = None


ExpertVerb = (
    StartExpertDistributionReqInput
    | StopExpertDistributionReqInput
    | DumpExpertDistributionReqInput
    | GetExpertLocationReqInput
    | EplbRebalanceReqInput
)
