"""Endpoints that concern experts: the load recorder, its dump, the expert map.  All may demand the admin key.

Knows bodies, replies and files.  What is recorded is the scheduler's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from eplb.load_dump import LoadDump
from rollout.core.errors import BadRequest, Conflict, LockstepError
from rollout.core.expert_io_struct import (
    DumpExpertDistributionReqInput,
    EplbRebalanceReqInput,
    GetExpertLocationReqInput,
    StartExpertDistributionReqInput,
    StopExpertDistributionReqInput,
)
from rollout.entrypoints import protocol
from rollout.entrypoints.control_io import ControlRoute, add_route, reply
from rollout.entrypoints.http_io import json_body, json_response
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.response import encode_json

TIMEOUT_S = 60.0
REBALANCE_TIMEOUT_S = 300.0
MOST_JSON_NUMBERS = 4_000_000

StartBody = Annotated[
    protocol.StartExpertDistributionRequest, Depends(json_body(protocol.StartExpertDistributionRequest))
]
RebalanceBody = Annotated[protocol.EplbRebalanceRequest, Depends(json_body(protocol.EplbRebalanceRequest))]
DumpBody = Annotated[protocol.DumpExpertDistributionRequest, Depends(json_body(protocol.DumpExpertDistributionRequest))]


class ExpertRoutes:
    """SGLang's recorder endpoints, and our own."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(route_class=ControlRoute, tags=["experts"])
        both = "GET", "POST"
        start, dump = protocol.StartExpertDistributionRequest, protocol.DumpExpertDistributionRequest
        add_route(router, "/start_expert_distribution_record", self.start, start, *both)
        add_route(router, "/stop_expert_distribution_record", self.stop, protocol.EmptyRequest, *both)
        add_route(router, "/dump_expert_distribution_record", self.dump, dump, *both)
        add_route(router, "/eplb_rebalance", self.rebalance, protocol.EplbRebalanceRequest)
        router.add_api_route("/expert_location", self.location, methods=["GET"])
        return router

    async def start(self, body: StartBody) -> Response:
        """Count the experts that tokens choose, from the next step on."""
        return reply(await self._manager.control(StartExpertDistributionReqInput, TIMEOUT_S, mode=body.mode))

    async def stop(self) -> Response:
        """Count no further; what was recorded stays until it is dumped."""
        return reply(await self._manager.control(StopExpertDistributionReqInput, TIMEOUT_S))

    async def dump(self, body: DumpBody) -> Response:
        """What was recorded: in the reply, or in a new file on the server's machine."""
        path = None if body.path is None else Path(body.path)
        form = _form(body.format, path)
        target = None if path is None else await asyncio.to_thread(_NewFile, path)
        try:
            most = MOST_JSON_NUMBERS if form == "json" else None
            answer = await self._manager.control(
                DumpExpertDistributionReqInput, TIMEOUT_S, reset=body.reset, most_numbers=most
            )
            if not answer.success:
                return reply(answer)
            dump = LoadDump.from_message(answer.data["dump"])
            if target is None:
                return await asyncio.to_thread(_in_reply, dump, form)
            num_bytes = await asyncio.to_thread(lambda: target.write(_encoded(dump, form)))
        finally:
            if target is not None:
                target.close()
        facts = {"path": str(path), "num_bytes": num_bytes, "num_passes": dump.header["num_passes"]}
        return json_response(facts | {"success": True, "message": answer.message})

    async def rebalance(self, body: RebalanceBody) -> Response:
        """Move experts to where their load is even, or say what would be moved; the reason is in the reply."""
        fields = {name: getattr(body, name) for name in protocol.EplbRebalanceRequest.model_fields}
        return reply(await self._manager.control(EplbRebalanceReqInput, REBALANCE_TIMEOUT_S, **fields))

    async def location(self) -> Response:
        """Which logical expert every slot holds, and since which epoch."""
        answer = await self._manager.control(GetExpertLocationReqInput, TIMEOUT_S)
        return json_response(answer.data) if answer.success else reply(answer)


def _form(wanted: str | None, path: Path | None) -> str:
    """`json` or `safetensors`; that of the path, if there is one.  Raises `BadRequest`."""
    if path is None:
        return wanted or "json"
    form = path.suffix.removeprefix(".")
    if form not in ("json", "safetensors") or wanted not in (None, form):
        raise BadRequest(f"path must end in .{wanted or 'json or .safetensors'}, got {path.name!r}")
    return form


def _encoded(dump: LoadDump, form: str) -> bytes:
    return dump.to_safetensors() if form == "safetensors" else encode_json(dump.to_json())


def _in_reply(dump: LoadDump, form: str) -> Response:
    if form == "safetensors":
        return Response(dump.to_safetensors(), media_type="application/octet-stream")
    return json_response(dump.to_json() | {"success": True, "message": ""})


class _NewFile:
    """A file that did not exist, opened before the record is taken; gone again unless it was written whole."""

    def __init__(self, path: Path) -> None:
        """Raises `Conflict` for a path that exists, `BadRequest` for one that cannot be made."""
        self._path = path
        self._whole = False
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise Conflict(f"{path} exists already; nothing is overwritten") from None
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}") from None
        except ValueError as error:  # a null byte
            raise BadRequest(f"{str(path)!r} is no path: {error}") from None

    def write(self, content: bytes) -> int:
        """Bytes written.  Raises `LockstepError`."""
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise LockstepError(f"the dump is lost: {self._path} cannot be written: {error.strerror}") from None
        self._whole = True
        return len(content)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of bytes that `write` could not write
            self._file.close()
        if not self._whole:
            self._path.unlink(missing_ok=True)
