"""Which verb brings tensors by which transport: one line each.

Knows verbs and transports.  Does not know transactions: `weight_control` decides what a call opens and settles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.core.weight_io_struct import (
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqInput,
)
from weight_sync.receivers.base import BucketSource
from weight_sync.updater import WeightUpdater

SourceFactory = Callable[[Any, WeightUpdater], BucketSource]


def _distributed(verb: UpdateWeightsFromDistributedReqInput, updater: WeightUpdater) -> BucketSource:
    return updater.distributed_source(verb.names, verb.dtypes, verb.shapes, verb.group_name, verb.load_format)


def _ipc(verb: UpdateWeightsFromIPCReqInput, updater: WeightUpdater) -> BucketSource:
    return updater.ipc_source(verb.zmq_handles)


SOURCES: dict[type[UpdateWeightsReqInput], SourceFactory] = {
    UpdateWeightsFromDistributedReqInput: _distributed,
    UpdateWeightsFromIPCReqInput: _ipc,
}
"""A factory runs on the I/O thread and does no more than construct: reading and checking is the source's."""
