"""Streamed generations: the calls that begin one or ask for its rest, and the events of all its connections.

POST /generate         outputs 1 .. i     the connection breaks
POST /generate/resume  outputs i + 1 ..   with the tokens that the client has left out
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout.client.errors import ClientError, ResponseFormatError, ServerUnreachable
from rollout.client.generation import call_of, generate_body, parse_event
from rollout.client.sse import DONE, SseDecoder
from rollout.client.types import GenerateOptions, GenerationOutput, RouteLayout
from rollout.client.wire import Call, Reply, check
from rollout.core.errors import BadRequest


def stream(prompt: str | Sequence[str] | None, options: GenerateOptions) -> Call[None]:
    """Return the call of a streamed generation; `Events` reads its answer.  A resumable one gets a name.

    It names its form, as a server may have another default (`--incremental-streaming-output`).
    """
    body = {"stream_format": "cumulative"} | generate_body(prompt, options) | {"stream": True}
    if body.get("resumable"):
        body.setdefault("rid", uuid.uuid4().hex)
    if body["stream_format"] != "cumulative":
        raise BadRequest("the outputs of the client are cumulative: leave out stream_format")
    return call_of(_refuse, body, options)


def rest_of_stream(rid: str, from_token: int, timeout_s: float | None) -> Call[None]:
    """Return the call for the rest of a resumable stream."""
    body = {"rid": rid, "from_token": from_token}
    return Call("POST", "/generate/resume", _refuse, body, timeout="generate", timeout_s=timeout_s, retry="always")


def _refuse(reply: Reply) -> None:
    check(reply)


class Events:
    """Reads the events of a stream from the bytes of its connections; `done` once the last one came.

    `call`: the call for the next connection.  `rid`: the name of a resumable stream, None for another.
    """

    def __init__(self, call: Call[None], body: Mapping[str, Any], layout: RouteLayout | None, retry_s: float) -> None:
        """Prepare to read the answer to `call`, whose request was `body`; a broken one is resumed for `retry_s`."""
        self.call = call
        self.rid: str | None = body["rid"] if body.get("resumable") else None
        self.done = False
        self._body = body
        self._layout = layout
        self._retry_s = retry_s
        self._give_up_at: float | None = None
        self._decoder = SseDecoder()
        self._num_tokens: dict[int | None, int] = {None: (call.json or {}).get("from_token", -1)}  # of each sample
        self._ended: set[int | None] = set()

    def feed(self, chunk: bytes) -> Iterator[GenerationOutput]:
        """Yield the outputs that `chunk` completes, without the ones of an earlier connection."""
        for event in self._decoder.feed(chunk):
            if event == DONE:
                self.done = True
                return
            output = parse_event(event, self._body, self._layout)
            if "output_start" in output.meta_info:
                raise ResponseFormatError(f"stream {output.rid} is incremental; the client reads cumulative ones")
            has_ended = output.finish_reason is not None
            known = self._num_tokens.get(output.index, -1)
            is_known = output.index in self._ended or (not has_ended and len(output.output_ids) <= known)
            if is_known and self.rid is not None:  # of an earlier connection
                continue
            self._num_tokens[output.index] = len(output.output_ids)
            self._ended |= {output.index} if has_ended else set()
            self._give_up_at = None
            yield output

    def require_done(self) -> None:
        """Raise `ResponseFormatError` if the stream ended too early, `ServerUnreachable` if it may be resumed."""
        if not self.done:
            message = "the stream ended before the request was finished"
            raise ResponseFormatError(message) if self.rid is None else ServerUnreachable(message)

    def go_on_after(self, error: ClientError) -> None:
        """Set `call` to the call for the rest.  Raises `error` if the stream is not resumable, or after `retry_s`."""
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + self._retry_s
        if self.rid is None or now >= self._give_up_at:
            raise error
        # Of several samples each answer has all tokens, so that the number of samples need not be known.
        self.call = rest_of_stream(self.rid, max(self._num_tokens[None], 0), self.call.timeout_s)
        self._decoder = SseDecoder()
