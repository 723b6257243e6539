"""`Engine`: the whole engine in one process and one thread, without sockets or HTTP.

It has the tokenizer manager and the scheduler of a server, and each call turns the scheduler's loop.  It is for
benchmarks, notebooks and trainers that share a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from rollout.core.args.server_cli import args_of_call
from rollout.core.messages.io_struct import SchedulerInput, SchedulerOutput
from rollout.core.messages.message import AnyReply, ControlReqInput, ControlReqOutput
from rollout.core.messages.unreadable import packed
from rollout.engine.build import build_scheduler
from rollout.families.registry import served_model_config
from rollout.scheduler.channel import LocalChannel
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput

T = TypeVar("T")
_CONTROL_TIMEOUT_S = 3600.0


class _LocalLink:
    """The manager's end of a `LocalChannel`.  The engine hands messages over itself, so nothing is ever received."""

    def __init__(self, channel: LocalChannel) -> None:
        self._channel = channel

    def send(self, *messages: SchedulerInput) -> None:
        self._channel.inbox.extend([packed(message) for message in messages])

    async def receive(self) -> SchedulerOutput:
        raise AssertionError("only the engine may call handle_message")


class Engine:
    """`Engine(model_path=..., dtype="bfloat16", ...)`: keyword arguments are the fields of `ServerArgs`.

    Raises `StartupError`.  Not thread-safe, and not for use inside a running event loop.
    """

    def __init__(self, **settings: Any) -> None:
        self.server_args = args_of_call(settings)
        self._channel = LocalChannel()
        self.scheduler, self.ready = build_scheduler(self.server_args, self._channel)
        self._loop = asyncio.new_event_loop()
        config = served_model_config(self.server_args)
        self._manager = TokenizerManager(self.server_args, config, _LocalLink(self._channel))
        path = self.server_args.tokenizer_path or self.server_args.model_path
        self._manager.serve(self.ready, None if self.server_args.skip_tokenizer_init else Tokenizer.load(path))

    def generate(self, **request: Any) -> dict[str, Any] | list[dict[str, Any]]:
        """Generate with the fields of POST /generate (`GenerateReqInput`), and return its reply.

        Raises `LockstepError` for a refusal.
        """
        return self._run(self._generate(GenerateReqInput(**request)))

    def control(self, verb: type[ControlReqInput[AnyReply]], **fields: Any) -> ControlReqOutput[AnyReply]:
        """Send one control verb of `rollout.core.messages` and return its answer.

        Raises the errors that a server would answer with.
        """
        return self._run(self._manager.control(verb, timeout_s=_CONTROL_TIMEOUT_S, **fields))

    def close(self) -> None:
        """End the engine.  Its memory is free once nothing refers to it."""
        self._manager.stop_admitting()
        self._loop.close()

    async def _generate(self, request: GenerateReqInput) -> dict[str, Any] | list[dict[str, Any]]:
        return await (await self._manager.submit(request)).result()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(self._turn(work))

    async def _turn(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.sleep(0)
            with torch.inference_mode():
                self.scheduler.tick(0)
            while self._channel.outbox:
                self._manager.handle_message(self._channel.outbox.popleft())
        return task.result()
