"""The particulars of weight verbs over HTTP: buckets that cannot be read, payloads, tensors as JSON, the checker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest, LockstepError
from rollout.core.messages.message import ControlReqOutput
from rollout.core.messages.tensor_lists import ManifestLists
from rollout.core.messages.weight_parts import WeightPartsReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    RefusedBucketReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from rollout.http.control.body import body_of, fields_of
from rollout.http.control.io import reply, reply_fields
from rollout.http.control.tensor_body import read_tensor_body
from rollout.http.control.verbs import VerbRoutes
from rollout.http.io import accepted, json_response, parse_body, parsed, read_limited
from rollout.http.protocol import Body, BucketAddress


def raw_lists(body: Body) -> dict[str, bytes]:
    """Return the fields of a bucket for the lists of `body` that stayed JSON."""
    return {} if body.lists is None else {"tensor_lists": body.lists.data, "lists_digest": body.lists.digest}


def _manifest_of(body: Any) -> dict[str, Any]:
    """Return the fields of a begin for the manifest of a `whole_update`: the lists of its call, and fingerprints."""
    stated = body.whole_update.fingerprints
    if stated is None:
        return {}
    if body.lists is None:
        names, dtypes, shapes = body.names, body.dtypes, body.shapes
        return {"manifest": ManifestLists(names=names, dtypes=dtypes, shapes=shapes, fingerprints=stated)}
    lists = {"manifest_lists": body.lists.data, "manifest_digest": body.lists.digest}
    return lists | {"manifest_fingerprints": stated}


def _has_committed(ended: ControlReqOutput[Any], weight_version: str | None) -> bool:
    """Return whether an end answers that its update has committed, of this version if one is named.

    After a begin that was refused nothing is open: the commit was made by an earlier call.
    """
    return ended.success and weight_version in (None, ended.reply.weight_version)


class WeightRoutes:
    """SGLang's weight endpoints, and our own."""

    def __init__(self, verbs: VerbRoutes, args: ServerArgs) -> None:
        self._verbs = verbs
        self._args = args

    async def begin(self, _: Request, body: Body) -> Response:
        """Begin an update.  Its manifest is sent as JSON, which the engine decodes on its I/O thread, if at all."""
        fields = fields_of(BeginWeightUpdateReqInput, body)
        if body.lists is not None:
            lists, stated = body.lists, fields["manifest"].fingerprints
            fields |= {"manifest": None, "manifest_lists": lists.data, "manifest_digest": lists.digest}
            fields |= {"manifest_fingerprints": stated}
        elif isinstance(fields["manifest"], list):
            entries = await asyncio.to_thread(msgspec.json.encode, fields["manifest"])
            fields |= {"manifest": None, "manifest_entries": entries}
        return reply(await self._verbs.ask(BeginWeightUpdateReqInput, **fields))

    async def bucket(self, request: Request) -> Response:
        return await self.receive_bucket(await self.read_bucket(request))

    async def read_bucket(self, request: Request, model: type[Body] | None = None) -> Body:
        """Return the body of a bucket, in this form, or in that of /update_weights_from_distributed.

        The engine is notified of one that cannot be read, as its broadcast may come all the same.
        """
        data = b"unread"
        try:
            data = await read_limited(request)
            form, known = model or body_of(UpdateWeightsFromDistributedReqInput), request.app.state.known_lists
            body = await parsed(request, data, lambda data: parse_body(form, data, known))
            whole = getattr(body, "whole_update", None)
            if whole is not None and whole.coverage == "partial" and whole.fingerprints is None:
                raise BadRequest("whole_update: with coverage partial fingerprints must be given")
            return accepted(request, body)
        except LockstepError as error:
            await self._refuse_bucket(data, error)
            raise

    async def receive_bucket(self, body: Any) -> Response:
        verb = UpdateWeightsFromDistributedReqInput
        fields = fields_of(verb, body) | raw_lists(body)
        if body.whole_update is not None:
            return reply(await self._whole_update(body, fields))
        return reply(await self._verbs.ask(verb, **fields))

    async def _whole_update(self, body: Any, bucket: dict[str, Any]) -> ControlReqOutput[Any]:
        """Send the three verbs of an update of one call at once.  Returns the first refusal, or the end's answer.

        The engine carries them out one by one.  After a begin that it refuses the bucket is of no open update: it is
        received, as its broadcast comes all the same, and dropped.  An end drops an update whose bucket was refused.
        A call that comes again after its commit is answered as before: its begin is refused, and its end is not.
        """
        own = {"update_id": bucket["update_id"] or uuid.uuid4().hex}
        shared = own | {name: bucket[name] for name in ("weight_version", "selector", "cast")}
        begin = shared | {"coverage": body.whole_update.coverage, "prepared_s": body.whole_update.prepared_s}
        limit_s = EndWeightUpdateReqInput.endpoint.deadline_s(self._args.weight_update_timeout)
        asked: list[Awaitable[ControlReqOutput[Any]]] = [
            self._verbs.ask(BeginWeightUpdateReqInput, **begin, **_manifest_of(body)),
            self._verbs.ask(UpdateWeightsFromDistributedReqInput, **bucket | own),
            self._verbs.ask(EndWeightUpdateReqInput, timeout_s=2 * limit_s, **own),  # it waits for the bucket first
        ]
        # Each begins in its turn, and sends its verb before it waits: they reach the engine in this order.
        answers = await asyncio.gather(*asked, return_exceptions=True)
        begun, _, ended = answers
        is_refused = isinstance(begun, ControlReqOutput) and not begun.success
        if is_refused and isinstance(ended, ControlReqOutput) and _has_committed(ended, bucket["weight_version"]):
            return ended
        for found in answers:
            if isinstance(found, BaseException):
                raise found
            answer = found
            if not answer.success:
                break
        return answer

    async def _refuse_bucket(self, data: bytes, error: LockstepError) -> None:
        """Let the engine leave the group that a refused body names, or all groups if it names none that can be read.

        Its sender broadcasts all the same, and the engine would receive these tensors as the next bucket.
        """
        address: dict[str, Any] = {"group_name": None}
        with suppress(LockstepError):
            address = (await asyncio.to_thread(parse_body, BucketAddress, data)).model_dump()
        with suppress(LockstepError):
            await self._verbs.ask(RefusedBucketReqInput, reason=str(error), **address)

    async def parts(self, _: Request, body: Body) -> Response:
        """Answer which parts of the tensors each rank keeps."""
        verb = WeightPartsReqInput
        return reply(await self._verbs.ask(verb, **fields_of(verb, body), **raw_lists(body)))

    async def from_tensor(self, request: Request) -> Response:
        args = self._args
        replicas = 1 if args.enable_dp_attention else args.dp_size
        fields = await read_tensor_body(request, args.max_payload_bytes, args.tp_size, replicas)
        return reply(await self._verbs.ask(UpdateWeightsFromTensorReqInput, **fields))

    async def get_weights(self, _: Request, body: Body) -> Response:
        """Return the values of a tensor alone, outside the common shape of replies."""
        answer = await self._verbs.ask(GetWeightsByNameReqInput, **fields_of(GetWeightsByNameReqInput, body))
        return await asyncio.to_thread(json_response, answer.reply.parameter) if answer.success else reply(answer)

    async def check_weights(self, _: Request, body: Body) -> Response:
        """Check the weights.  Checksums also have SGLang's names.  A comparison fails where it finds a difference."""
        fields = fields_of(WeightsCheckerReqInput, body)
        answer = await self._verbs.ask(WeightsCheckerReqInput, **fields)
        if not answer.success:
            return reply(answer)
        found = answer.reply
        if fields["action"] == "compare" and not found.equal:
            error = {"type": "WeightsDiffer", "message": answer.message}
            failed = {"success": False, "message": answer.message, "error": error}
            return json_response(reply_fields(answer) | failed, 409)
        if fields["action"] != "checksum":
            return reply(answer)
        facts = {"per_gpu_checksum": found.digest, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}
        rank = {"checksums": found.checksums, **facts}
        return reply(answer, {"ranks": [rank], "per_engine_checksum": found.digest})
