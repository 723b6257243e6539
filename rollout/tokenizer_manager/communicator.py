"""Control verbs and their answers, one from each data-parallel rank: one future per verb, each with a deadline."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollout.core.errors import LockstepError, Unavailable
from rollout.core.messages.message import AnyReply, ControlReqInput, ControlReqOutput, Reply, reply_type

logger = logging.getLogger(__name__)


class SchedulerTimeout(Unavailable):
    """The scheduler did not answer a control verb before its deadline."""

    status_code = 504


class Communicator:
    """Sends verbs through `send` and matches the answers by `request_id`.  A verb has `num_answers` of them."""

    def __init__(self, send: Callable[[Any], None], num_answers: int = 1) -> None:
        self._send = send
        self._num_answers = num_answers
        self._waiting: dict[str, asyncio.Future[list[ControlReqOutput[Any]]]] = {}
        self._answers: dict[str, list[ControlReqOutput[Any]]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def call(
        self, verb: type[ControlReqInput[AnyReply]], timeout_s: float, **fields: Any
    ) -> ControlReqOutput[AnyReply]:
        """Send `verb(**fields)` and wait at most `timeout_s` seconds for its answers, whether it succeeded or not.

        The verb carries this deadline with it.

        Raises what sending it raises, `SchedulerTimeout`, the error given to `fail` or `fail_all`, or `LockstepError`
        for a reply that is not the verb's.
        """
        request_id = uuid.uuid4().hex
        future: asyncio.Future[list[ControlReqOutput[Any]]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._send(verb(request_id=request_id, deadline=time.monotonic() + timeout_s, **fields))
            async with asyncio.timeout(timeout_s):  # `wait_for` takes one more pass of the event loop
                answers = await future
        except TimeoutError:
            name = verb.__name__.removesuffix("ReqInput")
            raise SchedulerTimeout(
                f"the scheduler did not answer {name} within {timeout_s:g} s. A call that still waits has no effect; "
                "a call that has begun may still take effect."
            ) from None
        finally:
            self._waiting.pop(request_id, None)
            self._answers.pop(request_id, None)
        return merge_answers([_typed(answer, reply_type(verb)) for answer in answers])

    def resolve(self, output: ControlReqOutput[Any]) -> None:
        """Take in an answer; the last one of a verb ends its `call`."""
        future = self._waiting.get(output.request_id)
        if future is None or future.done():
            logger.warning("answer to control verb %s came after its deadline", output.request_id)
            return
        answers = self._answers.setdefault(output.request_id, [])
        answers.append(output)
        if len(answers) == self._num_answers:
            future.set_result(answers)

    def fail(self, request_id: str, error: LockstepError) -> None:
        """Let the verb of this id, if it is in flight, raise `error`."""
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: LockstepError) -> None:
        """Let every verb in flight raise `error`."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def merge_answers(answers: Sequence[ControlReqOutput[AnyReply]]) -> ControlReqOutput[AnyReply]:
    """Return success if all succeeded, with the replies and the messages merged; else the first refusal."""
    in_order = sorted(answers, key=lambda answer: answer.dp_rank)
    first = next((answer for answer in in_order if not answer.success), in_order[0])
    if not first.success or len(in_order) == 1:
        return first
    data = first.reply.merged([answer.reply for answer in in_order])
    return msgspec.structs.replace(first, message=_merged_message(in_order), data=data)


def _merged_message(answers: Sequence[ControlReqOutput[Any]]) -> str:
    """Return the message that all answers have, else each one with the data-parallel ranks that gave it."""
    ranks: dict[str, list[str]] = {}
    for answer in answers:
        ranks.setdefault(answer.message, []).append(str(answer.dp_rank))
    if len(ranks) == 1:
        return answers[0].message
    return " | ".join(f"data-parallel rank {', '.join(numbers)}: {message}" for message, numbers in ranks.items())


def _typed(answer: ControlReqOutput[Any], reply: type[AnyReply]) -> ControlReqOutput[AnyReply]:
    """Return `answer` with the struct of its reply, which comes over a socket as plain values."""
    if not answer.success or isinstance(answer.data, Reply):
        return answer
    try:
        return msgspec.structs.replace(answer, data=msgspec.convert(answer.data, reply))
    except msgspec.ValidationError as error:
        raise LockstepError(f"the answer is not a {reply.__name__}: {error}") from None
