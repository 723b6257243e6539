"""The dump of the load recorder as JSON or as a safetensors file, in the reply or in a new file."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.responses import Response

from eplb.load_dump import LoadDump
from rollout.core.args.named_folders import NamedFolders
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import BadRequest, Conflict, LockstepError
from rollout.core.messages.experts import DumpExpertDistributionReqInput
from rollout.http.control.io import reply
from rollout.http.control.verbs import VerbRoutes
from rollout.http.io import json_response
from rollout.tokenizer_manager.response import encode_json

MAX_JSON_NUMBERS = 4_000_000


class ExpertRoutes:
    """SGLang's endpoint that dumps the record of expert loads."""

    def __init__(self, verbs: VerbRoutes, args: ServerArgs) -> None:
        self._verbs = verbs
        self._folders = NamedFolders.of(args)

    async def dump(self, _: Request, body: Any) -> Response:
        """Dump the record in the reply, or in a new file on the server's machine."""
        path = None if body.path is None else await asyncio.to_thread(self._folders.writable, body.path)
        form = _form(body.format, path)
        target = None if path is None else await asyncio.to_thread(_NewFile, path)
        try:
            most = MAX_JSON_NUMBERS if form == "json" else None
            answer = await self._verbs.ask(DumpExpertDistributionReqInput, reset=body.reset, max_numbers=most)
            if not answer.success:
                return reply(answer)
            dump = LoadDump.from_message(answer.reply.dump)
            if target is None:
                return await asyncio.to_thread(_in_reply, dump, form)
            num_bytes = await asyncio.to_thread(lambda: target.write(_encoded(dump, form)))
        finally:
            if target is not None:
                target.close()
        facts = {"path": str(path), "num_bytes": num_bytes, "num_passes": dump.header["num_passes"]}
        return json_response(facts | {"success": True, "message": answer.message})


def _form(wanted: str | None, path: Path | None) -> str:
    """Return the form of the dump, `json` or `safetensors`.  The ending of a path decides.  Raises `BadRequest`."""
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
    """A file that did not exist, opened before the record is taken; deleted again unless it was written whole."""

    def __init__(self, path: Path) -> None:
        """Create the file.  Raises `Conflict` for a path that exists, `BadRequest` for one that cannot be made."""
        self._path = path
        self._whole = False
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise Conflict(f"{path} exists already; nothing is overwritten") from None
        except OSError as error:
            raise BadRequest(f"{path} cannot be written: {error.strerror}") from None
        except ValueError as error:  # a null byte
            raise BadRequest(f"{str(path)!r} is not a path: {error}") from None

    def write(self, content: bytes) -> int:
        """Write the whole content, and return the number of its bytes.  Raises `LockstepError`."""
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise LockstepError(f"the dump is lost: {self._path} cannot be written: {error.strerror}") from None
        self._whole = True
        return len(content)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing tries again what `write` could not write
            self._file.close()
        if not self._whole:
            self._path.unlink(missing_ok=True)
