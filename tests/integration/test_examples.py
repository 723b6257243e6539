"""The programs in `examples/`, run as their users run them, against one real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from rollout.client import RolloutClient
from rollout.server.child_process import ChildProcess
from tests.model_zoo import tiny_checkpoint
from weight_sync.process_group import free_port

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TESTED = {"minimal_trainer.py", "openai_client.py", "exact_numerics.py"}


@dataclass(frozen=True)
class Running:
    url: str
    checkpoint: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("examples")
    checkpoint = tiny_checkpoint(folder / "checkpoint", dtype="bfloat16", vocab_size=384)
    port = free_port()
    command = [
        *(sys.executable, "-m", "rollout.cli.main", "serve", "--model-path", str(checkpoint)),
        *("--port", str(port), "--enable-return-routed-experts"),
    ]
    with ChildProcess("server", command, folder / "server.log") as process:
        url = f"http://127.0.0.1:{port}"
        with RolloutClient(url) as client:
            client.wait_until_ready(60.0)
        assert process.exit_status() is None, process.last_words()
        yield Running(url, checkpoint)


def run(*command: str, cwd: Path = ROOT) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == TESTED | {"__init__.py"}


def test_minimal_trainer_refreshes_the_server(server: Running) -> None:
    words = ("--model-path", str(server.checkpoint), "--url", server.url, "--steps", "2", "--samples", "4")
    lines = run(sys.executable, str(EXAMPLES / "minimal_trainer.py"), *words).splitlines()
    assert len(lines) == 2
    sampled_by = [re.search(r"sampled by (\S+),", line) for line in lines]
    assert [match and match.group(1) for match in sampled_by] == ["default", "step-1"]
    mismatches = [float(re.search(r"log-prob\| ([0-9.]+)", line).group(1)) for line in lines]  # type: ignore[union-attr]
    assert max(mismatches) < 0.15
    assert httpx.get(f"{server.url}/weight_version").json()["weight_version"] == "step-2"


def test_the_example_of_exact_numerics_finds_equal_bits(server: Running) -> None:
    out = run(
        sys.executable,
        str(EXAMPLES / "exact_numerics.py"),
        "--model-path",
        str(server.checkpoint),
        *("--url", server.url),
    )
    exact = re.findall(r"engine numerics +KL 0, largest \|Δ log-prob\| 0, equal bits (\d+) of (\d+)", out)
    routes = re.findall(r"equal routes (\d+) of (\d+) tokens", out)
    assert len(exact) == len(routes) == 2, out
    assert all(equal == total != "0" for equal, total in [*exact, *routes])
    plain = re.findall(r"plain transformers +.* equal bits (\d+) of (\d+)", out)
    assert all(int(equal) < int(total) for equal, total in plain), "plain transformers differ"


def test_the_example_openai_client_prints_each_answer(server: Running) -> None:
    out = run(sys.executable, str(EXAMPLES / "openai_client.py"), "--url", server.url)
    assert re.search(r"token ids: \[\d+(, \d+)*\]", out)
    assert {line.split(":")[0] for line in out.splitlines()} == {"completion", "chat", "weight version", "stream"}


def readme_blocks(server: Running) -> list[str]:
    """Return the Python blocks of the README as they stand there, with the address of this server."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block.replace("http://127.0.0.1:30000", server.url) for block in blocks]


def test_the_first_request_of_the_readme(server: Running) -> None:
    request, _ = readme_blocks(server)
    out = run(sys.executable, "-c", request)
    assert "VersionSpan(version=" in out and "2, 3)" in out.splitlines()[-1]


def test_curl_request_of_the_readme(server: Running) -> None:
    (body,) = re.findall(r"-d '(\{.*?\})'", (ROOT / "README.md").read_text())
    reply = httpx.post(f"{server.url}/generate", content=body, headers={"content-type": "application/json"}, timeout=30)
    assert reply.status_code == 200 and len(reply.json()["meta_info"]["output_token_logprobs"]) == 8


def test_the_refresh_of_the_readme_proves_the_weights(server: Running, tmp_path: Path) -> None:
    """The last test of this server, whose weights it replaces."""
    (tmp_path / "checkpoint").symlink_to(server.checkpoint)
    out = run(sys.executable, "-c", "\n".join(readme_blocks(server)), cwd=tmp_path)
    assert out.splitlines()[-1] == "1 True"
    assert httpx.get(f"{server.url}/weight_version").json()["weight_version"] == "1"
