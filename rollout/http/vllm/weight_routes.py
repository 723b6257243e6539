"""vLLM's weight transfer: init, start, update, finish, as one transaction of the engine.  May demand the admin key.

    /init_weight_transfer_engine   join the trainer's group; packed buffers or not
    /start_weight_update           begin, with partial coverage, under an id of this server's own
    /start_draft_weight_update     begin, for the draft, which comes whole
    /update_weights                one bucket, in packed buffers or a broadcast for each tensor
    /finish_weight_update          end: all of it in force, or nothing
    /fetch_weights                 SkyRL's: bring a folder to a published version, which an update without names loads

vLLM's clients carry no ids, so ids of updates that they started are kept here, and so are the group's settings.
"""

from __future__ import annotations

import uuid
from pathlib import PurePath
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.core.errors import BadRequest, Conflict, LockstepError
from rollout.core.messages.message import ControlReqOutput
from rollout.core.messages.update_state import AdapterVersion, TargetOfUpdate, UpdateStateReply
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    BucketReply,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    PullWeightsReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from rollout.http.control.io import ControlRoute, add_route, reply
from rollout.http.control.verbs import VerbRoutes
from rollout.http.control.weights import raw_lists
from rollout.http.io import json_body, json_response
from rollout.http.protocol import EmptyRequest
from rollout.http.vllm.control_protocol import (
    DiscardInMemoryLora,
    FetchWeightsRequest,
    FinishWeightUpdateRequest,
    InitInfo,
    InitWeightTransferEngineRequest,
    LoraReceiveTarget,
    SetLoraReceiveTarget,
    StartWeightUpdateRequest,
    UpdateInfo,
    UpdateWeightsRequest,
)

InitBody = Annotated[InitWeightTransferEngineRequest, Depends(json_body(InitWeightTransferEngineRequest))]
StartBody = Annotated[StartWeightUpdateRequest, Depends(json_body(StartWeightUpdateRequest))]
FetchBody = Annotated[FetchWeightsRequest, Depends(json_body(FetchWeightsRequest))]
FinishBody = Annotated[FinishWeightUpdateRequest, Depends(json_body(FinishWeightUpdateRequest))]

_OF_THE_GROUP = set(InitWeightsUpdateGroupReqInput.__struct_fields__)


FETCHED_FOLDER = "lockstep_checkpoint"
"""In the `sync_dir` of SkyRL: the checkpoint that fetches bring from version to version."""
MAX_UNANSWERED = 64
"""Starts whose clients left or whose answers are late; one more drops them all."""


class StartedUpdates:
    """Ids of updates that may be open: the one that the engine confirmed, and starts that it has not answered.

    The engine begins updates in the order in which they were started, one at a time.
    """

    def __init__(self) -> None:
        self.confirmed: str | None = None
        self.unanswered: list[str] = []

    @property
    def ids(self) -> list[str]:
        return [*filter(None, [self.confirmed]), *self.unanswered]

    @property
    def current(self) -> str | None:
        """The update that buckets belong to."""
        return self.confirmed or (self.unanswered[-1] if self.unanswered else None)

    def start(self) -> str:
        """Return the id of a new update."""
        self.unanswered.append(f"vllm-{uuid.uuid4().hex}")
        return self.unanswered[-1]

    def confirm(self, update_id: str) -> None:
        """Take in that the engine began this update, so that all updates before it are over."""
        if update_id in self.unanswered:
            del self.unanswered[: self.unanswered.index(update_id) + 1]
            self.confirmed = update_id

    def forget(self, update_id: str) -> None:
        """Take in that this update is over or never began.  Another call may have started the next one meanwhile."""
        if update_id in self.unanswered:
            self.unanswered.remove(update_id)
        if self.confirmed == update_id:
            self.confirmed = None


class Fetched(NamedTuple):
    """A checkpoint folder, and the version that a fetch brought it to."""

    folder: str
    version: int


