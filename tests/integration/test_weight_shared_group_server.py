"""One trainer and three servers in one group: one comes late, and one is killed while a version is on its way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from weight_sync.process_group import init_process_group
from weight_sync.sender import RefreshReport, WeightSender

pytestmark = pytest.mark.full

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17]
PARAMS = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
BUCKET_BYTES = 1 << 16
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints of one architecture by weight version."""
    base = tmp_path_factory.mktemp("models")
    return {f"v{seed}": tiny_checkpoint(base / f"v{seed}", "moe_dense_first", seed=seed) for seed in range(3)}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note the number of processes of each group that the sender joins."""
    sizes: list[int] = []

    def noted(address: str, port: int, rank: int, world_size: int, *more: Any) -> Any:
        sizes.append(world_size)
        return init_process_group(address, port, rank, world_size, *more)

    monkeypatch.setattr("weight_sync.sender.meeting.init_process_group", noted)
    yield sizes


def serve(folder: Path, version: str) -> ServerProcess:
    return ServerProcess(folder, weight_version=version, dtype="float32", max_total_tokens=2048, num_threads=1)


def answers(server: ServerProcess, version: str) -> Answers:
    """Return tokens and log-probabilities of each prompt, which must be of this weight version."""
    body = {"sampling_params": PARAMS, "return_logprob": True}
    replies = [server.http.post("/generate", json=body | {"input_ids": prompt}) for prompt in PROMPTS]
    assert all(reply.status_code == 200 for reply in replies), replies[0].text
    metas = [reply.json()["meta_info"] for reply in replies]
    assert {meta["weight_version"] for meta in metas} == {version}
    logprobs = [[entry[0] for entry in meta["output_token_logprobs"]] for meta in metas]
    return [(reply.json()["output_ids"], values) for reply, values in zip(replies, logprobs)]


def kill(server: ServerProcess) -> None:
    """Kill all processes of a server at once."""
    for pid in (*server.rank_pids(), server.process.pid):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


def test_a_late_server_joins_and_a_killed_one_costs_one_rejoin_and_no_version(
    folders: dict[str, Path], joined: list[int]
) -> None:
    with ExitStack() as stack:
        servers = {name: serve(folders["v0"], "v0") for name in "abc"}
        fresh = serve(folders["v2"], "v2")
        for server in (*servers.values(), fresh):
            stack.enter_context(server)
        expected, old = answers(fresh, "v2"), answers(servers["c"], "v0")

        sender = WeightSender(
            {name: servers[name].client for name in "ab"}, timeout_s=60.0, on_engine_failure="leave_out"
        )
        sender.connect(shared=True)

        def refresh(version: str, **options: Any) -> RefreshReport:
            tensors = logical_tensors(folders[version])
            return sender.refresh(tensors, version, bucket_bytes=BUCKET_BYTES, **options)

        assert refresh("v1").left_out == [] and joined == [3]
        between = answers(servers["a"], "v1")
        assert answers(servers["b"], "v1") == between and answers(servers["c"], "v0") == old
        assert not any(one == other for one, other in zip(between, expected)), "answers show whose weights they are"
        assert not any(one == other for one, other in zip(old, expected))

        sender.add_engine("c", servers["c"].client)
        sender.connect(shared=True)
        assert sender.connected == ["a", "b", "c"] and joined == [3, 4]
        done_when_killed: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> None:
            if not done_when_killed:
                done_when_killed.append((done, total))
                kill(servers["b"])

        report = refresh("v2", progress=progress)
        ((done, total),) = done_when_killed
        assert 0 < done < total and report.num_buckets > 4
        assert report.left_out == ["b"] and sender.connected == ["a", "c"] and joined == [3, 4, 3]
        assert all(report.engines[name].committed and report.engines[name].error is None for name in "ac")
        assert {name: answers(servers[name], "v2") for name in "ac"} == dict.fromkeys("ac", expected)
        for name in "ac":
            assert servers[name].client.weights_checker("checksum")["per_engine_checksum"] == report.digest
        sender.close()
