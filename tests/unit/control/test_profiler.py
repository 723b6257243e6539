"""Profiles: a real trace of real steps, when it ends, and what is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control import profiler
from rollout.control.profiler import StepProfiler
from rollout.core.args.named_folders import NamedFolders
from rollout.core.errors import BadRequest
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.profile import StartProfileReqInput, StopProfileReqInput
from tests.http_harness import live_server
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    torch.set_num_threads(1)
    return Harness(tiny_checkpoint(tmp_path_factory.mktemp("model"), "dense"), enable_return_routed_experts=False)


def start(harness: Harness, folder: Path | str, **fields: Any) -> ControlReqOutput:
    fields = {"profile_prefix": "p", "activities": ["CPU", "GPU"], "with_stack": False} | fields
    return harness.control(StartProfileReqInput, output_dir=str(folder), **fields)


def operators(path: str) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"]


def test_a_trace_of_the_steps_between(harness: Harness, tmp_path: Path) -> None:
    started = start(harness, tmp_path / "new" / "folder")
    assert started.success and not Path(started.data["files"][0]).exists()
    again = start(harness, tmp_path)
    assert again.status_code == 409 and "another profile is running" in again.message
    harness.generate([[5, 9, 2]], {"max_new_tokens": 4})
    stopped = harness.control(StopProfileReqInput)
    assert stopped.success and stopped.data["files"] == started.data["files"]
    (path,) = stopped.data["files"]
    assert Path(path).parent == tmp_path / "new" / "folder" and Path(path).name.startswith("p-")
    assert any("attention" in name or "mm" in name for name in operators(path))
    assert harness.control(StopProfileReqInput).status_code == 409


def test_it_ends_by_itself_after_so_many_steps(harness: Harness, tmp_path: Path) -> None:
    (short,) = start(harness, tmp_path, num_steps=2).data["files"]
    harness.generate([[5, 9, 2]], {"max_new_tokens": 12})
    deadline = time.monotonic() + 20
    while harness.control(StopProfileReqInput).status_code != 409:
        assert time.monotonic() < deadline
    (long,) = start(harness, tmp_path, with_stack=True, record_shapes=True).data["files"]
    harness.generate([[5, 9, 2]], {"max_new_tokens": 12})
    assert harness.control(StopProfileReqInput).success
    assert 0 < len(operators(short)) < len(operators(long)) / 3


IMPORTS = """
import sys
from tests.scheduler_harness import Harness
from rollout.core.messages.profile import StartProfileReqInput, StopProfileReqInput
harness = Harness(sys.argv[1], enable_return_routed_experts=False)
fields = {"output_dir": sys.argv[2], "profile_prefix": "p", "activities": ["CPU"], "with_stack": True}
assert harness.control(StartProfileReqInput, **fields).success
harness.generate([[5, 9, 2]], {"max_new_tokens": 4})
assert harness.control(StopProfileReqInput).success
print(*(name for name in sys.modules if name.startswith("torch._inductor")))
"""


def test_a_profile_does_not_load_the_compiler_of_torch(harness: Harness, tmp_path: Path) -> None:
    """A rank would keep 140 MB of the compiler for good."""
    folder = tiny_checkpoint(tmp_path / "model", "dense")
    command = [sys.executable, "-c", IMPORTS, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == ""
    assert [path.name.split("-")[0] for path in tmp_path.glob("*.gz")] == ["p"]
    assert not list(tmp_path.glob("*.json"))


def test_what_cannot_be_done_starts_nothing(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for fields, message in (
        ({"folder": tmp_path / "file" / "x"}, "output_dir"),
        ({"folder": "/proc/nowhere"}, "output_dir"),
        ({"folder": "/a\0b"}, "output_dir"),
        ({"folder": "traces"}, "absolute"),
        ({"folder": tmp_path, "activities": []}, "recorded"),
    ):
        answer = start(harness, **fields)  # type: ignore[arg-type]
        assert answer.status_code == 400 and message in answer.message
    assert harness.control(StopProfileReqInput).status_code == 409


def test_a_folder_that_is_gone_is_told(harness: Harness, tmp_path: Path) -> None:
    assert start(harness, tmp_path / "gone").success
    (tmp_path / "gone").rmdir()
    stopped = harness.control(StopProfileReqInput)
    assert not stopped.success and stopped.status_code == 500 and "gone" in stopped.message
    assert start(harness, tmp_path).success and harness.control(StopProfileReqInput).success


class FakeProfile:
    """A profile in the place of torch's, which cannot record several threads of one process: it only writes a file."""

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> None:
        """Start on the thread of a rank."""
        if threading.current_thread().name.startswith(FakeProfile.fails_on):
            raise RuntimeError("no profiler here")

    def __exit__(self, *_: object) -> None:
        if threading.current_thread().name.startswith(FakeProfile.stop_fails_on):
            raise RuntimeError("nothing was recorded")

    def export_chrome_trace(self, path: str) -> None:
        if "rank-1." in path:
            assert FakeProfile.may_write.wait(20)
        Path(path).write_text("trace")

    fails_on = stop_fails_on = "nowhere"
    may_write = threading.Event()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeProfile]:
    monkeypatch.setattr(profiler, "profile", FakeProfile)
    monkeypatch.setattr(FakeProfile, "may_write", threading.Event())
    FakeProfile.may_write.set()
    return FakeProfile


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelHarness]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("ranks") / "m", "moe")
    with ParallelHarness(folder, tp_size=2, dp_size=2, enable_dp_attention=True) as harness:
        yield harness


