"""The trainer's side of a refresh: tensors of a model, whole or sharded, to one engine or many, in one transaction.

    plan      what is sent: names, dtypes, and which part of which of the trainer's tensors each one is
    shards    which trainer rank holds what of it
    ranks     collectives of the trainer ranks, with deadlines
    gather    a bucket's bytes on the sending rank; fingerprints
    link      one engine: its group, its calls, a bucket on its way
    update    one transaction on many engines, as a context manager; who takes part, what one's failure means for the
              others and the end in two phases are in `weight_sync/joint_update.py`
    sender    `WeightSender`, which joins all this

Needs torch only.
"""

from weight_sync.engine_control import EngineControl, EngineError
from weight_sync.joint_update import EngineReport, OnEngineFailure
from weight_sync.sender.plan import NamedTensors, named_tensors_of, split_fused_experts
from weight_sync.sender.report import ProgressBar, RefreshReport
from weight_sync.sender.sender import WeightSender
from weight_sync.sender.update import WeightUpdate

__all__ = [
    "EngineControl",
    "EngineError",
    "EngineReport",
    "NamedTensors",
    "OnEngineFailure",
    "ProgressBar",
    "RefreshReport",
    "WeightSender",
    "WeightUpdate",
    "named_tensors_of",
    "split_fused_experts",
]