class VllmWeightRoutes:
    """One for a server: it holds the group that was joined, the updates that were started, and what was fetched."""

    def __init__(self, verbs: VerbRoutes) -> None:
        self._send = verbs.ask
        self._joined: InitInfo | None = None
        self._started = StartedUpdates()
        self._fetched: Fetched | None = None
        self._lora_target: LoraReceiveTarget | None = None  # of the update that is started next
        self._loras: dict[str, AdapterVersion] = {}  # that updates brought and no call has loaded yet

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["vLLM weights"])
        add_route(router, "/init_weight_transfer_engine", self.init_engine, InitWeightTransferEngineRequest)
        add_route(router, "/shutdown_weight_transfer_engine", self.shutdown_engine, EmptyRequest)
        add_route(router, "/start_weight_update", self.start_update, StartWeightUpdateRequest)
        add_route(router, "/start_draft_weight_update", self.start_draft_update, StartWeightUpdateRequest)
        add_route(router, "/update_weights", self.update_weights, UpdateWeightsRequest)
        add_route(router, "/finish_weight_update", self.finish_update, FinishWeightUpdateRequest)
        add_route(router, "/fetch_weights", self.fetch, FetchWeightsRequest)
        return router

    async def init_engine(self, body: InitBody) -> Response:
        """Join a process group with the trainer; replies when all members are there.

        Updates that an earlier trainer started and did not finish are dropped.
        """
        await self._drop_all()
        info = body.init_info
        fields = info.model_dump(include=_OF_THE_GROUP)
        fields["backend"] = info.backend or "pynccl"  # gloo where the weights are on a CPU
        answer = await self._send(InitWeightsUpdateGroupReqInput, **fields)
        if answer.success:
            self._joined = info
        return reply(answer)

    async def shutdown_engine(self) -> Response:
        """Leave the group."""
        answer = await self._send(DestroyWeightsUpdateGroupReqInput, group_name=self._require_joined().group_name)
        self._joined = None
        return reply(answer)

    async def start_update(self, body: StartBody) -> Response:
        """Open a weight update of whatever tensors come.  Nothing changes for requests until it is finished.

        vLLM's clients cannot say whether all tensors will come, so the label counts them where they did not.  An
        update that failed and was not finished is dropped.
        """
        await self._make_room()
        lora, self._lora_target = self._lora_target, None  # of one update, also where that does not begin
        if lora is None:
            return await self._start(body, coverage="partial", counts_tensors=True)
        target = TargetOfUpdate(adapter=lora.lora_name, config=lora.adapter_config, aliases=lora.aliases)
        return await self._start(body, target=target)

    async def start_draft_update(self, body: StartBody) -> Response:
        """Open a weight update of all tensors of the draft.  Tensors of the model may come too, and are left out."""
        await self._make_room()
        return await self._start(body, target=TargetOfUpdate(draft=True))

    async def _start(self, body: StartWeightUpdateRequest, **fields: Any) -> Response:
        update_id = self._started.start()
        answer = await self._send(BeginWeightUpdateReqInput, update_id=update_id, cast=body.cast, **fields)
        if answer.success:
            self._started.confirm(update_id)
        else:
            self._started.forget(update_id)
        return reply(answer)

    async def update_weights(self, request: Request) -> Response:
        """Receive tensors by broadcast from the trainer; with `weight_dir`, load a checkpoint folder as a whole.

        Without names, load what /fetch_weights fetched.
        """
        try:
            body = await json_body(UpdateWeightsRequest)(request)
        except LockstepError as error:
            await self.refuse(error)
            raise
        return await self.update(body)

    async def update(self, body: UpdateWeightsRequest) -> Response:
        """Update the weights as `update_weights` does, from a body that was read already."""
        info = body.update_info
        if info is not None and not info.is_fetched:
            return reply(await self._receive(info, raw_lists(body)))
        if info is not None:
            return await self._load_fetched(info)
        if body.weight_dir is None:
            raise BadRequest("give update_info or weight_dir")
        await self._make_room()
        if (started := self._started.current) is not None:
            raise Conflict(
                "a weight update was started and is not finished: POST /finish_weight_update, wait for the end of its "
                f"lease, or drop it with abort_weight_update with update_id {started!r}"
            )
        return reply(await self._send(UpdateWeightsFromDiskReqInput, model_path=body.weight_dir))

    async def fetch(self, body: FetchBody) -> Response:
        """Bring the checkpoint that is kept in `sync_dir` to a published version.  The weights that serve stay.

        The next update without names loads it.
        """
        folder = str(PurePath(body.sync_dir, FETCHED_FOLDER))
        version, source = body.target_version, _source_of(body)
        answer = await self._send(
            PullWeightsReqInput, local_checkpoint_dir=folder, source_dir=source, target_version=version
        )
        if answer.success:
            self._fetched = Fetched(folder, version)
        return reply(answer)

    async def _load_fetched(self, info: UpdateInfo) -> Response:
        fetched = self._fetched
        if fetched is None or info.target_version not in (None, fetched.version):
            of = "nothing" if fetched is None else f"version {fetched.version}"
            error = BadRequest(f"update_info.names is missing, and {of} was fetched: POST /fetch_weights")
            await self.refuse(error)
            raise error
        return reply(
            await self._send(
                UpdateWeightsFromDiskReqInput,
                model_path=fetched.folder,
                pulled_version=fetched.version,
                update_id=self._started.current,
            )
        )

    async def _receive(self, info: UpdateInfo, lists: dict[str, bytes]) -> ControlReqOutput[BucketReply]:
        joined = self._require_joined()
        is_packed = joined.packed if info.packed is None else info.packed
        return await self._send(
            UpdateWeightsFromDistributedReqInput,
            names=info.names,
            dtypes=info.dtype_names,
            shapes=info.shapes,
            group_name=joined.group_name,
            load_format="packed" if is_packed else None,
            packed_buffer_size_bytes=info.packed_buffer_size_bytes or joined.packed_buffer_size_bytes,
            update_id=self._started.current,
            cast=info.cast,
            **lists,
        )

    async def finish_update(self, body: FinishBody) -> Response:
        """Verify what came and put it in force, all or nothing, under `weight_version` if there is one.

        The update is over, whether it succeeds or fails.
        """
        started = self._started.current
        if started is None:
            raise Conflict("no weight update was started: POST /start_weight_update")
        answer = await self._send(EndWeightUpdateReqInput, update_id=started, weight_version=body.weight_version)
        if answer.success:
            self._started.forget(started)
            if answer.data is not None and isinstance(answer.data.adapter, AdapterVersion):
                self._loras[answer.data.adapter.name] = answer.data.adapter
        else:
            await self._drop(started)  # one whose turn came too late has ended nothing
        return reply(answer)

    # --- SkyRL's adapters in memory ------------------------------------------------------------------------------

    async def set_lora_target(self, body: SetLoraReceiveTarget) -> Response:
        """Have the update that is started next bring an adapter, in force at its finish.

        Raises `Conflict`.
        """
        if self._lora_target is not None:
            name = self._lora_target.lora_name
            raise Conflict(f"the next weight update brings adapter {name!r} already: POST /start_weight_update")
        self._lora_target = body.receive_target
        return json_response(
            {"success": True, "message": f"The next update brings adapter {body.receive_target.lora_name}."}
        )

    async def discard_lora(self, body: DiscardInMemoryLora) -> Response:
        """Forget what an update brought and no call has loaded.  The adapter itself stays in its slot."""
        self._loras.pop(body.lora_name, None)
        return json_response({"success": True, "message": f"Nothing of {body.lora_name} is kept."})

    def take_lora(self, name: str) -> AdapterVersion:
        """Return the version of an adapter that an update brought since the last call.  Raises `Conflict`."""
        if name not in self._loras:
            raise Conflict(
                f"no weight update has brought the adapter {name!r}: call skyrl_set_lora_receive_target, then start, "
                "update and finish one"
            )
        return self._loras.pop(name)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _require_joined(self) -> InitInfo:
        if self._joined is None:
            raise Conflict("no group was joined: POST /init_weight_transfer_engine")
        return self._joined

    async def refuse(self, error: Exception) -> None:
        """Let the engine leave the group after a body that cannot be read: its broadcast may come all the same."""
        if self._joined is not None:
            group, update_id = self._joined.group_name, self._started.current
            await self._send(RefusedBucketReqInput, reason=str(error), group_name=group, update_id=update_id)

    async def _make_room(self) -> None:
        """Drop an update that failed and was not finished, and forget one that is over."""
        if len(self._started.unanswered) >= MAX_UNANSWERED:
            await self._drop_all()
        started = self._started.confirmed
        if started is not None:
            found = await self._look(started)
            if found is None or isinstance(found.failed, str):
                await self._drop(started)

    async def _drop_all(self) -> None:
        for update_id in self._started.ids:
            await self._drop(update_id)

    async def _drop(self, update_id: str) -> None:
        """Drop this update where it is open.

        The beginning of one that was not answered may still wait for its turn.  The drop takes its turn behind it.
        """
        waits = update_id in self._started.unanswered
        if waits or await self._look(update_id) is not None:
            answer = await self._send(AbortWeightUpdateReqInput, update_id=update_id)
            if not answer.success and (not waits or await self._look(update_id) is not None):
                return
        self._started.forget(update_id)

    async def _look(self, update_id: str) -> UpdateStateReply | None:
        """Return the state of this update, or None where it is not open."""
        found = (await self._send(GetWeightUpdateReqInput)).data
        return found if found is not None and found.update_id == update_id else None


def _source_of(body: FetchWeightsRequest) -> str:
    """Return the folder that holds the delta folders.  Raises `BadRequest` for one that is not on this machine."""
    uri = (body.uri or body.sync_dir).removeprefix("file://")
    if "://" in uri:
        raise BadRequest(
            f"uri {uri[:200]!r} is not a folder: this server downloads nothing, so mount it and give a path"
        )
    path = PurePath(uri)
    return str(path.parent if path.name == f"delta-{body.target_version:08d}" else path)
