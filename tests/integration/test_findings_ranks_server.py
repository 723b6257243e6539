"""Servers whose ranks stop, whose trainers die within a call, and which are told to stop within one."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess, free_port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", seed=1)


class Call(threading.Thread):
    """A POST on a thread of its own."""

    def __init__(self, server: ServerProcess, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.url + path, body
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.reply = httpx.post(self._url, json=self._body, timeout=60, trust_env=False)

    def wait(self, seconds: float) -> httpx.Response:
        self.join(seconds)
        assert self.reply is not None, f"no answer within {seconds} s"
        return self.reply


def rendezvous(server: ServerProcess) -> Call:
    """A weight verb that takes as long as it may: nobody listens where it is to go."""
    body = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    call = Call(server, "/init_weights_update_group", body)
    time.sleep(0.7)
    return call


# --- W22: told to stop within a weight verb ----------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_s", "drain_s", "status"), [(2.0, 20.0, 502), (30.0, 1.0, 503)])
def test_w22_a_weight_verb_under_way_is_answered_before_the_server_stops(
    folder: Path, timeout_s: float, drain_s: float, status: int
) -> None:
    """By its own outcome if that comes in time, else by 503; on a server that has nothing else to do."""
    with ServerProcess(folder, weight_update_timeout=timeout_s, drain_timeout=drain_s) as server:
        call = rendezvous(server)
        server.process.send_signal(signal.SIGTERM)
        reply = call.wait(20)
        assert reply.status_code == status and reply.json()["success"] is False
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr()