def is_under_way(harness: ParallelHarness) -> list[bool]:
    """Return for each rank whether a profile is under way."""
    hooks = [[getattr(hook, "__self__", None) for hook in each.agenda.order] for each in harness.schedulers]
    profilers = [next(owner for owner in owners if isinstance(owner, StepProfiler)) for owners in hooks]
    return [profiler._trace is not None for profiler in profilers]


def test_a_stop_waits_for_the_files_of_all_ranks(
    ranks: ParallelHarness, fake: type[FakeProfile], tmp_path: Path
) -> None:
    assert start(ranks, tmp_path).success and is_under_way(ranks) == [True, True]
    fake.may_write.clear()
    stop = ranks.post(StopProfileReqInput)
    for _ in range(20):
        ranks.tick()
        time.sleep(0.005)
    assert stop not in ranks.answers, "the second rank is still writing"
    assert start(ranks, tmp_path).status_code == 409 and is_under_way(ranks) == [False, False]
    fake.may_write.set()
    stopped = ranks.wait(stop)
    assert stopped.success and len(stopped.data["files"]) == 2
    assert all(Path(path).exists() for path in stopped.data["files"])
    assert start(ranks, tmp_path).success and is_under_way(ranks) == [True, True]
    assert ranks.control(StopProfileReqInput).success


