"""A server's start and end as a process, with a stand-in for the scheduler: exit codes, last words, leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.cli import main as cli
from rollout.server import serve
from tests.tiny_tokenizer import write_model_folder
from weight_sync.process_group import free_port

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from rollout.server import launch
from rollout.core.args.server_args import ServerArgs
behaviour, port, model, drain = sys.argv[1:5]
try:
    args = ServerArgs(model_path=model, port=int(port), drain_timeout=float(drain), api_key="secret")
    command = [sys.executable, "-m", "tests.stand_in_scheduler", "--behaviour", behaviour]
    sys.exit(launch.run_server(args, command))
except launch.LockstepError as error:
    sys.exit(launch._fail(str(error)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(Path(tmp_path_factory.mktemp("model")))


class Served:
    """The process and its output."""

    def __init__(self, behaviour: str, folder: Path, temp: Path, drain: float = 5.0) -> None:
        self.port = free_port()
        self.temp = temp
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, behaviour, str(self.port), str(folder), str(drain)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temp), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"authorization": "Bearer secret"}, timeout=20
        )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 40
        statuses = set()
        while time.monotonic() < deadline:
            try:
                status = self.client.get("/health").status_code
            except httpx.TransportError:
                status = 0
            statuses.add(status)
            if status == 200:
                assert statuses <= {0, 503, 200}
                return
            time.sleep(0.05)
        raise AssertionError(f"never ready: {statuses}")

    def scheduler_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def end(self, timeout: float = 20.0) -> tuple[int, str]:
        """Exit status and stderr; nothing may be left behind."""
        _, said = self.process.communicate(timeout=timeout)
        assert list(self.temp.glob("lockstep-*")) == []
        return self.process.returncode, said


@contextlib.contextmanager
def served(behaviour: str, folder: Path, temp: Path, drain: float = 5.0) -> Iterator[Served]:
    server = Served(behaviour, folder, temp, drain)
    try:
        yield server
    finally:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def in_background(server: Served, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a request from a thread; return the thread and a list that its response is put into.

    The list stays empty if the server goes away without an answer.
    """
    box: list[httpx.Response] = []

    def post() -> None:
        with contextlib.suppress(httpx.TransportError):
            box.append(server.client.post("/generate", json=body))

    thread = threading.Thread(target=post)
    thread.start()
    return thread, box


def wait_for_load(server: Served, count: int) -> None:
    deadline = time.monotonic() + 10
    while server.client.get("/get_load").json()[0]["num_running_reqs"] != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


@pytest.mark.full(but="15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    with served("serve", folder, tmp_path) as server:
        server.wait_until_ready()
        scheduler = server.scheduler_pid()
        assert [path.stat().st_mode & 0o777 for path in tmp_path.glob("lockstep-*")] == [0o700]
        body = {"input_ids": [1], "extra_key": "slow", "sampling_params": {"max_new_tokens": 30}}
        thread, box = in_background(server, body)
        wait_for_load(server, 1)
        server.process.send_signal(number)
        thread.join()
        assert box[0].status_code == 200 and len(box[0].json()["output_ids"]) == 30
        status, said = server.end()
        assert status == 0, said
        assert f"lockstep: ready at http://127.0.0.1:{server.port}" in said
        assert [line for line in said.splitlines() if not LOG_LINE.match(line)] == []
        assert all(
            f"lockstep: {name} " in said for name in ("model", "parameters", "KV cache", "versions", "dashboard")
        )
        assert "Traceback" not in said and "secret" not in said
        assert is_gone(scheduler)


@pytest.mark.full
def test_what_does_not_finish_in_the_drain_time_is_aborted_with_its_tokens(folder: Path, tmp_path: Path) -> None:
    with served("serve", folder, tmp_path, drain=0.3) as server:
        server.wait_until_ready()
        body = {"input_ids": [1], "extra_key": "hold"}
        thread, box = in_background(server, body)
        wait_for_load(server, 1)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        status = 0
        while status != 503 and time.monotonic() < deadline:  # a request that beats the signal is served
            status = server.client.post("/generate", json={"input_ids": [1]}).status_code
        assert status == 503
        thread.join()
        assert box[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.end()[0] == 0


@pytest.mark.full
def test_a_second_signal_stops_at_once(folder: Path, tmp_path: Path) -> None:
    with served("serve", folder, tmp_path, drain=30.0) as server:
        server.wait_until_ready()
        scheduler = server.scheduler_pid()
        thread, box = in_background(server, {"input_ids": [1], "extra_key": "hold"})
        wait_for_load(server, 1)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.end(timeout=3.0)[0] == 128 + signal.SIGINT
        assert is_gone(scheduler)
        thread.join()
        assert box == []


@pytest.mark.full
def test_a_killed_scheduler_ends_the_server_with_the_reason(folder: Path, tmp_path: Path) -> None:
    with served("serve", folder, tmp_path) as server:
        server.wait_until_ready()
        thread, box = in_background(server, {"input_ids": [1], "extra_key": "hold"})
        wait_for_load(server, 1)
        os.kill(server.scheduler_pid(), signal.SIGKILL)
        status, said = server.end(timeout=10.0)
        thread.join()
        assert status == 1
        assert said.splitlines()[-1] == (
            "lockstep: error: the scheduler process ended while serving: killed by SIGKILL"
        )
        assert box[0].status_code == 503
        assert box[0].json()["error"]["message"].endswith("killed by SIGKILL")


@pytest.mark.full(but="fail-model.safetensors is truncated")
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fail", "model.safetensors is truncated"),
        ("die", "the scheduler process ended before it was ready: exit status 7"),
        ("garbage", "a message of the scheduler process cannot be read"),
    ],
)
def test_a_scheduler_that_cannot_start_is_one_line(folder: Path, tmp_path: Path, behaviour: str, reason: str) -> None:
    with served(behaviour, folder, tmp_path) as server:
        status, said = server.end(timeout=40.0)
        assert status == 1
        errors = [line for line in said.splitlines() if "error" in line]
        assert len(errors) == 1 and errors[0].startswith(f"lockstep: error: {reason}")
        assert "Traceback" not in said


