"""The systemd unit's command line, variables and keys, started by hand as systemd would."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.model_zoo import tiny_checkpoint
from tests.tiny_tokenizer import write_tiny_tokenizer
from weight_sync.process_group import free_port

pytestmark = pytest.mark.full

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd" / "lockstep.service").read_text()
API, ADMIN = "api-key-of-the-test", "admin-key-of-the-test"
START_S = 90.0


def directives(name: str) -> list[str]:
    """Return the values of a directive, which may stand in the unit several times."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def post(self, path: str, key: str | None, **body: object) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60.0, trust_env=False)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    model = tiny_checkpoint(tmp_path / "m", "moe_dense_first", seed=3)
    write_tiny_tokenizer(model)
    etc, credentials, state = (tmp_path / name for name in ("etc", "credentials", "state"))
    for folder in (etc, credentials, state):
        folder.mkdir()
    port = free_port()
    (etc / "serve.yaml").write_text((DEPLOY / "serve.yaml").read_text())
    own = {"MODEL_PATH": model, "HOST": "127.0.0.1", "PORT": port, "NUM_THREADS": 1, "WEIGHT_FOLDERS": tmp_path}
    lines = "".join(f"LOCKSTEP_{name}={value}\n" for name, value in (own | {"MAX_TOTAL_TOKENS": 4096}).items())
    (etc / "lockstep.env").write_text((DEPLOY / "systemd" / "lockstep.env").read_text() + lines)
    for loaded, key in zip(directives("LoadCredential"), (API, ADMIN), strict=True):
        (credentials / loaded.split(":")[0]).write_text(key + "\n")
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(etc, credentials), cwd=state, env=environment(etc, state), stdout=stream, stderr=stream
        )
    found = Service(process, f"http://127.0.0.1:{port}", log)
    try:
        found.wait_ready()
        yield found
    finally:
        process.kill()
        process.wait()


def command(etc: Path, credentials: Path) -> list[str]:
    """Return ExecStart with the folders of the test and this environment's `lockstep`."""
    (line,) = directives("ExecStart")
    program, *words = shlex.split(line.replace("%d", str(credentials)).replace("/etc/lockstep", str(etc)))
    assert program == "/opt/lockstep/bin/lockstep"
    return [sys.executable, "-m", "rollout.cli.main", *words]


def environment(etc: Path, state: Path) -> dict[str, str]:
    """Return the variables of the unit and of its file, and no others but the path of the test's packages."""
    (file,) = directives("EnvironmentFile")
    lines = (etc / Path(file).name).read_text().splitlines()
    pairs = [word for line in directives("Environment") for word in shlex.split(line)]
    pairs += [line for line in lines if line and not line.startswith("#")]
    found = dict(pair.split("=", 1) for pair in pairs)
    kernels = {"LOCKSTEP_KERNEL_CACHE": str(Path.home() / ".cache" / "lockstep" / "kernels")}
    return found | kernels | {"HOME": str(state), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}


def test_the_service_asks_for_its_keys_and_drains(service: Service) -> None:
    params = {"max_new_tokens": 100, "ignore_eos": True}
    assert service.post("/generate", None, text="a").status_code == 401
    assert service.post("/generate", ADMIN[:-1], text="a").status_code == 401
    assert service.post("/pause_generation", API).status_code == 401
    assert service.post("/pause_generation", ADMIN).status_code == 200
    answers: list[httpx.Response] = []
    asked = threading.Thread(
        target=lambda: answers.append(service.post("/generate", API, text="hello", sampling_params=params))
    )
    asked.start()
    assert service.post("/continue_generation", ADMIN).status_code == 200
    while not answers and not busy(service):
        time.sleep(0.01)
    began = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    limit = float(directives("TimeoutStopSec")[0])
    assert service.process.wait(limit) == 0, service.log.read_text()
    assert time.monotonic() - began < limit
    asked.join(10.0)
    assert answers[0].status_code == 200 and answers[0].json()["meta_info"]["completion_tokens"] == 100
    log = service.log.read_text()
    assert API not in log and ADMIN not in log


def busy(service: Service) -> bool:
    answer = httpx.get(f"{service.url}/get_load", headers={"authorization": f"Bearer {API}"}, trust_env=False)
    return any(load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0) for load in answer.json())
