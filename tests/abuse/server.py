"""The server under attack: `lockstep serve` as a process, under limits, with its log in a file.

Notes every answer that an attack gets, and complains of answers that the protocol does not name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.abuse.schema import Operation, operations
from tests.abuse.usage import Usage, limit_memory, process_tree, usage_of
from tests.server_process import flags
from weight_sync.process_group import free_port

START_S = 90.0
STOP_S = 30.0
CALL_S = 15.0
MEMORY_LIMIT = 3 << 30
"""Bytes that each process of the server may allocate after the server is ready."""
DOCS = Path(__file__).parents[2] / "docs/reference/http/index.md"
SERVE = ("rollout.cli.main", "serve")
AT_REST = (
    *("/finish_weight_update", "/abort_weight_update", "/stop_profile", "/resume_memory_occupation"),
    *("/continue_generation", "/continue_generation"),
)
"""Calls that bring a server to rest; the server refuses each that finds nothing to end."""


class Harmed(Exception):
    """The server did not do what it promises."""


@dataclass(frozen=True)
class Setup:
    """The settings and limits that a server is started with."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    descriptors: tuple[int, int] = (256, 4096)  # soft and hard limit

    def key(self, is_control: bool) -> str | None:
        return self.settings.get("admin_api_key" if is_control else "api_key")


class Victim:
    """A running server."""

    def __init__(self, setup: Setup, model: Path, module: tuple[str, ...] = SERVE) -> None:
        self.setup, self.model = setup, model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._temp = tempfile.TemporaryDirectory(prefix="abuse-")
        self.folder = Path(self._temp.name)
        (self.folder / "tmp").mkdir()
        self.log = self.folder / "log.txt"
        command = [sys.executable, "-m", *module, "--model-path", str(model), "--port", str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags(setup.settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=os.environ
                | {
                    "TMPDIR": str(self.folder / "tmp"),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(Path(__file__).parents[2]),
                },
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, setup.descriptors),
            )
        self._http: dict[str, httpx.Client] = {}
        self.complaints: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.named = named_statuses()
        self.operations: list[Operation] = []
        self._control_paths: set[str] = set()
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            self.close()
            raise
        self.operations = operations(self.right("GET", "/openapi.json").json())
        self._control_paths = {one.path for one in self.operations if one.is_control}
        limit_memory(self.pids, MEMORY_LIMIT)

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        json_body: Any = None,
        *,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> httpx.Response | None:
        """Call the server; note and judge its answer.  Without an answer, complain and return None."""
        if content is None and json_body is not None:
            content = json.dumps(json_body).encode()
        sent = dict(headers or {})
        key = self.setup.key(path.partition("?")[0] in self._control_paths)
        if key is not None:
            sent.setdefault("authorization", f"Bearer {key}")
        try:
            response = self._client().request(method, path, content=content, headers=sent, timeout=timeout or CALL_S)
        except httpx.HTTPError as error:
            if not self.ends_within(0.5):  # a server that has ended is reported once, afterwards
                self.complain(f"{method} {path} {shown(content)}: {type(error).__name__}")
            return None
        self.judge(method, path, content, response)
        return response

    def post(self, path: str, **body: Any) -> httpx.Response | None:
        return self.call("POST", path, body)

    def right(self, method: str, path: str, json_body: Any = None, timeout: float | None = None) -> httpx.Response:
        """Return an answer that must be 200.  Raises `Harmed`."""
        response = self.call(method, path, json_body, timeout=timeout)
        if response is None:
            raise Harmed(f"{method} {path}: no answer")
        if response.status_code != 200:
            raise Harmed(f"{method} {path}: {response.status_code} {response.text[:200]}")
        return response

    def judge(self, method: str, path: str, content: bytes | None, response: httpx.Response) -> None:
        """Complain of a status that the protocol does not name, and of an error that has not the documented shape."""
        status = response.status_code
        self.statuses[status] += 1
        if status >= 500 and status not in self.named:
            self.complain(f"{method} {path} {shown(content)}: {status} {response.text[:160]}")
        elif status >= 400 and not path.startswith("/flush_cache"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                if response.json()["error"]["message"]:
                    return
            self.complain(f"{method} {path} {shown(content)}: {status} without the one error shape")

    def complain(self, what: str) -> None:
        self.complaints.append(what)

    def _client(self) -> httpx.Client:
        if "one" not in self._http:
            limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
            self._http["one"] = httpx.Client(base_url=self.url, limits=limits, trust_env=False)
        return self._http["one"]

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        return process_tree(self.process.pid)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.running

    def usage(self) -> Usage:
        return usage_of(self.pids)

    def state(self) -> dict[str, Any]:
        """Return the scheduler's own numbers."""
        return self.right("GET", "/server_info").json()["internal_states"][0]

    def last_words(self) -> str:
        """Return the last lines of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 2000))
            return " / ".join(log.read().decode(errors="replace").splitlines()[-3:])[-400:]

    def new_connection(self) -> None:
        """Close all connections, so that the next call opens new ones."""
        client = self._http.pop("one", None)
        if client is not None:
            client.close()

    def stop(self) -> list[str]:
        """End the server as its owner does; return what is wrong with how it ended."""
        pids, wrong = self.pids, []
        self.new_connection()
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_S)
            if status != 0:
                wrong.append(f"SIGTERM: exit status {status}: {self.last_words()}")
        except subprocess.TimeoutExpired:
            wrong.append(f"SIGTERM: still there after {STOP_S:g} s")
            self.kill()
        left = [pid for pid in pids[1:] if Path(f"/proc/{pid}").exists()]
        if left:
            wrong.append(f"{len(left)} processes outlive the server")
        of_profiles = ("*.trace.json.gz", "torchinductor_*")  # traces, and files of torch's profiler
        found = (self.folder / "tmp").iterdir()
        files = sorted(path.name for path in found if not any(path.match(pattern) for pattern in of_profiles))
        return wrong + [f"left in its temporary folder: {name}" for name in files]

    def kill(self) -> None:
        """End all its processes now.  Safe from any thread."""
        for pid in reversed(self.pids):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)

    def close(self) -> None:
        if self.running:
            self.kill()
        self.new_connection()
        self._temp.cleanup()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if not self.running:
                raise Harmed(f"the server did not start: {self.last_words()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=1.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise Harmed(f"the server was not ready within {START_S:g} s")


def named_statuses() -> set[int]:
    """Return the statuses above 500 in the documentation's table of errors; it lists 500 itself as a defect."""
    section = DOCS.read_text().split("## Errors", 1)[1].split("\n## ", 1)[0]
    return {int(status) for status in re.findall(r"^\| (5\d\d) ", section, re.MULTILINE)} - {500}


def shown(content: bytes | None) -> str:
    """Return the beginning of a body, for a complaint."""
    return (content or b"")[:120].decode(errors="replace")
