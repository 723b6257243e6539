"""`live_server(engine=EngineThread)`: a real scheduler with a real model on a thread, in the stand-in's place.

So a test has HTTP, messages, scheduler and model in its own process, where memory can be measured.
"""

from __future__ import annotations

import threading

from rollout.core.args.server_args import ServerArgs
from rollout.engine.build import build_scheduler
from rollout.scheduler.channel import ZmqChannel
from rollout.scheduler.scheduler import Scheduler


class EngineThread:
    """`error` is what ended the scheduler, if anything did."""

    def __init__(self, args: ServerArgs, input_addr: str, output_addr: str) -> None:
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self.scheduler: Scheduler | None = None
        self._args = args
        self._addresses = input_addr, output_addr

    def run(self) -> None:
        channel = ZmqChannel(*self._addresses)
        try:
            self.scheduler, ready = build_scheduler(self._args, channel)
            channel.send(ready)
            while not self.stopped.is_set() and not self.scheduler.serving.is_stopped:
                self.scheduler.tick()
        except BaseException as error:
            self.error = error
            raise
        finally:
            channel.close()
