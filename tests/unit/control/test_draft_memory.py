"""The memory of a draft: its KV after a flush, and its weights and KV while the model's are released."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from rollout.core.messages.io_struct import FlushCacheReqInput
from rollout.engine import build
from rollout.model.weight_loading import weight_tensors
from rollout.scheduler.model_drafting import ModelDrafting
from tests.adapter_updates import begin
from tests.draft_updates import DRAFT, holds
from tests.family_zoo import family_checkpoint
from tests.faults.harness import RefreshHarness
from tests.kernels import native_ops
from tests.mtp_zoo import mtp_checkpoint
from tests.unit.control.test_device_memory import AbsentPages
from tests.unit.control.test_draft_model_update import answer, kept_share, send, start, tensors
from tests.unit.control.test_scheduler_memory import memory, release, resume
from weight_sync.unnamed_file import UnnamedFile


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a model, each of which may draft for the other."""
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [family_checkpoint(base / f"m{seed}", "qwen3", seed) for seed in (3, 4)]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> AbsentPages:
    made = AbsentPages()
    monkeypatch.setattr(build, "select_pages", lambda device: made)
    return made


def drafted(checkpoint: Path, of: Path, scratch: Path, **settings: Any) -> RefreshHarness:
    """Return an engine for which the model in `of` drafts."""
    settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(of)}
    return start(checkpoint, scratch, **settings)


def share_of(engine: RefreshHarness, ids: list[int]) -> float:
    """Return the share of drafted tokens that an answer to `ids` keeps."""
    counts = engine.scheduler.stats.drafts
    drafts, kept = counts.num_drafted, counts.num_kept
    answer(engine, ids)
    return (counts.num_kept - kept) / (counts.num_drafted - drafts)


def draft_tensors_of(engine: RefreshHarness) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of the weights of the draft, and of its KV."""
    drafting = engine.scheduler._steps._drafting
    assert isinstance(drafting, ModelDrafting)
    model: Any = drafting.runner.model
    return weight_tensors(getattr(model, "model", model)), drafting.runner.kv_pool.tensors


@pytest.mark.parametrize("is_wrong", [False, True], ids=["", "kept over a flush is noticed"])
def test_a_flush_makes_the_draft_compute_its_kv_anew(
    checkpoints: list[Path], tmp_path: Path, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt whose KV is of a wrong draft: after a refresh of the draft alone it still is, until the flush."""
    if is_wrong:
        monkeypatch.setattr(ModelDrafting, "flush", lambda self: None)
    model, other = checkpoints
    prompt = [3 + 7 * place % 90 for place in range(60)]
    engine = drafted(model, other, tmp_path, context_length=128)
    plain = answer(engine, prompt)
    assert send(engine, tensors(model), DRAFT).success
    computed: list[int] = []
    runner = engine.scheduler._steps._drafting.runner
    propose = runner.propose

    def counted(spans: Any, *rest: Any) -> Any:
        computed.extend(len(span.token_ids) for span in spans)
        return propose(spans, *rest)

    runner.propose = counted
    assert answer(engine, prompt) == plain and max(computed) < 10, "the prompt's KV is the old draft's"
    assert engine.control(FlushCacheReqInput).success
    allocator = engine.scheduler.cache.allocator
    allocator._stack[:] = np.sort(allocator._stack)[::-1]  # the same tokens get the same slots as at first
    computed.clear()
    share = share_of(engine, prompt)
    if is_wrong:
        assert max(computed) < 10
    else:
        assert max(computed) >= 60 and share > 0.9


