"""Adapters on engines of several ranks, and on several engines: a load reaches all of them or none."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.adapters.peft_folder import Adapter, read_adapter
from rollout.control import adapter_control
from rollout.core.errors import AdapterError
from rollout.core.messages.adapters import LoadLoraAdapterReqInput, UnloadLoraAdapterReqInput
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.distributed.communicator import Communicator
from tests.adapters import ATTENTION, logprobs_of, save_adapter
from tests.family_zoo import family_checkpoint
from tests.parallel_harness import ParallelHarness

SEED = 3
PROMPT = [5, 9, 200, 31, 7, 8, 44, 17]
NEAR = 1e-4  # PEFT's sums are in float32
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "dp2 of tp2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "two replicas": {"dp_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", SEED)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of two contents."""
    settings: dict[str, Any] = {"target_modules": list(ATTENTION), "r": 2, "lora_alpha": 4}
    return [save_adapter(tmp_path_factory.mktemp("a"), "qwen3_moe", SEED, seed, **settings) for seed in range(2)]


@pytest.fixture(params=LAYOUTS)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[ParallelHarness]:
    settings = {"enable_lora": True, "max_loras_per_batch": 2, "enable_return_routed_experts": False}
    with ParallelHarness(folder, **LAYOUTS[request.param] | settings) as harness:
        yield harness


def load(engine: ParallelHarness, path: Path, name: str = "poet") -> ControlReqOutput:
    return engine.control(LoadLoraAdapterReqInput, lora_name=name, lora_path=str(path))


def versions(engine: ParallelHarness) -> list[str]:
    """Return the versions in memory and their slots, which must be the same on all ranks."""
    tables = [scheduler.runner.state.adapters for scheduler in engine.schedulers]
    found = [
        [f"{each.name}@{each.version} {table.find(f'{each.name}@{each.version}').slot}" for each in table.labels]
        for table in tables
    ]
    assert all(each == found[0] for each in found), found
    return found[0]


def check_answers(engine: ParallelHarness, content: Path, name: str = "poet") -> None:
    """Compare an answer of each data-parallel rank with PEFT's forward."""
    results = engine.generate([PROMPT] * engine.num_dp_ranks, {"max_new_tokens": 2}, lora_name=name)
    for result in results:
        want = logprobs_of("qwen3_moe", SEED, content, [*PROMPT, *result.token_ids])[len(PROMPT) - 1 :]
        assert max(abs(a - b) for a, b in zip(result.logprobs, want, strict=True)) < NEAR


def hold_an_older_version(engine: ParallelHarness, contents: list[Path]) -> str:
    """Load two versions, and begin a request of the older one on the last data-parallel rank."""
    assert load(engine, contents[0]).success
    rid = engine.submit(PROMPT, params={"max_new_tokens": 150}, lora_name="poet", dp_rank=engine.num_dp_ranks - 1)
    engine.tick()
    assert load(engine, contents[1]).data["version"] == 1
    return rid


def test_an_adapter_reaches_every_rank_and_replica(engine: ParallelHarness, contents: list[Path]) -> None:
    """A loaded adapter reaches one replica of two in vLLM."""
    rid = hold_an_older_version(engine, contents)
    before = versions(engine)
    refused = load(engine, contents[0], "clerk")
    assert not refused.success and "poet@0 (in use); poet@1 (newest)" in refused.message
    in_use = engine.control(UnloadLoraAdapterReqInput, lora_name="poet", retire=False)
    assert in_use.status_code == 409 and versions(engine) == before
    check_answers(engine, contents[1])
    engine.run()
    assert engine.results[rid].finished.reason.type == "length"  # type: ignore[union-attr]
    assert load(engine, contents[0], "clerk").success
    check_answers(engine, contents[0], "clerk")
    assert versions(engine) == ["poet@1 1", "clerk@0 0"]
    assert engine.control(UnloadLoraAdapterReqInput, lora_name="poet").success and versions(engine) == ["clerk@0 0"]
    engine.check_idle()


@pytest.mark.mutant
@pytest.mark.parametrize("engine", ["two replicas"], indirect=True)
def test_replicas_that_do_not_ask_each_other_are_noticed(engine: ParallelHarness, contents: list[Path]) -> None:
    hold_an_older_version(engine, contents)
    for scheduler in engine.schedulers:
        scheduler.runner.state.adapters._world = Communicator("world", 0, 1)
    load(engine, contents[0], "clerk")
    with pytest.raises(AssertionError, match="clerk@0"):
        versions(engine)


def no_file(_: Adapter) -> Adapter:
    raise AdapterError("adapter_model.safetensors is missing")


def of_other_content(adapter: Adapter) -> Adapter:
    return dataclasses.replace(adapter, digest="0" * 64)


@pytest.mark.parametrize("engine", ["tp2", "two replicas"], indirect=True)
@pytest.mark.parametrize(("spoil", "reason"), [(no_file, "is missing"), (of_other_content, "read other contents")])
def test_one_rank_that_cannot_refuses_for_all(
    engine: ParallelHarness,
    contents: list[Path],
    spoil: Callable[[Adapter], Adapter],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load(engine, contents[0]).success
    turns = itertools.count()

    def spoilt_once(path: Path) -> Adapter:
        adapter = read_adapter(path)
        return spoil(adapter) if next(turns) == 1 else adapter

    monkeypatch.setattr("rollout.control.adapter_control.read_adapter", spoilt_once)
    refused = load(engine, contents[1])
    assert not refused.success and reason in refused.message
    assert versions(engine) == ["poet@0 0"]
    monkeypatch.undo()
    check_answers(engine, contents[0])
    assert load(engine, contents[1]).data["version"] == 1


def test_folders_that_differ_are_compared_before_they_are_read(
    engine: ParallelHarness, contents: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, reads = itertools.count(), list[Path]()
    monkeypatch.setattr(adapter_control, "mark_of", lambda folder: bytes([next(numbers)]))
    monkeypatch.setattr(adapter_control, "read_adapter", reads.append)
    refused = load(engine, contents[0])
    assert not refused.success and "the ranks read other contents of" in refused.message and not reads
    assert versions(engine) == []
