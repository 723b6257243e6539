"""A server: from its settings to its orderly end.

start the scheduler, load the tokenizer -> serve
SIGTERM, SIGINT -> refuse new requests -> the scheduler drains -> answers are written -> exit 0
the scheduler dies -> what is in flight gets 503 -> exit 1 with the reason
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from rollout.core.args.server_args import ServerArgs
from rollout.core.console import fail as _fail
from rollout.core.console import say
from rollout.core.errors import LockstepError, StartupError, Unavailable
from rollout.core.messages.io_struct import SchedulerReady, ShutdownReqInput
from rollout.core.specs.model_config import ModelConfig
from rollout.dashboard.history import ServerHistory
from rollout.distributed.layout import ParallelLayout, layout_of
from rollout.http.metrics.metrics import Metrics
from rollout.http.native.info import state_of
from rollout.memory.allocator import share_freed_memory
from rollout.server import cycles
from rollout.server.app import build_app
from rollout.server.checks import bind, checked_config, remote_host
from rollout.server.connections import BoundedServer, connections_within, quiet_about_files, raise_file_limit
from rollout.server.event_loop import new_event_loop
from rollout.server.router_registration import RouterRegistration, own_url
from rollout.server.scheduler_process import WORKER_COMMAND, SchedulerProcesses, run_follower
from rollout.server.start_report import base_url, start_report
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.manager import Phase, TokenizerManager

PROGRESS_EVERY_S = 5.0
DRAIN_MARGIN_S = 5.0
RESPONSES_S = 5
"""Seconds for writing answers once the scheduler has stopped."""
LAST_WORDS_S = 1.0
"""Seconds that the last message of a scheduler process may take to arrive after its end."""
KEEP_ALIVE_S = 75


def run_server(
    args: ServerArgs, worker_command: Sequence[str] = WORKER_COMMAND, listener: socket.socket | None = None
) -> int:
    """Serve until a signal or the scheduler's death, and return the exit status.  Raises `StartupError`.

    `listener`: bound and listening already; None: it is bound here.
    """
    share_freed_memory()
    config, layout = checked_config(args), layout_of(args)
    if (args.context_length or 0) > config.max_position_embeddings:
        say(
            f"--context-length {args.context_length} is over the model's limit, so {config.max_position_embeddings} "
            "is used. For more, scale the rotation with --json-model-override-args."
        )
    host = remote_host(args)  # a name that does not resolve is refused before anything starts
    if args.node_rank > 0:
        with _private_folder() as folder:
            return asyncio.run(run_follower(args, layout, folder, worker_command))
    with (
        contextlib.closing(listener or bind(args)) as taken,
        _private_folder() as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        return runner.run(_Server(args, config, layout, taken, folder, worker_command, host).run())


class _Server:
    """`listener`: bound and listening.  `host`: the address of machine 0, where there are several."""

    def __init__(
        self,
        args: ServerArgs,
        config: ModelConfig,
        layout: ParallelLayout,
        listener: socket.socket,
        folder: Path,
        worker_command: Sequence[str],
        host: str | None,
    ) -> None:
        self._args = args
        self._config = config
        self._layout = layout
        self._listener = listener
        self._folder = folder
        self._worker_command = worker_command
        self._host = host
        self._max_connections = connections_within(raise_file_limit())
        self._stop = asyncio.Event()
        self._scheduler: SchedulerProcesses | None = None
        self._registration = RouterRegistration(args.register_url, own_url(args), args.api_key)

    async def run(self) -> int:
        """Start, serve and end in order; return the exit status.  Raises `StartupError`."""
        self._install_signals()
        channel = SchedulerChannel(self._folder, self._layout.num_replicas, self._host)
        metrics = Metrics(self._args.name, self._args.dp_size)
        manager = TokenizerManager(self._args, self._config, channel, observers=[metrics])
        history = ServerHistory(manager, metrics)
        http = _http_server(build_app(manager, metrics, history), self._args, self._max_connections)
        _share_time(asyncio.get_running_loop())
        quiet_about_files(asyncio.get_running_loop())
        http_task = asyncio.create_task(http.serve(sockets=[self._listener]))
        reader = asyncio.create_task(manager.run())
        sampler = asyncio.create_task(history.run()) if self._args.enable_metrics else None
        try:
            say(f"loading {self._args.model_path}")
            self._scheduler = await SchedulerProcesses.start(
                self._args, self._layout, channel, self._folder, self._worker_command
            )
            return await self._serve(manager, self._scheduler, http_task, reader)
        finally:
            http.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(http_task, RESPONSES_S + 2)
            if self._scheduler is not None:
                await self._scheduler.end(0.0)
            tasks = [task for task in (reader, sampler) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            channel.close()

    async def _serve(
        self,
        manager: TokenizerManager,
        scheduler: SchedulerProcesses,
        http_task: asyncio.Task[None],
        reader: asyncio.Task[None],
    ) -> int:
        death = asyncio.create_task(scheduler.first_end())
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._start(manager))
        search = asyncio.create_task(cycles.search_for_ever())
        try:
            await _first_of(start, death, stop, http_task, reader)
            if stop.done():
                return await self._shut_down(manager, scheduler, death)
            if not start.done():
                raise StartupError(await _reason(manager, death, reader, "before it was ready"))
            start.result()
            cycles.prepare()
            say(f"ready at {base_url(self._args)}")
            self._registration.join()
            await _first_of(death, stop, http_task, reader)
            if stop.done():
                await self._registration.leave()  # first, so that no request comes that would be refused
                return await self._shut_down(manager, scheduler, death)
            reason = await _reason(manager, death, reader, "while serving")
            manager.fail(reason)
            await self._registration.leave()
            return _fail(reason)
        finally:
            tasks = (death, stop, start, search)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, manager: TokenizerManager) -> None:
        """Start tokenizer and scheduler side by side, with progress lines."""
        path = self._args.tokenizer_path or self._args.model_path
        loading = (
            None if self._args.skip_tokenizer_init else asyncio.create_task(asyncio.to_thread(Tokenizer.load, path))
        )
        progress = asyncio.create_task(_report_progress())
        try:
            tokenizer = None if loading is None else await loading
            ready: SchedulerReady = await manager.scheduler_ready()
        finally:
            progress.cancel()
        manager.serve(ready, tokenizer)
        manager.restrictions.warm_up()
        state = await state_of(manager)
        for line in start_report(self._args, self._config, ready, state):
            say(line)

    async def _shut_down(
        self, manager: TokenizerManager, scheduler: SchedulerProcesses, death: asyncio.Task[str]
    ) -> int:
        """Drain and stop.  The HTTP server still runs, so that answers reach their clients."""
        if manager.phase is Phase.STARTING:
            return 0
        manager.stop_admitting()
        drain_s = self._args.drain_timeout
        say(f"stopping; {manager.num_in_flight} requests get {drain_s:g} s to finish (a second signal stops at once)")
        drained = asyncio.create_task(
            manager.communicator.call(ShutdownReqInput, drain_s + DRAIN_MARGIN_S, drain_s=drain_s)
        )
        await _first_of(drained, death)
        # The answer may still be in the socket when the process has ended.
        await asyncio.wait({drained}, timeout=LAST_WORDS_S)
        if not drained.done():
            reason = death.result().format(when=" while stopping")
            manager.fail(reason)
            await asyncio.gather(drained, return_exceptions=True)
            return _fail(reason)
        try:
            drained.result()
        except LockstepError as error:
            manager.fail(f"the server was stopped: {error}")
            return _fail(f"requests were cut off: {error}")
        manager.communicator.fail_all(Unavailable("the server stopped before the call ended"))
        await scheduler.end(DRAIN_MARGIN_S)
        return 0

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        if self._scheduler is not None:
            self._scheduler.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(128 + number)


def _share_time(loop: asyncio.AbstractEventLoop) -> None:
    """Keep the event loop quick next to threads that parse and write JSON.

    At each system call it releases the GIL, and waits for it as often as there are busy threads, each time as long as
    the switch interval.
    """
    sys.setswitchinterval(0.001)
    loop.set_default_executor(ThreadPoolExecutor(2, thread_name_prefix="off-loop"))


def _http_server(app: FastAPI, args: ServerArgs, max_connections: int) -> BoundedServer:
    return BoundedServer(
        app,
        most=max_connections,
        receive_timeout_s=args.receive_timeout,
        short_generate=app.state.short_generate,
        log_config=None,
        log_level="info" if args.log_level == "debug" else "warning",
        access_log=args.log_level == "debug",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=RESPONSES_S,
    )


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Yield a folder that only this user can enter, and remove it at the end."""
    folder = tempfile.mkdtemp(prefix="lockstep-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _reason(manager: TokenizerManager, death: asyncio.Task[str], reader: asyncio.Task[None], when: str) -> str:
    """Return why the server cannot go on, in one line."""
    if reader.done() and not reader.cancelled() and reader.exception() is not None:
        return f"a message of the scheduler process cannot be read: {reader.exception()}"
    if not death.done():
        return "the HTTP server ended by itself"
    # Its last message may still be on its way.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(manager.scheduler_failed.wait(), LAST_WORDS_S)
    return manager.failure_message or death.result().format(when=f" {when}")


async def _report_progress() -> None:
    waited = 0.0
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        waited += PROGRESS_EVERY_S
        say(f"still loading ({waited:.0f} s)")
