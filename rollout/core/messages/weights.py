"""The control verbs that concern weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from rollout.core.messages.message import (
    GET_AND_POST,
    AnyReply,
    ControlReqInput,
    Endpoint,
    Limits,
    Name,
    NoReply,
    Reply,
    Size,
    Total,
    UpdateId,
)
from rollout.core.messages.sender_memory import SenderMemory
from rollout.core.messages.tensor_lists import (
    Boxes,
    Lists,
    ManifestEntry,
    ManifestLists,
    WithLists,
    decode_lists,
    digest_of,
    encode_lists,
    pieces_of,
)
from rollout.core.messages.update_state import AdapterOfUpdate, CommitReply, TargetOfUpdate, UpdateStateReply
from rollout.core.messages.weight_parts import WeightPartsReqInput
from rollout.core.messages.weight_replies import CheckerReply, DropSnapshotReply, PullReply, VersionReply, WeightsReply
from rollout.core.messages.whole_update import JoinedReply, Seconds, WholeUpdate

_MANIFEST_AS_JSON = ("manifest_entries", "manifest_lists", "manifest_digest", "manifest_fingerprints")
Selector = Literal["all", "target", "draft"]
_FLUSH = {"flush_cache": (bool, True)}
"""SGLang's: here a refresh never has old prefixes matched, and the cache need not be emptied."""
Port = Annotated[int, Limits(ge=0, le=65535)]
PackedBytes = Annotated[int, Limits(ge=1, lt=2**48)]
DEFAULT_GROUP = "weight_update_group"

# --- replies -----------------------------------------------------------------------------------------------------


class BucketReply(CommitReply, kw_only=True):
    """`weight_update`: the state of the open update, unless this call was one of its own."""

    weight_update: UpdateStateReply | UnsetType = UNSET


class DiskReply(BucketReply, kw_only=True):
    num_paused_requests: Total | UnsetType = UNSET
    model_path: str | UnsetType = UNSET


class BeginReply(Reply, kw_only=True):
    update_id: str


# --- groups ------------------------------------------------------------------------------------------------------


class InitWeightsUpdateGroupReqInput(ControlReqInput[JoinedReply]):
    """Join a process group with the trainer, or each rank one of two at its port; replies when all are there."""

    endpoint = Endpoint(path="/init_weights_update_group", aliases=("/areal_init_weights_update_group",), tag="weights")

    master_address: str
    master_port: Port
    rank_offset: Annotated[int, Limits(ge=0, lt=2**31)]
    world_size: Annotated[int, Limits(ge=1, lt=2**31)]
    group_name: str = DEFAULT_GROUP
    backend: str | None = None
    rank_ports: list[Port] | None = None
    memory: SenderMemory | None = None


class DestroyWeightsUpdateGroupReqInput(ControlReqInput[NoReply]):
    """Leave a process group."""

    endpoint = Endpoint(path="/destroy_weights_update_group", tag="weights")

    group_name: str = DEFAULT_GROUP


# --- one update --------------------------------------------------------------------------------------------------


class OfUpdateReqInput(ControlReqInput[AnyReply], kw_only=True):
    """Base of the verbs that may name their weight update: they are refused unless it is open."""

    update_id: UpdateId | None = None


class BeginWeightUpdateReqInput(OfUpdateReqInput[BeginReply]):
    """Open a weight update.  Nothing changes for requests until it ends.

    `update_id`: chosen by the sender, all of whose calls must carry it then; null: the request's id becomes it.
    `per_rank`: each rank is sent what it keeps under the expert map of `placement_epoch`, see `/weight_parts`.
    `target`: an adapter or the draft; null: the model, which keeps its `adapters`, or gets these with it, or is refused
    with any.  `selector`, SGLang's: "all" is the model, with the draft's tensors if they come, "target" without them.
    `sync_base` false, SGLang's: registered adapters alone come.
    """

    endpoint = Endpoint(
        path="/begin_weight_update",
        tag="weights",
        hidden=frozenset({"counts_tensors", *_MANIFEST_AS_JSON}),
    )

    weight_version: str | None = None
    coverage: Literal["full", "partial"] = "full"
    manifest: list[ManifestEntry] | ManifestLists | None = None
    base_version: str | None = None  # what must be in force, or the update is refused
    base_digest: Annotated[str, Limits(pattern="^[0-9a-fA-F]{64}$")] | None = None
    placement_epoch: Size | None = None  # of the expert map that the sender goes by: it must be, and stays, in force
    adopt_placement: bool | None = None  # put a fresh expert map in force with the weights; None: the server's default
    lease_s: Annotated[float, Limits(gt=0, le=86400)] | None = None  # until the next bucket or the end; None: 600
    per_rank: bool = False
    target: TargetOfUpdate | None = None
    adapters: Literal["keep", "refuse"] | list[AdapterOfUpdate] = "keep"
    selector: Selector = "all"
    sync_base: bool = True
    prepared_s: Seconds | None = None  # that the sender worked before, for the record
    cast: bool | None = None  # tensors of other floating-point types to the model's; None: --cast-weight-updates
    counts_tensors: bool = False  # the label states how many came if not all did, as no part was announced
    # In place of a manifest, as it came in JSON: of entries; or of lists, see `UpdateWeightsFromDistributedReqInput`.
    manifest_entries: bytes | None = None
    manifest_lists: bytes | None = None
    manifest_digest: bytes | None = None
    manifest_fingerprints: str | None = None  # of the tensors in `manifest_lists`

    @property
    def has_manifest(self) -> bool:
        return not (self.manifest is None and self.manifest_entries is None and self.manifest_lists is None)

    def entries(self) -> Iterator[ManifestEntry]:
        """Yield the entries of a manifest of entries; JSON is decoded in pieces."""
        if self.manifest_entries is not None:
            for piece in pieces_of(self.manifest_entries, list[ManifestEntry]):
                yield from piece
        elif isinstance(self.manifest, list):
            yield from self.manifest

    def lists(self) -> Lists | None:
        """Return the names, dtypes and shapes of a manifest in lists; None where there is none."""
        if self.manifest_lists is not None:
            return decode_lists(self.manifest_lists)
        stated = self.manifest
        return Lists(stated.names, stated.dtypes, stated.shapes) if isinstance(stated, ManifestLists) else None

    def digest(self) -> bytes | None:
        """Return the digest of a manifest's lists, which a bucket of the same lists has, too; None: it has no lists."""
        if self.manifest_digest is not None:
            return self.manifest_digest
        lists = self.lists()
        return None if lists is None else digest_of(encode_lists(*lists))

    def fingerprints(self) -> str | None:
        """Return the fingerprints of a manifest in lists, 16 hex digits each, end to end; None: it states none."""
        return self.manifest.fingerprints if isinstance(self.manifest, ManifestLists) else self.manifest_fingerprints


