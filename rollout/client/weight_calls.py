"""The methods of both clients that concern weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollout.client.method import method
from rollout.client.wire import Call, JsonObject, field_of, json_of, method_call, object_of, verb_call
from rollout.core.messages.weight_parts import WeightPartsReqInput
from rollout.core.messages.weights import (
    DEFAULT_GROUP,
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    GetWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)


class WeightCalls:
    """The calls of a sender of weights, and its checks.

    A `weight_sync.json_lists.JsonList` among the arguments is sent as the JSON that it keeps.
    """

    takes_lists = True  # a manifest may be an object of lists: `EngineControl`

    @method
    def weight_version(self) -> Call[str]:
        """Return the label of the weights that serve now."""
        return Call("GET", "/weight_version", field_of("weight_version", str))

    @method
    def get_world_size(self) -> Call[int]:
        """Return how many ranks of the server join a process group."""
        return Call("GET", "/get_world_size", field_of("world_size", int))

    @method
    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str | None = None,
        rank_ports: Sequence[int] | None = None,
        memory: Mapping[str, int] | None = None,
    ) -> Call[JsonObject]:
        """Make the server join a process group; returns once all ranks have met, so join on another thread.

        `backend` None: the one that fits the server's device.  `rank_ports`: a port of the caller for each rank, which
        joins it there in a group of two.  `memory`: of the caller, with a token that the answer has if every rank can
        map it (`weight_sync.sealed_memory`).
        """
        return method_call(InitWeightsUpdateGroupReqInput, locals())

    @method
    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> Call[JsonObject]:
        """Make the server leave a process group."""
        return method_call(DestroyWeightsUpdateGroupReqInput, locals())

    @method
    def begin_weight_update(
        self,
        weight_version: str | None = None,
        coverage: str = "full",
        manifest: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
        *,
        base_version: str | None = None,
        base_digest: str | None = None,
        lease_s: float | None = None,
        update_id: str | None = None,
        prepared_s: float | None = None,
        cast: bool | None = None,
        placement_epoch: int | None = None,
        per_rank: bool = False,
        target: Mapping[str, Any] | None = None,
        adapters: Literal["keep", "refuse"] | Sequence[Mapping[str, Any]] | None = None,
    ) -> Call[JsonObject]:
        """Open a refresh of all tensors (`coverage` "full") or of some ("partial").

        `manifest`: {"name", "dtype", "shape", "fingerprint"} of the tensors to come, or one object of lists: "names",
        "dtypes", "shapes", and "fingerprints", the 16 hex digits of each end to end.  `base_version`, `base_digest`:
        refused unless these weights are in force.  `lease_s`: how long the next bucket or the end may take.
        `update_id`: a name for this refresh; then every call must carry it, and begin may be repeated.  `prepared_s`:
        how long the sender worked before this call, for the record.  `cast`: take floating-point tensors of any dtype,
        also where the cast to the model's loses something.  `placement_epoch`: of the expert map, which must be in
        force and stays.  `per_rank`: each rank will be sent what it keeps (`weight_parts`).  `target`: {"adapter",
        "config"}, the name of an adapter and PEFT's configuration, or {"draft": True}; None: the model.  `adapters`:
        "refuse" to have the refresh refused while the server has adapters, or targets of adapters that come with the
        model.
        """
        return method_call(BeginWeightUpdateReqInput, locals() | {"per_rank": per_rank or None})

    @method
    def weight_parts(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Call[JsonObject]:
        """Ask which parts of these tensors each rank keeps, and under which `placement_epoch`.

        `patterns`: for each rank null (all of a tensor) or boxes; `tensors`: the place in it of each tensor's.
        """
        return method_call(WeightPartsReqInput, locals())

    @method
    def weight_update(self, update_id: str | None = None) -> Call[JsonObject]:
        """Describe the open refresh: the tensors that came, the missing ones, its lease; and why the last one failed.

        With an `update_id`: the outcome of that refresh (`outcome`: open, verified, committed, lost, aborted, unknown).
        """
        return verb_call(GetWeightUpdateReqInput, object_of, update_id=update_id)

    @method
    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = False,
        update_id: str | None = None,
        cast: bool | None = None,
        boxes: Sequence[Sequence[Sequence[int]] | None] | None = None,
        tensors_per_rank: Sequence[int] | None = None,
        memory: Mapping[str, int] | None = None,
        whole_update: Mapping[str, Any] | None = None,
    ) -> Call[JsonObject]:
        """Make the server receive these tensors; answers when it has them, so broadcast on another thread.

        `boxes`: of each tensor None, or the part of it that comes: [start, stop] in each dimension of its shape.
        `tensors_per_rank`: how many of them, in their order, come to each rank, and to no other.  `memory`: of the
        caller, in which they lie; a notice of each piece is broadcast.
        `whole_update`: they are all of the refresh `update_id`, which this call begins and ends; "coverage" and
        "prepared_s" as in `begin_weight_update`, and "fingerprints", the 16 hex digits of each tensor end to end.
        """
        return method_call(UpdateWeightsFromDistributedReqInput, locals())

    @method
    def update_weights_from_ipc(
        self,
        zmq_handles: Mapping[str, str],
        weight_version: str | None = None,
        flush_cache: bool = False,
        update_id: str | None = None,
        cast: bool | None = None,
    ) -> Call[JsonObject]:
        """Make the server receive a checkpoint from a parameter server next to it; answers at the end of that.

        `zmq_handles`: address of the parameter server's socket by the server's device ("GPU-..." or "cpu").
        """
        return method_call(UpdateWeightsFromIPCReqInput, locals())

    @method
    def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        update_id: str | None = None,
        pulled_version: int | None = None,
    ) -> Call[JsonObject]:
        """Make the server load a checkpoint folder of its machine; refused, and nothing changed, if it does not fit.

        `pulled_version`: the version to which `pull_weights` must have brought the folder.
        """
        return method_call(UpdateWeightsFromDiskReqInput, locals())

    @method
    def pull_weights(
        self,
        local_checkpoint_dir: str,
        source_dir: str,
        target_version: int,
        update_memory: bool = False,
        weight_version: str | None = None,
        update_id: str | None = None,
    ) -> Call[JsonObject]:
        """Make the server bring a checkpoint folder of its machine to a version published in `source_dir`.

        `update_memory`: then also update the weights that serve, under `weight_version` (default: the version number).
        """
        return method_call(PullWeightsReqInput, locals())

    @method
    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[bytes | str] | None = None,
        *,
        load_format: str | None = None,
        format: str | None = None,
        shm_name: str | None = None,
        shm_bytes: int | None = None,
        shm_unlink: bool = False,
        weight_version: str | None = None,
        flush_cache: bool = False,
        update_id: str | None = None,
        cast: bool | None = None,
    ) -> Call[JsonObject]:
        """Send tensors in the body, one payload a rank (bytes, or their base64), or name shared memory that holds them.

        `format` "safetensors": a payload, or the shared memory, is a safetensors file; None: SGLang's pickles.
        """
        return method_call(UpdateWeightsFromTensorReqInput, locals() | {"shm_unlink": shm_unlink or None})

    @method
    def end_weight_update(
        self, phase: Literal["verify", "commit"] | None = None, update_id: str | None = None
    ) -> Call[JsonObject]:
        """Verify what came and switch to it; refused, and nothing changed, if anything is missing or wrong.

        `phase` "verify" or "commit": only that half, so that several servers can switch together.  With the
        `update_id` of a refresh that is in force already it answers as before.
        """
        return method_call(EndWeightUpdateReqInput, locals())

    @method
    def abort_weight_update(self, update_id: str | None = None) -> Call[JsonObject]:
        """Drop an open refresh; the answer states which weights serve."""
        return method_call(AbortWeightUpdateReqInput, locals())

    @method
    def update_weight_version(
        self, new_version: str, abort_all_requests: bool = False, update_id: str | None = None
    ) -> Call[JsonObject]:
        """Rename the weights that serve now."""
        return method_call(UpdateWeightVersionReqInput, locals())

    @method
    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Call[Any]:
        """Return the first `truncate_size` entries of a tensor along its first dimension, as nested lists."""
        return verb_call(GetWeightsByNameReqInput, json_of, name=name, truncate_size=truncate_size)

    @method
    def weights_checker(
        self, action: str = "checksum", keep_content: bool = False, skip_tensor_list: Sequence[str] | None = None
    ) -> Call[JsonObject]:
        """Prove what serves: `checksum`, `snapshot`, `compare` (an error where tensors differ), `reset_tensors`."""
        return method_call(WeightsCheckerReqInput, locals() | {"keep_content": keep_content or None})
