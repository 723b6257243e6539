"""The short way of `/generate`: no task, no ASGI, and no check twice.

A request of one prompt and one sample takes it if an earlier one, which took the long way, differed in nothing but
prompt, id and session.  All that can be wrong with it then is the prompt, or an id in use.  The short way refuses
nothing: a request that it does not take in takes the long way from its beginning, and is answered or refused there.

    body -- the form of an earlier one, a prompt of the lengths that passed --> message to the engine --> answer
      '---- any other --> the long way, which has `learn` note its form
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rollout.core.errors import LockstepError
from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.http.gate import Access, Refused
from rollout.http.generation import routing_headers
from rollout.http.io import error_response
from rollout.http.native.generate import PlainGenerate, accepts_binary
from rollout.http.slices import Slices
from rollout.text.tokenizer import INLINE_CHARS
from rollout.tokenizer_manager.binary_response import MEDIA_TYPE
from rollout.tokenizer_manager.handle import GenerateHandle, SingleHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import MAX_RID_CHARS, MAX_SESSION_ID_CHARS
from rollout.tokenizer_manager.response import ResponseForm
from rollout.tokenizer_manager.validation import ServingLimits

logger = logging.getLogger(__name__)

MAX_FORMS = 256
MAX_SAMPLING_BYTES = 4096
"""Limit of the `sampling_params` of a form: forms are kept."""

Form = tuple[Any, ...]
"""A request without its prompt, id and session."""


OnPassed = Callable[[GenerateHandle], None]
"""Takes the handle of a request that passed all checks."""


class Reply(Protocol):
    """The connection's side of a request: a body that is whole, and what becomes of it."""

    body: bytearray
    is_binary: bool
    disconnected: bool
    on_disconnect: Callable[[], None] | None

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        """Write the answer; `headers` are whole lines but `content-length`."""

    def take_long_way(self, on_passed: OnPassed | None) -> None:
        """Have the application answer the request, and call `on_passed` if it passes all checks."""


class _Body(PlainGenerate, kw_only=True, forbid_unknown_fields=True):
    """`PlainGenerate`, whose `sampling_params` are not read."""

    sampling_params: msgspec.Raw = msgspec.Raw(b"{}")  # type: ignore[assignment]

    def form(self, is_binary: bool) -> Form | None:
        """Return the form; None for a request that has none: a stream, or one with a key or a rank."""
        others = (self.extra_key, self.cache_salt, self.routed_dp_rank, self.data_parallel_rank)
        if self.stream or others != _NO_OTHERS or len(memoryview(self.sampling_params)) > MAX_SAMPLING_BYTES:
            return None
        return (
            is_binary,
            bytes(self.sampling_params),
            self.return_logprob,
            self.logprob_start_len,
            self.top_logprobs_num,
            self.return_text_in_logprobs,
            self.return_routed_experts,
            self.routed_experts_start_len,
            self.routed_experts_format,
            self.return_prompt_token_ids,
            self.logprobs_format,
            self.priority,
            self.max_kv_version_lag,
            self.lora_path,
        )


_NO_OTHERS = (None, None, None, None)
_HELD = {"rid", "input_ids", "text", "session_id", "stream", "extra_key", "cache_salt"}
_IN_FORM = set(_Body.__struct_fields__) - _HELD - {"routed_dp_rank", "data_parallel_rank"}
assert len(_IN_FORM) + 1 == len(_Body().form(False) or ()), "a form leaves out a field"
_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class _Pattern:
    """A pattern for requests of one form, made of one that passed all checks.

    Each check of a prompt's length has one bound.  So a length between two that passed passes, too.
    """

    limits: ServingLimits  # that it was checked against
    message: TokenizedGenerateReqInput
    response_form: ResponseForm
    shortest: int
    longest: int

    def fits(self, token_ids: list[int]) -> bool:
        """Return whether a prompt passes; ids of a body are not negative."""
        return self.shortest <= len(token_ids) <= self.longest and max(token_ids) < self.limits.vocab_size


