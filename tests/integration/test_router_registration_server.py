"""A server and its router: known when ready, off the list before it drains or when its scheduler dies."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class RouterStub:
    """`/workers` as vllm-router serves it."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.answer({"workers": [{"url": url} for url in stub.workers]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                stub.workers.append(body["url"])
                self.answer({"success": True})

            def do_DELETE(self) -> None:
                stub.workers.remove(unquote(self.path.removeprefix("/workers/")))
                self.answer({"success": True})

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def router() -> Iterator[RouterStub]:
    stub = RouterStub()
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", context_length=16_384)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_server_leaves_its_router_first_and_then_answers_what_it_has(router: RouterStub, folder: Path) -> None:
    settings = {"register_url": router.url, "max_total_tokens": 20_000, "drain_timeout": 30}
    with ServerProcess(folder, **settings) as server:
        wait_until(lambda: router.workers == [server.url])
        answers: list[httpx.Response] = []
        body = {"input_ids": [5, 9, 2], "sampling_params": GREEDY | {"max_new_tokens": 6000}}
        running = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=60))
        )
        running.start()
        wait_until(lambda: server.http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: router.workers == [])
        wait_until(lambda: server.http.get("/health").status_code == 503)
        assert running.is_alive(), "it drains"
        refused = server.http.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        assert refused.status_code == 503 and "stopping" in refused.text
        assert server.http.get("/liveness").status_code == 200 and server.http.get("/ready").status_code == 503
        assert server.wait_exit() == 0
        running.join(10)
        assert answers[0].status_code == 200
        assert answers[0].json()["meta_info"]["finish_reason"] == {"type": "length", "length": 6000}


def test_a_server_without_a_scheduler_leaves_its_router(router: RouterStub, folder: Path) -> None:
    with ServerProcess(folder, register_url=router.url, max_total_tokens=1000) as server:
        wait_until(lambda: router.workers == [server.url])
        os.kill(server.scheduler_pid(), signal.SIGKILL)
        assert server.wait_exit() == 1
        assert router.workers == []