class EndWeightUpdateReqInput(OfUpdateReqInput[CommitReply]):
    """Verify what came and put it in force, all or nothing; with a `phase`, only one of the two.

    `weight_version`: in place of the label so far.  `expected_lora_checksums`: the SHA-256 of the bytes of each tensor,
    in hex, by adapter and name; others than these refuse the update.  `abort`, SGLang's: drop the update instead.
    """

    endpoint = Endpoint(path="/end_weight_update", tag="weights", hidden=frozenset({"weight_version"}))

    phase: Literal["verify", "commit"] | None = None
    expected_lora_checksums: dict[str, dict[str, str]] | None = None
    abort: bool = False
    weight_version: str | None = None


class AbortWeightUpdateReqInput(OfUpdateReqInput[NoReply]):
    """Drop the open weight update.  The answer states which weights serve."""

    endpoint = Endpoint(path="/abort_weight_update", tag="weights")


class GetWeightUpdateReqInput(OfUpdateReqInput[UpdateStateReply]):
    """The open weight update: what came, what is missing, its lease; and why the last one failed.

    With an `update_id`: the outcome of that update.  Answered at once.
    """

    endpoint = Endpoint(path="/weight_update", methods=("GET",), query=("GET",), tag="weights", shape="bare")


# --- tensors -----------------------------------------------------------------------------------------------------


class UpdateWeightsReqInput(OfUpdateReqInput[AnyReply], kw_only=True):
    """Base of the verbs that bring tensors.  `weight_version` names what they make up; `selector`: as at begin."""

    weight_version: str | None = None
    abort_all_requests: bool = False
    selector: Selector = "all"


class BringsTensorsReqInput(UpdateWeightsReqInput[AnyReply], kw_only=True):
    """Base of the verbs whose tensors are a trainer's own, and no checkpoint.

    `cast`: take tensors of other floating-point types than the model's, also where the cast loses something; null: as
    the update began, or --cast-weight-updates.
    """

    cast: bool | None = None


class UpdateWeightsFromDistributedReqInput(WithLists, BringsTensorsReqInput[BucketReply], kw_only=True):
    """Receive tensors by broadcast from rank 0 of the group.

    `boxes`: of each tensor null, or the part of it that comes, dense: its [start, stop] in each dimension of `shapes`,
    which has the full shape.  Several senders may send boxes of one tensor, each in a group of its own.

    `tensors_per_rank`: the number of tensors that are sent to each rank, and to no other; rank 0's come first in the
    lists, then rank 1's.  For an update that began with `per_rank`.
    `memory`: of rank 0, in which the `pieces` lie end to end; it broadcasts a notice of each.
    `tensor_lists`: the JSON object of the lists as it came, which are empty then.  `lists_digest`: of its bytes.
    A body's `whole_update` begins the update `update_id` before the tensors, and ends it behind them: see
    `WholeUpdate`.  The answer is that of the end then.
    """

    endpoint = Endpoint(
        path="/update_weights_from_distributed",
        tag="weights",
        hidden=frozenset({"tensor_lists", "lists_digest"}),
        accepts=_FLUSH | {"whole_update": (WholeUpdate | None, None)},
        timed_as="distributed",
    )

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    boxes: Boxes | None = None
    group_name: str = DEFAULT_GROUP
    load_format: str | None = None
    packed_buffer_size_bytes: PackedBytes | None = None  # of a buffer with `load_format` "packed"
    tensors_per_rank: list[Size] | None = None
    memory: SenderMemory | None = None
    tensor_lists: bytes | None = None
    lists_digest: bytes | None = None


