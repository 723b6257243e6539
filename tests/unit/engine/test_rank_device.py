"""The device that a rank takes, and the message where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.distributed.parallel import Parallel
from rollout.engine.build import build_scheduler
from rollout.engine.device import claim_device, rank_device
from rollout.scheduler.channel import LocalChannel


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The list of devices that became the current one, on a machine of eight."""
    claimed: list[torch.device] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return claimed


def settings(**fields: Any) -> ServerArgs:
    return ServerArgs(**{"model_path": "m", "device": "cuda", **fields})


@pytest.mark.parametrize(
    ("fields", "indices"),
    [
        ({}, [0]),
        ({"base_gpu_id": 3}, [3]),
        ({"device": "cuda:5"}, [5]),
        ({"tp_size": 4}, [0, 1, 2, 3]),
        ({"tp_size": 2, "base_gpu_id": 6}, [6, 7]),
        ({"tp_size": 2, "dp_size": 3}, [0, 1, 2, 3, 4, 5]),
        ({"tp_size": 8, "nnodes": 2, "base_gpu_id": 4}, [4, 5, 6, 7, 4, 5, 6, 7]),
    ],
)
def test_ranks_of_a_machine_take_devices_in_turn(
    eight_gpus: list[torch.device], fields: dict[str, Any], indices: list[int]
) -> None:
    args = settings(**fields)
    found = [claim_device(args, rank) for rank in range(len(indices))]
    assert found == eight_gpus == [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize(
    ("stated", "is_warned"), [(None, False), ("1", True), ("7", True), ("8", False), ("32", False), ("x", False)]
)
def test_a_device_with_fewer_queues_than_streams_is_warned_of(
    eight_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stated: str | None,
    is_warned: bool,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if stated is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", stated)
    claim_device(settings(device="cpu"), 0)
    assert not caplog.records
    claim_device(settings(), 0)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [] if not is_warned else f"MAX_CONNECTIONS={stated}: steps, staged weights" in said[0], said
    assert not is_warned or "env -u CUDA_DEVICE_MAX_CONNECTIONS" in said[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_gpu_id": 8}, r"this rank needs CUDA device 8, and this machine shows 8 of them"),
        ({"tp_size": 4, "base_gpu_id": 5}, r"4 ranks from device 5 on need CUDA device 8, and this machine shows 8"),
        ({"tp_size": 2, "device": "cuda:1"}, r"cuda:1 is one device for 2 ranks: give --device cuda --base-gpu-id 1"),
        ({"device": "gpu"}, r"--device gpu: "),
    ],
)
def test_ranks_without_a_device_say_so_in_one_line(
    eight_gpus: list[torch.device], fields: dict[str, Any], message: str
) -> None:
    args = settings(**fields)
    for rank in range(args.tp_size):
        with pytest.raises(StartupError, match=message) as found:
            claim_device(args, rank)
        assert "\n" not in str(found.value)
    assert not eight_gpus


def test_hidden_devices_are_named(eight_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_device(settings(tp_size=2), 1) == torch.device("cuda:1")
    with pytest.raises(StartupError, match=r"shows 2 of them \(CUDA_VISIBLE_DEVICES=2,3\)"):
        rank_device(settings(tp_size=3), 0)


def test_without_cuda_the_reason_is_given(eight_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="--device cuda: torch finds no CUDA device here"):
        rank_device(settings(), 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartupError, match=r"--device cuda: this torch, .*, is built without CUDA"):
        rank_device(settings(), 0)
    assert rank_device(settings(device="cpu", tp_size=4), 3) == torch.device("cpu")


def test_a_server_looks_for_its_device_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="--device cuda: "):
        build_scheduler(settings(model_path="no such folder"), LocalChannel(), None, Parallel())


@pytest.mark.parametrize(
    ("device", "sizes"), [("cuda", (8192, 0.9)), ("cuda:1", (8192, 0.9)), ("cpu", (2048, 0.6)), ("auto", (2048, 0.6))]
)
def test_sizes_of_a_step_and_of_memory_follow_the_device(device: str, sizes: tuple[int, float]) -> None:
    args = settings(device=device)
    assert (args.step_prompt_tokens, args.memory_fraction) == sizes
    given = settings(device=device, chunked_prefill_size=-1, mem_fraction_static=0.5)
    assert (given.step_prompt_tokens, given.memory_fraction) == (-1, 0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_gpu_id": -1}, "--base-gpu-id must not be negative"),
        ({"base_gpu_id": 1, "device": "cpu"}, "--base-gpu-id counts CUDA devices: it needs --device cuda"),
        ({"deepep_mode": "normal"}, "--deepep-mode normal needs --moe-a2a-backend deepep"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        check_settings(settings(**fields))
