"""Copies of released weights on several ranks: all ranks have theirs and put it back, or none has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.control.memory_control import MemoryControl
from rollout.core.messages.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from rollout.memory.memory_saver import KeptCopyError
from tests.kernels import native_ops
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness, control_of

PROMPT, PARAMS = [5, 9, 2, 6], {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_ops()
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "m", "dense", seed=3)


@pytest.fixture
def engine(folder: Path) -> Iterator[ParallelHarness]:
    settings: dict[str, Any] = {"tp_size": 2, "dtype": "float32", "enable_return_routed_experts": False}
    settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    settings |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "context_length": 128}
    with ParallelHarness(folder, **settings) as harness:
        yield harness


def controls(engine: ParallelHarness) -> list[MemoryControl]:
    """Return what releases and resumes on each rank."""
    queues = [control_of(scheduler)._queue for scheduler in engine.schedulers]
    return [queue._planners[ReleaseMemoryOccupationReqInput].__self__ for queue in queues]  # type: ignore[attr-defined]


def cannot(*_: Any) -> None:
    raise KeptCopyError("the disk is not there")


def copies(engine: ParallelHarness) -> list[set[Any]]:
    """Return of what each rank keeps a copy."""
    return [set(control._require_saver()._copies) for control in controls(engine)]


def test_a_copy_that_one_rank_cannot_keep_stays_on_none(
    engine: ParallelHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = engine.generate([PROMPT], PARAMS)
    with monkeypatch.context() as one_cannot:
        one_cannot.setattr(controls(engine)[1]._require_saver(), "keep_copy", cannot)
        refused = engine.control(ReleaseMemoryOccupationReqInput)
    assert not refused.success and "the disk is not there" in refused.message
    assert copies(engine) == [set(), set()]
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == plain.token_ids
    assert engine.control(ReleaseMemoryOccupationReqInput).success and copies(engine) == [{"weights", "draft"}] * 2
    assert engine.control(ResumeMemoryOccupationReqInput).success and copies(engine) == [set(), set()]
    assert engine.generate([PROMPT], PARAMS)[0].token_ids == plain.token_ids


def test_a_copy_that_one_rank_cannot_read_is_put_back_on_none(
    engine: ParallelHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next resume leaves all ranks without content, until a refresh: none may serve."""
    assert engine.control(ReleaseMemoryOccupationReqInput).success
    kept = controls(engine)[1]._require_saver()._copies["weights"]
    monkeypatch.setattr(kept, "restore", cannot)
    refused = engine.control(ResumeMemoryOccupationReqInput)
    assert not refused.success and "the disk is not there" in refused.message
    assert [control.status()["weights"] for control in controls(engine)] == ["released"] * 2
    resumed = engine.control(ResumeMemoryOccupationReqInput)
    assert resumed.success and "Not serving yet" in resumed.message
    assert [control.status()["weights"] for control in controls(engine)] == ["awaiting_refresh"] * 2
    assert copies(engine) == [set(), set()]
    assert [scheduler.serving.content_lost for scheduler in engine.schedulers] == [True] * 2