@pytest.mark.full
def test_a_signal_while_starting_exits_0(folder: Path, tmp_path: Path) -> None:
    with served("serve", folder, tmp_path) as server:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                server.client.get("/ping")
                break
            except httpx.TransportError:
                time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", "{tmp}/none"], "is not a folder"),
        (["--model-path", "{tmp}"], "config.json is missing"),
        (["--model-path", "{model}", "--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}"),
        (["--model-path", "{model}", "--host", "0.0.0.0"], "--api-key"),
        (["--model-path", "{model}", "--host", "no.such.host.invalid", "--api-key", "k"], "--host"),
        (["--model-path", "{model}", "--tp-size", "65"], "--tp-size"),
        (["--model-path", "{model}", "--dp-size", "200"], "200 ranks"),
        (["--model-path", "{model}", "--tp-size", "4", "--ep-size", "3"], "--ep-size 3 does not divide"),
        (["--model-path", "{model}", "--tp-size", "4", "--dp-size", "3", "--enable-dp-attention"], "--dp-size 3"),
        (["--model-path", "{model}", "--tp-size", "2", "--moe-a2a-backend", "all_to_all"], "--ep-size"),
        (["--model-path", "{model}", "--nnodes", "2", "--tp-size", "2"], "--dist-init-addr"),
        (["--model-path", "{model}", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:1"], "--nnodes 2 does not divide"),
        (["--model-path", "{dense}", "--return-routed-experts-by-default"], "dense"),
        (["--model-path", "{odd}"], "MambaForCausalLM is not supported"),
    ],
)
def test_bad_settings_are_one_line_and_start_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    dense = tmp_path / "dense"
    odd = tmp_path / "odd"
    for path in (dense, odd):
        path.mkdir()
        write_model_folder(path, dense=True)
    config = odd / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "MambaForCausalLM"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {
            "tmp": tmp_path, "model": folder, "dense": dense, "odd": odd, "taken": taken.getsockname()[1],
        }  # fmt: skip
        words = [word.format(**names) for word in arguments]
        started = time.monotonic()
        assert serve.main(words) == 1
        assert time.monotonic() - started < 15.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lockstep: error: ")
    assert message.format(**names) in lines[0]


LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) [\w.]+: ")
NO_TORCH = """
import contextlib, io, json, sys
from rollout.cli import main as cli
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
    assert "Traceback" not in said.getvalue(), said.getvalue()
    assert status == (0 if "--help" in words else status or "refused"), (words, status)
    heavy = {"torch", "transformers", "fastapi", "numpy", "safetensors", "httpx", "uvicorn", "pydantic", "zmq", "yaml"}
    loaded = heavy & set(sys.modules)
    assert not loaded, f"{words} loaded {loaded}"
"""


def test_help_and_what_is_refused_do_not_wait_for_torch_n11(folder: Path) -> None:
    """N11: `serve --help` and every typing error took 3.4 s of CPU; 0.15 s now."""
    serve = ["serve", "--model-path", str(folder)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [
            ["--help"],
            *([command, "--help"] for command in cli.COMMANDS),
            *([command, "--no-such-flag"] for command in cli.COMMANDS),
            [*serve, "--port", "80000"],
            [*serve, "--port", "x"],
            [*serve, "--port", str(taken.getsockname()[1])],
            [*serve, "--host", "0.0.0.0"],
            [*serve, "--enable-eplb"],
            [*serve, "--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "no.such.host.invalid:1"],
            [*serve, "--api-key", "@/nowhere"],
            ["serve", "--model-path", "/nowhere"],
            ["serve", "--model-path", str(folder.parent)],
            ["build-kernels", "--cpu-isa", "z80"],
            ["bench", "--output-len", "1"],
        ]
        code = [sys.executable, "-c", NO_TORCH, json.dumps(cases)]
        subprocess.run(code, check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.full
def test_the_http_process_imports_no_layers() -> None:
    code = (
        "import sys, rollout.server.launch\n"
        "parts = ['rollout.' + part for part in ('kernels', 'layers', 'model', 'executor', 'scheduler')]\n"
        "assert not [name for name in sys.modules if name.startswith((*parts, 'weight_sync'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["dance"])
    assert caught.value.code == 2 and "serve" in capsys.readouterr().err
