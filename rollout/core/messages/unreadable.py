"""Messages that do not decode: each side answers whom such a message names, and goes on.

Messages hold values of clients, so that none of them may end a loop.  The main process checks a message before
it leaves (`packed`); either side reads what arrives by `read_input` or `read_output`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import (
    BatchTokenOutput,
    SchedulerInput,
    SchedulerOutput,
    TokenizedGenerateReqInput,
    decode_input,
    decode_output,
    encode,
)
from rollout.core.messages.message import ControlReqOutput, failure
from rollout.core.messages.req_output import ReqOutput

MAX_REASON_CHARS = 400
"""The most characters of a decoder's reason, which may repeat the content."""
CHECKED_BYTES = 64 * 1024

_DECODING = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
_ENCODING = (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError)


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """The readable parts of a message that does not decode.

    `rids` are of requests, `request_id` is of a control verb, `dp_rank` the rank that should answer for the requests.
    `rest`: the outputs of the same message that are whole.
    """

    error: str
    rids: tuple[str, ...] = ()
    request_id: str | None = None
    dp_rank: int = 0
    rest: BatchTokenOutput | None = None

    @property
    def names_nobody(self) -> bool:
        return not self.rids and self.request_id is None and self.rest is None


def packed(message: SchedulerInput) -> bytes:
    """Encode a message to the scheduler, and check that the scheduler can decode it.

    Typed content that may be long is not checked again: the ids of a prompt, the rows of routes, and verbs over
    `CHECKED_BYTES`.  Raises `BadRequest`.
    """
    try:
        data = encode(message)
        if isinstance(message, TokenizedGenerateReqInput):
            decode_input(encode(_without_columns(message)))
        elif len(data) <= CHECKED_BYTES:
            decode_input(data)
    except (*_ENCODING, *_DECODING) as error:
        raise BadRequest(f"the request cannot be passed on: {_reason(error)}") from None
    return data


def _without_columns(message: TokenizedGenerateReqInput) -> TokenizedGenerateReqInput:
    replay = None if message.replay is None else msgspec.structs.replace(message.replay, data=b"")
    return msgspec.structs.replace(message, input_ids=[], replay=replay)


def read_input(data: bytes) -> SchedulerInput | Unreadable:
    """Decode a message to the scheduler, or at least its readable parts.  Never raises."""
    try:
        return decode_input(data)
    except _DECODING as error:
        plain = _plain(data)
        siblings = plain.get("siblings")
        pairs = [each for each in siblings if isinstance(each, list) and each] if isinstance(siblings, list) else []
        return Unreadable(
            error=_reason(error),
            rids=_texts([plain.get("rid"), *(pair[0] for pair in pairs)]),
            request_id=_text(plain.get("request_id")),
            dp_rank=rank if type(rank := plain.get("dp_rank")) is int else 0,
        )


def read_output(data: bytes) -> SchedulerOutput | Unreadable:
    """Decode a message of the scheduler, or at least its readable parts.  Never raises."""
    try:
        return decode_output(data)
    except _DECODING as error:
        plain = _plain(data)
        outputs = plain.get("outputs")
        whole, rids = _sorted_out(outputs if isinstance(outputs, list) else [])
        return Unreadable(
            error=_reason(error),
            rids=rids,
            request_id=_text(plain.get("request_id")),
            rest=BatchTokenOutput(outputs=whole) if whole else None,
        )


def encode_output(message: SchedulerOutput) -> bytes:
    """Encode a message of the scheduler; a part that cannot be encoded becomes the failure of its request or verb."""
    try:
        return encode(message)
    except _ENCODING as error:
        if isinstance(message, ControlReqOutput):
            return encode(msgspec.structs.replace(failure(message.request_id, error), dp_rank=message.dp_rank))
        if isinstance(message, BatchTokenOutput):
            return encode(BatchTokenOutput(outputs=[_encodable(output) for output in message.outputs]))
        raise


def _encodable(output: ReqOutput) -> ReqOutput:
    try:
        encode(output)
    except _ENCODING as error:
        return ReqOutput.never_ran(output.rid, output.weight_version, f"its answer cannot be sent: {error}", 500)
    return output


def _sorted_out(outputs: list[Any]) -> tuple[list[ReqOutput], tuple[str, ...]]:
    """Return the outputs that are whole, and the ids of the requests whose outputs are not."""
    whole: list[ReqOutput] = []
    broken: list[Any] = []
    for output in outputs:
        try:
            whole.append(msgspec.convert(output, ReqOutput))
        except msgspec.ValidationError:
            broken.append(output.get("rid") if isinstance(output, dict) else None)
    return whole, _texts(broken)


def _plain(data: bytes) -> Mapping[str, Any]:
    try:
        content = msgspec.msgpack.decode(data)
    except _DECODING:
        return {}
    return content if isinstance(content, dict) else {}


def _reason(error: Exception) -> str:
    return f"{error}"[:MAX_REASON_CHARS]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(values: list[Any]) -> tuple[str, ...]:
    return tuple(value for value in values if isinstance(value, str))
