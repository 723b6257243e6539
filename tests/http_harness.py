"""A real HTTP server, a real `TokenizerManager` and real sockets in one process, over the stand-in scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollout.core.args.server_args import ServerArgs
from rollout.dashboard.history import ServerHistory
from rollout.families.registry import load_model_config
from rollout.http.metrics.metrics import Metrics
from rollout.server.app import build_app
from rollout.server.connections import BoundedServer, connections_within, raise_file_limit
from rollout.text.tokenizer import Tokenizer
from rollout.tokenizer_manager.channel import SchedulerChannel
from rollout.tokenizer_manager.manager import TokenizerManager
from tests.stand_in_scheduler import StandInScheduler
from tests.troubleshooting import require_entry

WAIT_S = 10.0
RECEIVE_S = 60.0
"""Seconds that a client may take to send a request."""
INVENTED = frozenset({"the queue is full", "queue is full", "broken pipe", "the scheduler process ended"})
"""Messages of stand-ins in tests.  All others have an entry in docs/troubleshooting."""


@dataclass
class Live:
    """A running server; `manager` belongs to the server's thread and may only be read."""

    url: str
    client: httpx.Client
    manager: TokenizerManager
    scheduler: StandInScheduler
    history: ServerHistory
    loop: asyncio.AbstractEventLoop

    def generate(self, **body: Any) -> Any:
        """Call /generate, and return its JSON reply; the status must be 200."""
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str = "/generate", **body: Any) -> tuple[int, str]:
        """Send a request that must fail with the one error shape; return the status and the message."""
        response = self.client.post(path, json=body)
        error = response.json()["error"]
        assert set(error) == {"type", "message"} and error["message"]
        if error["message"] not in INVENTED:
            require_entry(error["message"])
        return response.status_code, error["message"]

    def call_in_loop(self, function: Callable[[], Any]) -> None:
        self.loop.call_soon_threadsafe(function)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "condition did not come true"
            time.sleep(0.005)

    def sent(self, kind: type) -> list[Any]:
        """Return the messages of one type that reached the scheduler."""
        return [message for message in list(self.scheduler.received) if isinstance(message, kind)]


@contextlib.contextmanager
def live_server(
    folder: Path,
    *,
    with_tokenizer: bool = True,
    captures: bool = True,
    context_length: int = 160,
    engine: Callable[[ServerArgs, str, str], Any] | None = None,
    **args: Any,
) -> Iterator[Live]:
    """Serve the model folder until the block ends.

    `engine(server_args, input_addr, output_addr)` makes what takes the stand-in's place: `run` on a thread until
    `stopped` is set.
    """
    server_args = ServerArgs(model_path=str(folder), served_model_name="tiny", **args)
    box: list[Live] = []
    up, down = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as sockets:
            channel = SchedulerChannel(sockets)
            metrics = Metrics(server_args.name)
            manager = TokenizerManager(server_args, load_model_config(folder), channel, [metrics])
            addresses = (channel.input_addrs[0], channel.output_addr)
            if engine is not None:
                scheduler = engine(server_args, *addresses)
            else:
                scheduler = StandInScheduler(*addresses, str(folder / "tokenizer.json"), eos=264)
                scheduler.captures = captures
                scheduler.context_length = context_length
                scheduler.max_total_num_tokens = context_length + 40
            thread = threading.Thread(target=scheduler.run)
            thread.start()
            reader = asyncio.create_task(manager.run())
            tokenizer = Tokenizer.load(folder) if with_tokenizer else None
            manager.serve(await manager.scheduler_ready(), tokenizer)
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            history = ServerHistory(manager, metrics)
            app = build_app(manager, metrics, history)
            server = BoundedServer(
                app,
                most=connections_within(raise_file_limit()),
                receive_timeout_s=RECEIVE_S,
                short_generate=app.state.short_generate,
                log_config=None,
                access_log=False,
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            client = httpx.Client(base_url=url, timeout=WAIT_S)
            box.append(Live(url, client, manager, scheduler, history, asyncio.get_running_loop()))
            up.set()
            await asyncio.to_thread(down.wait)
            client.close()
            server.should_exit = True
            await serving
            scheduler.stopped.set()
            await asyncio.to_thread(thread.join)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            channel.close()

    def target() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)
            up.set()

    thread = threading.Thread(target=target)
    thread.start()
    assert up.wait(60.0)
    try:
        if failures:
            raise failures[0]
        yield box[0]
    finally:
        down.set()
        thread.join(30.0)
        assert not thread.is_alive() and not failures, failures