class RefusedBucketReqInput(UpdateWeightsReqInput[BucketReply], kw_only=True):
    """A call of `UpdateWeightsFromDistributedReqInput` that could not be read, and why.

    Its broadcast may be on its way.  `group_name` None: not even that could be read.
    """

    reason: str
    group_name: str | None


class UpdateWeightsFromDiskReqInput(UpdateWeightsReqInput[DiskReply], kw_only=True):
    """Load a checkpoint folder, all or nothing; `model_path` in /model_info changes only on success.

    `pulled_version`: the version to which /pull_weights must have brought the folder; null: any.  The fields from
    `flush_cache` on are SGLang's and change nothing here.
    """

    endpoint = Endpoint(
        path="/update_weights_from_disk",
        aliases=("/areal_update_weights",),
        tag="weights",
        accepts=_FLUSH
        | dict.fromkeys(("is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph"), (bool, False))
        | {"token_step": (int, 0)},
        timed_as="disk",
    )

    model_path: Name
    load_format: str | None = None
    pulled_version: Size | None = None


class PullWeightsReqInput(OfUpdateReqInput[PullReply], kw_only=True):
    """Bring a local checkpoint folder to a published version and, if asked, the weights that serve.

    As slime and miles send it; `update_memory` and `weight_version` (null: the target version) are our own.
    """

    endpoint = Endpoint(path="/pull_weights", tag="weights")

    local_checkpoint_dir: Name
    source_dir: Name
    target_version: Size
    update_memory: bool = False
    weight_version: str | None = None


class UpdateWeightsFromIPCReqInput(BringsTensorsReqInput[BucketReply], kw_only=True):
    """Receive tensors from a parameter server on this machine, as a worker of checkpoint-engine does.

    `zmq_handles`: address of the sender's socket, by device.
    """

    endpoint = Endpoint(path="/update_weights_from_ipc", tag="weights", accepts=_FLUSH, timed_as="ipc")

    zmq_handles: dict[str, str]


class UpdateWeightsFromTensorReqInput(BringsTensorsReqInput[BucketReply], kw_only=True):
    """Receive tensors that are in the body, or in shared memory of this machine.

    They are in `payload`, for all ranks, in `payloads`, one for each rank of an engine, or in shared memory; a body has
    them in base64.  `format` null: pickled as SGLang's clients do.  `serialized_once`: fewer times than there are ranks
    to read it.
    """

    endpoint = Endpoint(
        path="/update_weights_from_tensor",
        tag="weights",
        hidden=frozenset({"payload", "payloads", "serialized_once"}),
        accepts=_FLUSH | {"serialized_named_tensors": (list[str] | None, None)},
        timed_as="tensor",
    )

    payload: bytearray | None = None
    payloads: list[bytearray] | None = None
    serialized_once: bool = False
    load_format: str | None = None
    format: Literal["safetensors"] | None = None
    shm_name: str | None = None
    shm_bytes: Annotated[int, Limits(ge=8, lt=2**48)] | None = None
    shm_unlink: bool = False


# --- labels and content ------------------------------------------------------------------------------------------


class UpdateWeightVersionReqInput(OfUpdateReqInput[VersionReply], kw_only=True):
    """Rename the version in force, or the one being received."""

    endpoint = Endpoint(path="/update_weight_version", tag="weights")

    new_version: Name
    abort_all_requests: bool = True


class GetWeightsByNameReqInput(ControlReqInput[WeightsReply]):
    """The first `truncate_size` rows of a tensor as nested lists."""

    endpoint = Endpoint(path="/get_weights_by_name", methods=GET_AND_POST, query=("GET",), tag="weights")

    name: str
    truncate_size: Annotated[int, Limits(ge=0, lt=2**31)] = 100


class WeightsCheckerReqInput(ControlReqInput[CheckerReply]):
    """Fingerprints of all logical tensors and their digest; a snapshot of them, or a comparison with it."""

    endpoint = Endpoint(
        path="/weights_checker",
        methods=GET_AND_POST,
        tag="weights",
        accepts={"selector": (Literal["all", "target"], "all"), "allow_quant_error": (bool, False)},
    )

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    keep_content: bool = False
    skip_tensor_list: list[str] | None = None


class DropWeightSnapshotReqInput(ControlReqInput[DropSnapshotReply]):
    """Forget the snapshot of `/weights_checker`, and give its memory back; without one nothing happens."""

    endpoint = Endpoint(path="/drop_weight_snapshot", tag="weights")


VERBS: tuple[type[ControlReqInput[Any]], ...] = (
    InitWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    AbortWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    WeightPartsReqInput,
    UpdateWeightsFromDistributedReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDiskReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    GetWeightsByNameReqInput,
    WeightsCheckerReqInput,
    DropWeightSnapshotReqInput,
)
