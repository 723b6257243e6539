"""The trainer's side of a refresh: tensors of a model, whole or sharded, to one engine or many, in one transaction.

    source        the trainer's tensors of one refresh, and the form by which a plan for them is known again
    plan          what is sent: names, dtypes, and which part of which of the trainer's tensors each one is
    shards        which boxes of a tensor each trainer rank holds
    shares        what of a tensor that is sent each rank brings, and where it lies there
    layout        where each bucket's bytes come from and go to
    views         contents of tensors as flat views, and how they are packed
    lists         names, dtypes and shapes as engines get them; the manifest
    refresh_plan  all of that for one form of source, kept from refresh to refresh
    ranks         collectives of the trainer ranks, with deadlines
    gather        a bucket's bytes on the sending rank; fingerprints
    rooms         the memory that buckets are packed in, which engines may map
    carriers      how pieces reach the engines of a group: broadcasts, or notices of what lies in memory
    link          one engine: its calls, the group that it is in, a bucket on its way, leaving
    meeting       how engines join groups with this process
    rank_groups   a group with each rank of an engine, and what its ranks keep
    rank_plan     the calls that send each rank of an engine what it keeps
    rank_refresh  a refresh of that kind: what ranks keep is asked, and asked again where experts have moved
    update        one transaction on many engines, as a context manager; who takes part, what one's failure means for
                  the others and the end in two phases are in `weight_sync/joint_update.py`
    refresh       one call of `refresh`: what it sends, and who was lost in earlier attempts
    sender        `WeightSender`, which joins all this
    shard         parts of tensors by their boxes, which rank sends which, and how
    shard_sender  `ShardSender`: ranks that each send their own shards, at once

Needs torch only.
"""

from weight_sync.engine_control import EngineControl, EngineError
from weight_sync.joint_update import EngineReport, OnEngineFailure
from weight_sync.sender.plan import NamedTensors, named_tensors_of, split_fused_experts
from weight_sync.sender.report import ProgressBar, RefreshReport
from weight_sync.sender.sender import WeightSender
from weight_sync.sender.shard import Shard
from weight_sync.sender.shard_sender import ShardSender
from weight_sync.sender.update import WeightUpdate

__all__ = [
    "EngineControl",
    "EngineError",
    "EngineReport",
    "NamedTensors",
    "OnEngineFailure",
    "ProgressBar",
    "RefreshReport",
    "Shard",
    "ShardSender",
    "WeightSender",
    "WeightUpdate",
    "named_tensors_of",
    "split_fused_experts",
]
