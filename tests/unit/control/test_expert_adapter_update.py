"""Updates of an adapter of routed experts in a live engine: the next version, or the one before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import AdapterError
from rollout.layers.moe.expert_lora import ExpertLoraSlots
from rollout.model.adapters import AdapterTable, PlannedVersion
from tests.adapter_updates import Content, answer, refresh, started
from tests.adapters import save_adapter
from tests.expert_adapters import STACKS, rewritten
from tests.family_zoo import family_checkpoint
from tests.faults.harness import RefreshHarness

FAMILY, SEED, RANK = "qwen3_moe", 3, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    settings: dict[str, Any] = {"target_modules": [], "target_parameters": list(STACKS), "r": RANK, "lora_alpha": 4}
    folders = [tmp_path_factory.mktemp("content") / "a" for _ in range(2)]
    return [Content(save_adapter(folder, FAMILY, SEED, seed, **settings)) for seed, folder in enumerate(folders)]


def engine_of(checkpoint: Path, scratch: Path, content: Content) -> RefreshHarness:
    """Return an engine with one slot, so that each version lies where the one before was."""
    settings: dict[str, Any] = {"max_loras_per_batch": 1, "lora_target_modules": "all", "disable_radix_cache": True}
    return started(checkpoint, scratch, f"poet={content.folder}", **settings)


@pytest.fixture
def engine(checkpoint: Path, contents: list[Content], tmp_path: Path) -> Iterator[RefreshHarness]:
    harness = engine_of(checkpoint, tmp_path, contents[0])
    yield harness
    harness.clean_up()


def test_the_next_version_answers_as_a_server_that_starts_with_it(
    engine: RefreshHarness, checkpoint: Path, contents: list[Content], tmp_path: Path
) -> None:
    bare, before = answer(engine, None), answer(engine, "poet")
    wanted = answer(engine_of(checkpoint, tmp_path, contents[1]), "poet")
    assert wanted != before
    for with_manifest in (False, True):
        ended = refresh(engine, contents[1], with_manifest=with_manifest)
        assert ended.success, ended.message
        assert answer(engine, "poet") == wanted and answer(engine, None) == bare
        ended = refresh(engine, contents[0], with_manifest=with_manifest)
        assert ended.success and answer(engine, "poet") == before, ended.message
    stacked = rewritten(contents[1].folder, tmp_path / "stacked", "Megatron-Bridge", RANK, is_interleaved=False)
    assert refresh(engine, Content(stacked)).success and answer(engine, "poet") == wanted


def answers_around_a_failed_write(
    engine: RefreshHarness, content: Content, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, object]:
    """Let an update fail once its adapter is written; return an answer before and one after it."""
    write, before = AdapterTable.write, answer(engine, "poet")

    def write_and_fail(table: AdapterTable, planned: PlannedVersion) -> None:
        write(table, planned)
        raise AdapterError("the device is lost")

    with monkeypatch.context() as failing:
        failing.setattr(AdapterTable, "write", write_and_fail)
        assert not refresh(engine, content).success
    return before, answer(engine, "poet")


def test_a_failed_write_gives_the_experts_their_adapter_back(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = answers_around_a_failed_write(engine, contents[1], monkeypatch)
    assert after == before


@pytest.mark.mutant
def test_experts_that_keep_what_failed_are_noticed(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertLoraSlots, "restore", lambda *_: None)
    before, after = answers_around_a_failed_write(engine, contents[1], monkeypatch)
    assert after != before
