"""`lockstep serve` as a process, on a free port, with a deadline on everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from rollout.client import RolloutClient
from weight_sync.process_group import free_port

START_S = 60.0
STOP_S = 30.0


def flags(settings: dict[str, Any]) -> list[str]:
    """Write `{"max_total_tokens": 64, "disable_radix_cache": True}` as command-line flags; False becomes `--no-...`."""
    result = []
    for name, value in settings.items():
        flag = ("--no-" if value is False else "--") + name.replace("_", "-")
        result += [flag] if isinstance(value, bool) else [flag, str(value)]
    return result


class ServerProcess:
    """A running server.  Its temporary folder is its own, so that leftovers can be seen."""

    def __init__(self, model_path: Path, **settings: Any) -> None:
        self.port = settings.pop("port", None) or free_port()
        self.start_s = settings.pop("start_s", START_S)
        stderr = settings.pop("stderr", subprocess.PIPE)  # a file, for a server that may say much
        self.temp = tempfile.TemporaryDirectory(prefix="ls-")
        command = [sys.executable, "-m", "rollout.cli.main", "serve", "--model-path", str(model_path)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *flags(settings)],
            stderr=stderr,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TMPDIR": self.temp.name, "OMP_NUM_THREADS": "1"},
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        self.client = RolloutClient(self.url)

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()  # its ranks end with it
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.stderr()
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server did not become ready")

    def scheduler_pid(self) -> int:
        """Return the id of the one child of the server that runs the scheduler."""
        (pid,) = self.rank_pids()
        return pid

    def rank_pids(self) -> list[int]:
        """Return the ids of the children that run the ranks of this machine, in the order of their ranks."""
        return [pid for pid in self.children() if "rollout.engine.worker" in _command_line(pid)]

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def wait_exit(self, timeout_s: float = STOP_S) -> int:
        return self.process.wait(timeout_s)

    def stderr(self) -> str:
        """Return everything that the server wrote to its standard error; call it after the server has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in Path(self.temp.name).iterdir())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)
        self.http.close()
        self.client.close()
        self.temp.cleanup()


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