def test_what_fails_on_one_rank_has_failed_on_all(
    ranks: ParallelHarness, fake: type[FakeProfile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(output_dir: str | None, _: Any) -> str:
        if threading.current_thread().name.startswith("rank1"):
            raise BadRequest("output_dir: it is not there")
        return str(output_dir)

    with monkeypatch.context() as patched:
        patched.setattr(profiler, "_writable", refuse)
        refused = start(ranks, tmp_path)
        assert refused.status_code == 400 and refused.message == "rank 1: output_dir: it is not there"
    with monkeypatch.context() as patched:
        patched.setattr(fake, "fails_on", "rank1")
        failed = start(ranks, tmp_path)
        assert failed.status_code == 500 and failed.message == "rank 1: no profiler here"
    assert is_under_way(ranks) == [False, False] and ranks.control(StopProfileReqInput).status_code == 409
    assert start(ranks, tmp_path).success
    with monkeypatch.context() as patched:
        patched.setattr(fake, "stop_fails_on", "rank1")
        stopped = ranks.control(StopProfileReqInput)
        assert stopped.status_code == 500 and stopped.message == "rank 1: nothing was recorded"
    assert start(ranks, tmp_path).success and ranks.control(StopProfileReqInput).success


def test_all_ranks_end_after_the_same_step(ranks: ParallelHarness, fake: type[FakeProfile], tmp_path: Path) -> None:
    """A rank without requests takes part; a turn in which no rank has any is not a step."""
    assert start(ranks, tmp_path, num_steps=4).success
    for _ in range(10):
        assert not ranks.tick()
    rid = ranks.submit([5, 9, 2], params={"max_new_tokens": 12}, dp_rank=1)
    seen = [is_under_way(ranks) for _ in range(12) if ranks.tick()]
    assert ranks.results[rid].finished is not None
    assert seen == [[True, True]] * 4 + [[False, False]] * 8


def test_without_a_profile_nothing_is_asked_of_other_ranks(ranks: ParallelHarness) -> None:
    groups = [group for scheduler in ranks.schedulers for group in scheduler.parallel.communicators]
    hooks = [hook for each in ranks.schedulers for hook in each.agenda.order]
    profilers = [hook for hook in hooks if isinstance(getattr(hook, "__self__", None), StepProfiler)]
    for group in groups:
        group.reset_counts()
    assert len(profilers) == 2 and not any(advance() for advance in profilers)
    assert not any(group.counts for group in groups)


def test_without_a_key_a_profile_goes_to_scratch_or_beside_the_model(harness: Harness, tmp_path: Path) -> None:
    """C11: any user of the machine could have folders made wherever the server's user may write."""
    outside = Path.home() / "lockstep-test-c11"
    linked = tmp_path / "link"
    linked.symlink_to(Path.home())
    try:
        for folder in (outside / "deep", linked / outside.name, tmp_path / ".ssh", tmp_path / ".a" / "b"):
            refused = start(harness, folder)
            assert refused.status_code == 400 and refused.message.startswith("output_dir: "), refused
            assert "--weight-folders" in refused.message
        assert not outside.exists() and not (tmp_path / ".ssh").exists()
    finally:
        shutil.rmtree(outside, ignore_errors=True)
    beside = Path(harness.args.model_path).parent / "traces"
    assert start(harness, beside).success and harness.control(StopProfileReqInput).success


def test_weight_folders_hold_for_profiles_with_a_key_too(harness: Harness, tmp_path: Path) -> None:
    args = dataclasses.replace(harness.args, weight_folders=str(tmp_path / "allowed"), api_key="k")
    folders = NamedFolders.of(args)
    with pytest.raises(BadRequest, match=r"output_dir: .* is outside the folders of this server"):
        profiler._writable(str(tmp_path / "other"), folders)
    assert profiler._writable(str(tmp_path / "allowed" / "new"), folders) == str(tmp_path / "allowed" / "new")
    assert profiler._writable(None, folders), "the server chose that one itself"


def test_profile_bodies_of_sglang_and_vllm_are_accepted(tmp_path: Path) -> None:
    with live_server(write_model_folder(tmp_path)) as live:
        sglang = {"output_dir": "/x", "start_step": None, "num_steps": 3, "activities": ["CPU"], "with_stack": False}
        vllm = {"profile_prefix": "run-1", "max_iterations": 5}
        for body in (sglang, vllm, None):
            assert live.client.post("/start_profile", json=body).json()["success"]
            assert live.client.post("/stop_profile").json()["success"]
        first, second, third = live.sent(StartProfileReqInput)
        assert (first.output_dir, first.num_steps, first.activities, first.with_stack) == ("/x", 3, ["CPU"], False)
        assert (second.profile_prefix, second.num_steps) == ("run-1", 5)
        assert (third.profile_prefix, third.num_steps) == ("lockstep", None)
        live.scheduler.received.clear()
        for body in (
            {"profile_by_stage": True},
            {"start_step": 3},
            {"num_steps": 0},
            {"num_steps": 10**6},
            {"activities": ["MEM"]},
            {"profile_prefix": "../x"},
            {"output_dir": "traces"},
            {"output_dir": "//"},
        ):
            reply = live.client.post("/start_profile", json=body)
            assert reply.status_code == 400 and next(iter(body)) in reply.json()["message"]
        assert not live.scheduler.received