class ShortGenerate:
    """`refused` hears of errors that it answers, as the gate's does.  Use from the manager's event loop."""

    def __init__(self, manager: TokenizerManager, access: Access, refused: Refused) -> None:
        self._manager = manager
        self._access = access
        self._refused = refused
        self._slices = Slices()
        self._patterns: dict[Form, _Pattern] = {}

    def admits(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> bool | None:
        """Return None for a request that must take the long way, else whether its answer is msgpack.

        It depends on nothing else: requests with the same head need not ask again.
        """
        if target != b"/generate" or method not in (b"POST", b"PUT"):
            return None
        named = routing_headers(headers)
        if named.keys() - {"accept"} or self._access.refusal("/generate", dict(headers)) is not None:
            return None
        return accepts_binary(named.get("accept", ""))

    def learn(self, form: Form, handle: GenerateHandle) -> None:
        """Note a request of this form that took the long way, and passed all checks."""
        source = handle.records[0].source
        if handle.replies_with_list or source.return_sampling_mask or source.token_ids_logprob is not None:
            return
        limits, length = self._manager.limits, len(source.input_ids)
        known = self._patterns.get(form)
        if known is not None and known.limits is limits:
            known.shortest, known.longest = min(known.shortest, length), max(known.longest, length)
            return
        if len(self._patterns) >= MAX_FORMS:
            del self._patterns[next(iter(self._patterns))]
        message = msgspec.structs.replace(source, rid="", input_ids=[], session_id=None, dp_rank=0)
        self._patterns[form] = _Pattern(limits, message, handle.form, length, length)

    def begin(self, reply: Reply) -> None:
        """Answer the request, now or later, on the short way or the long one."""
        self._slices.add(lambda: self._begin(reply))

    def _begin(self, reply: Reply) -> None:
        if reply.disconnected:
            return
        form = None
        try:
            body = _decoder.decode(reply.body)
            form = body.form(reply.is_binary)
            is_taken = form is not None and self._take(reply, body, form)
        except Exception:  # the long way meets it again, and names it
            is_taken = False
        if is_taken:
            reply.body = bytearray()  # the message holds its content
        else:
            reply.take_long_way(None if form is None else functools.partial(self.learn, form))

    def _take(self, reply: Reply, body: _Body, form: Form) -> bool:
        """Send a request to the engine.  False, or an error: it was not sent."""
        pattern = self._patterns.get(form)
        if pattern is None or pattern.limits is not self._manager.limits:
            return False
        token_ids = self._token_ids(body)
        rid = secrets.token_hex(16) if body.rid is None else body.rid
        is_named = 0 < len(rid) <= MAX_RID_CHARS
        if body.session_id is not None:
            is_named = is_named and 0 < len(body.session_id) <= MAX_SESSION_ID_CHARS
        if token_ids is None or not is_named or not pattern.fits(token_ids):
            return False
        message = msgspec.structs.replace(pattern.message, rid=rid, input_ids=token_ids, session_id=body.session_id)
        call = _Call(reply, self._answer)
        reply.on_disconnect = call.give_up
        try:
            call.handle = self._manager.submit_checked(message, pattern.response_form, call.ended)
        except BaseException:
            reply.on_disconnect = None
            raise
        return True

    def _token_ids(self, body: _Body) -> list[int] | None:
        """Return the ids of the one prompt; None if there is another number of them, or if it is long."""
        if body.text is None or body.input_ids is not None:
            return body.input_ids if body.text is None else None
        return self._manager.tokenizer.encode_short(body.text) if len(body.text) <= INLINE_CHARS else None

    def _answer(self, call: _Call) -> None:
        self._slices.add(lambda: self._make(call))

    def _make(self, call: _Call) -> None:
        """Make an answer, a large one off the event loop, and write it."""
        reply, handle = call.taken()
        if reply.disconnected:
            return
        if handle.is_heavy:
            making = asyncio.get_running_loop().run_in_executor(None, handle.encoded)
            making.add_done_callback(lambda made: self._write(reply, made.result))
        else:
            self._write(reply, handle.encoded)

    def _write(self, reply: Reply, make: Callable[[], bytes]) -> None:
        try:
            content = make()
        except Exception as error:
            answer = error_response(error)
            if not isinstance(error, LockstepError):
                logger.error("POST /generate failed", exc_info=error)
            self._refused("POST", "/generate", answer.status_code, bytes(answer.body))
            reply.answer(answer.status_code, _JSON, bytes(answer.body))
        else:
            reply.answer(200, _MSGPACK if reply.is_binary else _JSON, content)


_JSON = b"content-type: application/json\r\n"
_MSGPACK = b"content-type: %b\r\n" % MEDIA_TYPE.encode()


class _Call:
    """A request on the short way, from its message to the engine to its answer.

    It, its handle and its reply hold each other until `taken`.
    """

    __slots__ = ("_answer", "_reply", "handle")

    def __init__(self, reply: Reply, answer: Callable[[_Call], None]) -> None:
        self.handle: SingleHandle | None = None
        self._reply = reply
        self._answer = answer

    def ended(self) -> None:
        """Have the answer made: the sample has ended, or failed."""
        self._answer(self)

    def give_up(self) -> None:
        """Have the engine stop: the client is gone."""
        if self.handle is not None:
            self.handle.abort()

    def taken(self) -> tuple[Reply, SingleHandle]:
        """Return both sides, and let go of them."""
        reply, handle = self._reply, self.handle
        assert handle is not None
        reply.on_disconnect = handle.on_end = self.handle = None
        return reply, handle
