"""A server that is broken in a way that can be chosen while it runs: `POST /wrong/NAME`, and `/wrong/none` heals it.

`python -m tests.abuse.wrong_server` takes the words of `lockstep serve`.  What is wrong is put between the HTTP server
and the application, so that everything else is the real thing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from unittest import mock

from rollout.server import launch, serve
from tests.abuse.usage import MB

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Wrong = Callable[[App, Message, Receive, Send], Awaitable[None]]

MODULE = ("tests.abuse.wrong_server",)
KEPT: list[Any] = []
WRONG: dict[str, Wrong] = {}


def wrong(function: Wrong) -> Wrong:
    WRONG[function.__name__] = function
    return function


# --- what it keeps -----------------------------------------------------------------------------------------------


@wrong
async def keeps_memory(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        KEPT.append(bytearray(os.urandom(16)) * (20 * MB // 16))
    await app(scope, receive, send)


@wrong
async def takes_memory(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        len(bytearray(os.urandom(16)) * (400 * MB // 16))
    await app(scope, receive, send)


@wrong
async def keeps_descriptors(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        KEPT.append([os.open("/dev/null", os.O_RDONLY) for _ in range(20)])
    await app(scope, receive, send)


@wrong
async def floods_the_log(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        print("a warning " * 5000, file=sys.stderr)
    await app(scope, receive, send)


@wrong
async def logs_a_traceback(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        print('Traceback (most recent call last):\n  File "x", line 1\nKeyError: 1', file=sys.stderr)
    await app(scope, receive, send)


@wrong
async def leaves_a_file(app: App, scope: Message, receive: Receive, send: Send) -> None:
    Path(tempfile.gettempdir(), "left").touch()
    await app(scope, receive, send)


# --- what it answers ---------------------------------------------------------------------------------------------


@wrong
async def ends(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        print("lockstep: error: KeyError", file=sys.stderr, flush=True)
        os._exit(1)
    await app(scope, receive, send)


@wrong
async def answers_health_late(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/health":
        await asyncio.sleep(1.2)
    await app(scope, receive, send)


@wrong
async def seems_stuck(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/liveness":
        await _say(send, 503, {"error": {"type": "Unavailable", "message": "no"}})
    else:
        await app(scope, receive, send)


@wrong
async def stays_paused(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/continue_generation":
        await _say(send, 409, {"error": {"type": "Conflict", "message": "no"}})
    else:
        await app(scope, receive, send)


@wrong
async def cannot_flush(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/flush_cache":
        await _say(send, 400, "Flush cache failed: 1 requests running, 0 waiting.")
    else:
        await app(scope, receive, send)


@wrong
async def fails(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        await _say(send, 500, {"error": {"type": "InternalError", "message": "internal error: KeyError"}})
    else:
        await app(scope, receive, send)


@wrong
async def refuses_in_other_words(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        await _say(send, 400, {"detail": "no"})
    else:
        await app(scope, receive, send)


@wrong
async def says_nothing(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        await asyncio.sleep(60.0)
    await app(scope, receive, send)


@wrong
async def answers_aborts_late(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if scope["path"] == "/abort_request":
        await asyncio.sleep(1.2)
    await app(scope, receive, send)


@wrong
async def changes_a_token(app: App, scope: Message, receive: Receive, send: Send) -> None:
    def change(answer: Any) -> None:
        answer["output_ids"][-1] ^= 1

    await _changed(app, scope, receive, send, "/generate", change)


@wrong
async def changes_a_logprob(app: App, scope: Message, receive: Receive, send: Send) -> None:
    def change(answer: Any) -> None:
        answer["meta_info"]["output_token_logprobs"][-1][0] += 1e-6

    await _changed(app, scope, receive, send, "/generate", change)


@wrong
async def changes_the_digest(app: App, scope: Message, receive: Receive, send: Send) -> None:
    def change(answer: Any) -> None:
        answer["per_engine_checksum"] = "0" * 64

    await _changed(app, scope, receive, send, "/weights_checker", change)


@wrong
async def loses_a_token_of_aborted_samples(app: App, scope: Message, receive: Receive, send: Send) -> None:
    def change(answer: Any) -> None:
        for sample in answer if isinstance(answer, list) else [answer]:
            sample["output_ids"] = sample["output_ids"][:-1]

    await _changed(app, scope, receive, send, "/generate", change)


# --- whom it believes --------------------------------------------------------------------------------------------


@wrong
async def lets_web_pages_in(app: App, scope: Message, receive: Receive, send: Send) -> None:
    hidden = (b"origin", b"host", b"sec-fetch-site")
    scope = dict(scope) | {"headers": [item for item in scope["headers"] if item[0] not in hidden]}
    await app(scope, receive, send)


@wrong
async def lets_no_browser_in(app: App, scope: Message, receive: Receive, send: Send) -> None:
    if any(name == b"origin" for name, _ in scope["headers"]):
        await _say(send, 403, {"error": {"type": "Forbidden", "message": "no"}})
    else:
        await app(scope, receive, send)


@wrong
async def forgets_update_ids(app: App, scope: Message, receive: Receive, send: Send) -> None:
    """Remove the update id from every call."""
    data = await _body(receive)
    if b"update_id" in data:
        data = json.dumps({name: value for name, value in json.loads(data).items() if name != "update_id"}).encode()

    parts = [data]

    async def again() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(data)).encode()))
    await app(dict(scope) | {"headers": headers}, again, send)


@wrong
async def does_not_notice_who_is_gone(app: App, scope: Message, receive: Receive, send: Send) -> None:
    async def never_gone() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            await asyncio.sleep(60.0)
        return message

    await app(scope, never_gone, send)


# --- how -----------------------------------------------------------------------------------------------------------


async def _say(send: Send, status: int, content: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _body(receive: Receive) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            return data


async def _changed(
    app: App, scope: Message, receive: Receive, send: Send, path: str, change: Callable[[Any], None]
) -> None:
    """Pass a call on, and change the JSON of the application's answer if the call is one of `path`."""
    if scope["path"] != path:
        await app(scope, receive, send)
        return
    status, data = 0, b""

    async def kept(message: Message) -> None:
        nonlocal status, data
        status = message.get("status", status)
        data += message.get("body", b"")

    await app(scope, receive, kept)
    if status != 200 or not data.startswith((b"{", b"[")):
        await _say(send, status, data.decode())
        return
    answer = json.loads(data)
    change(answer)
    await _say(send, status, answer)


def broken(app: App) -> App:
    """Wrap the application so that the chosen fault comes before it."""
    chosen: list[Wrong] = []

    async def serve(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/wrong/"):
            name = scope["path"].removeprefix("/wrong/")
            chosen[:] = [WRONG[name]] if name in WRONG else []
            KEPT.clear()
            await _say(send, 200, {})
        elif chosen:
            await chosen[0](app, scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve


if __name__ == "__main__":
    build_app = launch.build_app
    with mock.patch.object(launch, "build_app", lambda *args: broken(build_app(*args))):
        sys.exit(serve.main(sys.argv[1:]))