@pytest.mark.parametrize("kind", ["STANDALONE", "NEXTN"])
def test_memory_of_a_draft_is_released_and_comes_back(
    checkpoints: list[Path], tmp_path: Path, pages: AbsentPages, kind: str
) -> None:
    """Its memory goes with the model's tags.  Its weights have their content at once, and its KV has none."""
    settings = {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "context_length": 128}
    if kind == "STANDALONE":
        engine = drafted(checkpoints[0], checkpoints[0], tmp_path, **settings)
    else:
        engine = start(mtp_checkpoint(tmp_path / "m", "glm4_moe", 3), tmp_path, speculative_algorithm=kind, **settings)
    plain, (weights, kv) = answer(engine), draft_tensors_of(engine)
    before = [tensor.clone() for tensor in weights]
    released = release(engine, "kv_cache")
    spent = {span.address for span in pages.absent}
    assert released.success and all(tensor.untyped_storage().data_ptr() in spent for tensor in kv)
    released = release(engine, "weights")
    spent = {span.address for span in pages.absent}
    assert released.success and all(tensor.untyped_storage().data_ptr() in spent for tensor in weights)
    assert released.data["num_bytes"] >= sum(tensor.nbytes for tensor in before)
    assert resume(engine).success and not pages.was_touched and not pages.absent
    assert all(torch.equal(one, two) for one, two in zip(weights, before, strict=True))
    assert not any(tensor.any() for tensor in kv)
    assert answer(engine) == plain
    if kind == "STANDALONE":
        assert kept_share(engine) > 0.8


def test_a_refresh_of_the_model_alone_keeps_the_draft(checkpoints: list[Path], tmp_path: Path) -> None:
    """The order of slime, and a refresh before any resume: no refresh brings the draft, and its content is back."""
    engine = drafted(checkpoints[0], checkpoints[1], tmp_path, enable_memory_saver=True)
    state = engine.scheduler.runner.state
    for resumes, version in ((True, "1"), (False, "2")):
        assert release(engine).success and not holds(state, tensors(checkpoints[1]))
        assert not resumes or resume(engine, "weights").success
        assert send(engine, tensors(checkpoints[1]), version=version).success
        assert resume(engine).success, "of what is released still"
        assert holds(state, tensors(checkpoints[1])) and kept_share(engine) > 0.8
    assert set(memory(engine).values()) == {"in_use"}


def test_a_draft_that_came_meanwhile_is_not_overwritten(checkpoints: list[Path], tmp_path: Path) -> None:
    """On a CPU a refresh may come before the resume: the kept copy of the draft is out of date then."""
    engine = drafted(checkpoints[0], checkpoints[1], tmp_path, enable_memory_saver=True, enable_weights_cpu_backup=True)
    state = engine.scheduler.runner.state
    assert release(engine, "weights").success
    assert send(engine, tensors(checkpoints[0]), DRAFT).success
    assert resume(engine, "weights").success and holds(state, tensors(checkpoints[0]))
    assert kept_share(engine) > 0.8


def test_a_draft_without_memory_takes_no_refresh(checkpoints: list[Path], tmp_path: Path, pages: AbsentPages) -> None:
    """Released memory is not there, as on CUDA."""
    engine = drafted(checkpoints[0], checkpoints[0], tmp_path, enable_memory_saver=True, enable_weights_cpu_backup=True)
    assert pages.pools == ["weights", "weights", "kv_cache", "kv_cache"]
    assert release(engine).success
    refused = begin(engine, DRAFT)
    assert refused.status_code == 409 and "POST /resume_memory_occupation" in refused.message
    assert resume(engine).success and send(engine, tensors(checkpoints[0]), DRAFT).success
    assert not pages.was_touched and kept_share(engine) > 0.8


def test_a_damaged_copy_is_told_and_costs_speed_alone(
    checkpoints: list[Path], tmp_path: Path, pages: AbsentPages, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = drafted(checkpoints[0], checkpoints[0], tmp_path, enable_memory_saver=True)
    plain = answer(engine)
    assert release(engine).success
    with mock.patch.object(UnnamedFile, "read", side_effect=OSError("it is damaged")):
        refused = resume(engine)
    assert not refused.success and "damaged" in refused.message and memory(engine)["weights"] == "released"
    assert resume(engine).success and "the copy of the draft's weights is lost" in capsys.readouterr().err
    assert send(engine, tensors(checkpoints[0])).success and answer(engine) == plain and kept_share(engine) < 0.5
    assert send(engine, tensors(checkpoints[0]), DRAFT).success and kept_share(engine) > 0.8
