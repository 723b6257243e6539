"""A real Prometheus that scrapes servers of a test, by the configuration in deploy/prometheus."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from weight_sync.process_group import free_port

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
MISSING = "no Prometheus is installed (Debian's package: prometheus)"
FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
START_S = 30.0


class Prometheus:
    """A running Prometheus; `query` evaluates an expression now."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=10.0, trust_env=False)

    def query(self, expression: str) -> list[float]:
        """Return the values of all series.  Raises `ValueError` for an expression that Prometheus refuses."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        result = answer["data"]["result"]
        return [float(series["value"][1]) for series in result]

    def rules(self) -> list[dict[str, Any]]:
        """Return the state of every rule: `name`, `query`, `health`, `lastError`."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/-/ready").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"Prometheus did not become ready: {log.read_text()}")

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def prometheus(targets: Sequence[str]) -> Iterator[Prometheus]:
    """Start Prometheus with the rules of deploy/prometheus, scraping `targets` each second, until the block ends."""
    assert PROGRAM is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="prometheus-") as name:
        folder, port = Path(name), free_port()
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        config = yaml.safe_load((folder / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": list(targets)}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = folder / "log"
        command = [
            *(PROGRAM, "--config.file=prometheus.yml", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=stream)
        found = Prometheus(f"http://127.0.0.1:{port}")
        try:
            found.wait_ready(process, log)
            yield found
        finally:
            found.close()
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
