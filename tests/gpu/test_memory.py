"""Memory of the device: sleep and wake with recordings that stay valid, and the size of the KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from rollout.model.weight_loading import weight_tensors
from tests.gpu.engines import checkpoint, engine, facts_of, recordings
from tests.gpu.needs import need_cuda
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness

GIB = 1 << 30
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [checkpoint(base / f"v{seed}", device, seed=seed) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def _recordings(device: torch.device) -> Iterator[None]:
    with recordings(device):
        yield


def said(harness: Harness) -> list[tuple[list[int], list[float], bytes]]:
    return facts_of(harness.generate(PROMPTS, {"max_new_tokens": 10}, extra_key=f"k{harness._count}"))


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def addresses(harness: Harness) -> list[int]:
    runner = harness.scheduler.runner
    return [tensor.data_ptr() for tensor in (*weight_tensors(runner.state.model), *runner.kv_pool.tensors)]


def test_sleep_frees_memory_and_wake_restores_the_bits(
    folders: list[Path], device: torch.device, on_cuda: bool, facts: dict[str, Any]
) -> None:
    """The memory goes back to the device, addresses and recordings stay, and the answers are the same bits."""
    tokens = 1 << 18 if on_cuda else 4096
    saver = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "max_total_tokens": tokens}
    harness = engine(folders[0], device, **saver)
    graphs = harness.scheduler.runner.graphs
    facts["captured sizes"] = 0 if graphs is None else len(graphs._captured)
    before, places, awake = said(harness), addresses(harness), free_bytes(device)
    released = harness.control(ReleaseMemoryOccupationReqInput)
    assert released.success, released.message
    nbytes = released.data["num_bytes"]
    facts |= {"released MiB": nbytes / 2**20, "freed MiB": (free_bytes(device) - awake) / 2**20}
    assert not on_cuda or free_bytes(device) - awake > 0.9 * nbytes
    resumed = harness.control(ResumeMemoryOccupationReqInput)
    assert resumed.success, resumed.message
    captured = {} if graphs is None else dict(graphs._captured)
    assert said(harness) == before and addresses(harness) == places
    assert graphs is None or {n: id(x) for n, x in graphs._captured.items()} == {n: id(x) for n, x in captured.items()}


def test_waking_with_new_weights(folders: list[Path], device: torch.device) -> None:
    """Sleep kept no weights: they come by a refresh."""
    harness = engine(folders[0], device, enable_memory_saver=True)
    old = said(harness)
    for verb in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
        answer = harness.control(verb)
        assert answer.success, answer.message
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    new = said(harness)
    assert new != old and new == said(engine(folders[1], device))


def test_the_pool_is_what_memory_allows(folders: list[Path], device: torch.device, facts: dict[str, Any]) -> None:
    """The pool takes most of a share of two GiB of the free memory, and never more than this share."""
    need_cuda(device, "memory of a device")
    torch.cuda.empty_cache()
    free = free_bytes(device)
    harness = engine(folders[0], device, max_total_tokens=None, mem_fraction_static=2 * GIB / free)
    pool = sum(tensor.nbytes for tensor in harness.scheduler.runner.kv_pool.tensors)
    most = harness.args.max_running_requests * harness.ready.context_length
    facts |= {"pool MiB": pool / 2**20, "taken MiB": (free - free_bytes(device)) / 2**20}
    assert pool <= 2 * GIB
    assert pool > 0.2 * GIB or harness.ready.max_total_num_tokens == most
    assert free - free_bytes(device) < 6 * GIB
    said(harness)


def test_what_does_not_fit_is_refused_with_the_numbers(folders: list[Path], device: torch.device) -> None:
    with pytest.raises(StartupError, match=r"not enough memory for a KV pool.* MiB"):
        engine(folders[0], device, max_total_tokens=None, mem_fraction_static=1e-9)
