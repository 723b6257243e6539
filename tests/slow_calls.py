"""Calls of a server on threads of their own, for verbs whose answers take long."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from tests.server_process import ServerProcess
from weight_sync.process_group import free_port


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
    """Start a weight verb that takes as long as it may: nothing listens at its address."""
    body = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    call = Call(server, "/init_weights_update_group", body)
    time.sleep(0.7)
    return call
