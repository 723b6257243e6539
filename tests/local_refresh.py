"""A refresh of a scheduler harness with tensors from the test itself, without a group or a second process."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import torch

from rollout.control.control import Control
from rollout.control.io_thread import IoThread
from rollout.core.messages.io_struct import ControlReqOutput, GetStateReqInput
from rollout.core.messages.weights import BeginWeightUpdateReqInput, EndWeightUpdateReqInput
from tests.loopback_updater import LoopbackSource
from tests.scheduler_harness import Harness
from weight_sync.updater import WeightUpdater


def control_of(harness: Harness) -> Control:
    """Return the object that answers the control verbs."""
    return harness.scheduler._verbs[GetStateReqInput].__self__  # type: ignore[attr-defined]


def updater_of(harness: Harness) -> WeightUpdater:
    """Return the updater behind the harness's weight verbs; free to use while no verb is under way."""
    return control_of(harness)._weights._updater


def io_of(harness: Harness) -> IoThread:
    """Return the thread on which weight verbs do their input and output."""
    return control_of(harness)._weights._queue._io


def deliver(harness: Harness, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one bucket into the open weight update, and let the next turn see it as it sees the end of a verb."""
    updater = updater_of(harness)
    update_id = updater.update.id if updater.update is not None and updater.update.is_bound else None
    updater.receive(LoopbackSource(list(tensors.items())), update_id=update_id)
    control_of(harness)._weights._queue.call()


def refresh(
    harness: Harness, tensors: Mapping[str, torch.Tensor], weight_version: str, coverage: str = "full"
) -> ControlReqOutput:
    """Refresh in one bucket between begin and end; return the answer to end."""
    update_id = uuid.uuid4().hex
    fields = {"weight_version": weight_version, "coverage": coverage, "update_id": update_id}
    begun = harness.control(BeginWeightUpdateReqInput, **fields)
    assert begun.success, begun.message
    deliver(harness, tensors)
    return harness.control(EndWeightUpdateReqInput, update_id=update_id)
