"""Profiles: a real trace of real steps, when it ends, and what is refused."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.io_struct import ControlReqOutput, StartProfileReqInput, StopProfileReqInput
from tests.http_harness import live_server
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    torch.set_num_threads(1)
    return Harness(tiny_checkpoint(tmp_path_factory.mktemp("model"), "dense"), enable_return_routed_experts=False)


def start(harness: Harness, folder: Path | str, **fields: Any) -> ControlReqOutput:
    fields = {"prefix": "p", "activities": ["CPU", "GPU"], "with_stack": False} | fields
    return harness.control(StartProfileReqInput, output_dir=str(folder), **fields)


def operators(path: str) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "cpu_op"]


def test_a_trace_of_the_steps_between(harness: Harness, tmp_path: Path) -> None:
    started = start(harness, tmp_path / "new" / "folder")
    assert started.success and not Path(started.data["files"][0]).exists()
    again = start(harness, tmp_path)
    assert again.status_code == 409 and "under way" in again.message
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


def test_bodies_of_clients(tmp_path: Path) -> None:
    with live_server(write_model_folder(tmp_path)) as live:
        sglang = {"output_dir": "/x", "start_step": None, "num_steps": 3, "activities": ["CPU"], "with_stack": False}
        vllm = {"profile_prefix": "run-1", "max_iterations": 5}
        for body in (sglang, vllm, None):
            assert live.client.post("/start_profile", json=body).json()["success"]
            assert live.client.post("/stop_profile").json()["success"]
        first, second, third = live.sent(StartProfileReqInput)
        assert (first.output_dir, first.num_steps, first.activities, first.with_stack) == ("/x", 3, ["CPU"], False)
        assert (second.prefix, second.num_steps) == ("run-1", 5) and (third.prefix, third.num_steps) == (
            "lockstep",
            None,
        )
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
