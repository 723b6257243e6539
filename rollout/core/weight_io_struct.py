"""The control verbs that concern weights, as messages to the scheduler.

A verb is a struct here and a member of `WeightVerb`; how it is carried out is `rollout.scheduler`'s business.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout.core.message import ControlReqInput


class InitWeightsUpdateGroupReqInput(ControlReqInput):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str | None = None


class DestroyWeightsUpdateGroupReqInput(ControlReqInput):
    group_name: str = "weight_update_group"


class ManifestEntry(msgspec.Struct, kw_only=True):
    """What the trainer says of one logical tensor before sending it."""

    name: str
    dtype: str
    shape: list[int]
    fingerprint: str | None = None  # 16 hex digits, see weight_sync.fingerprint


class OfUpdateReqInput(ControlReqInput, kw_only=True):
    """Base of the verbs that may say to which weight update they belong: one that is not open refuses them."""

    update_id: str | None = None


class BeginWeightUpdateReqInput(OfUpdateReqInput):
    """`update_id`: chosen by the sender, all of whose calls must carry it then; None: the request's id becomes it."""

    weight_version: str | None = None
    coverage: Literal["full", "partial"] = "full"
    manifest: list[ManifestEntry] | None = None
    base_version: str | None = None  # what must be in force, or the update is refused
    base_digest: str | None = None
    placement_epoch: int | None = None  # of the expert map that the sender goes by: it must be, and stays, in force
    adopt_placement: bool | None = None  # put a fresh expert map in force with the weights; None: the server's default
    lease_s: float | None = None  # seconds that the next bucket or the end may take; None: 600


class EndWeightUpdateReqInput(OfUpdateReqInput):
    phase: Literal["verify", "commit"] | None = None  # None: both
    weight_version: str | None = None  # in place of the label so far


class AbortWeightUpdateReqInput(OfUpdateReqInput):
    pass


class GetWeightUpdateReqInput(OfUpdateReqInput):
    """The open update, or, with an id, what became of that one.  Answered at once."""


class UpdateWeightsReqInput(OfUpdateReqInput, kw_only=True):
    """Base of the verbs that bring tensors.  `weight_version` names what they make up."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateWeightsFromDistributedReqInput(UpdateWeightsReqInput, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    packed_buffer_size_bytes: int | None = None
    """Of `load_format` "packed"."""


class RefusedBucketReqInput(UpdateWeightsReqInput, kw_only=True):
    """A call of `UpdateWeightsFromDistributedReqInput` that could not be read, and why.

    Its broadcast may be on its way.  `group_name` None: not even that could be read.
    """

    reason: str
    group_name: str | None


class UpdateWeightsFromDiskReqInput(UpdateWeightsReqInput, kw_only=True):
    model_path: str
    load_format: str | None = None


class PullWeightsReqInput(OfUpdateReqInput, kw_only=True):
    local_checkpoint_dir: str
    source_dir: str
    target_version: int
    update_memory: bool = False  # bring the weights that serve to the same version
    weight_version: str | None = None  # label of these; None: the target version


class UpdateWeightsFromIPCReqInput(UpdateWeightsReqInput, kw_only=True):
    zmq_handles: dict[str, str]  # address of the sender's socket, by device


class UpdateWeightsFromTensorReqInput(UpdateWeightsReqInput, kw_only=True):
    """The tensors are in `payload`, for all ranks, in `payloads`, one for each rank of an engine, or in shared memory.

    `format` None: pickled as SGLang's clients do.  `serialized_once`: fewer times than there are ranks to read it.
    """

    payload: bytearray | None = None
    payloads: list[bytearray] | None = None
    serialized_once: bool = False
    load_format: str | None = None
    format: Literal["safetensors"] | None = None
    shm_name: str | None = None
    shm_bytes: int | None = None
    shm_unlink: bool = False


class UpdateWeightVersionReqInput(OfUpdateReqInput, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class GetWeightsByNameReqInput(ControlReqInput):
    name: str
    truncate_size: int = 100


class WeightsCheckerReqInput(ControlReqInput):
    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    keep_content: bool = False
    skip_tensor_list: list[str] | None = None


WeightVerb = (
    InitWeightsUpdateGroupReqInput
    | DestroyWeightsUpdateGroupReqInput
    | BeginWeightUpdateReqInput
    | EndWeightUpdateReqInput
    | AbortWeightUpdateReqInput
    | GetWeightUpdateReqInput
    | UpdateWeightsFromDistributedReqInput
    | RefusedBucketReqInput
    | UpdateWeightsFromDiskReqInput
    | PullWeightsReqInput
    | UpdateWeightsFromIPCReqInput
    | UpdateWeightsFromTensorReqInput
    | UpdateWeightVersionReqInput
    | GetWeightsByNameReqInput
    | WeightsCheckerReqInput
)
