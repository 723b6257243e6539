"""A draft's weights as the target of a weight update, alone and with the model, by any transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save, save_file

from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.messages.update_state import TargetOfUpdate
from rollout.core.messages.weights import (
    GetWeightUpdateReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from tests.adapter_updates import FAMILY, SEED, abort, answer, begin, bring, end, update_id, with_value
from tests.draft_updates import DRAFT, PREFIX, fail_write, give_drafts, holds, tensors_of
from tests.family_zoo import family_checkpoint
from tests.faults import transports
from tests.faults.harness import RefreshHarness
from tests.faults.transports import SENDS, Call, Named, delta

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the model, its next version, the draft, and its next version."""
    return [family_checkpoint(tmp_path_factory.mktemp(f"model{n}"), FAMILY, SEED + n) for n in range(4)]


def start(checkpoints: list[Path], scratch: Path, staging: str = "host") -> RefreshHarness:
    settings: dict[str, Any] = {"enable_return_routed_experts": False, "skip_tokenizer_init": True}
    return RefreshHarness(checkpoints[0], scratch=scratch, staging=staging, **settings)  # type: ignore[arg-type]


@pytest.fixture
def beside(checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RefreshHarness]:
    """Yield an engine whose draft has names that the model ignores."""
    give_drafts(monkeypatch, checkpoints[2], is_published=True)
    harness = start(checkpoints, tmp_path)
    yield harness
    harness.clean_up()


@pytest.fixture
def apart(checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RefreshHarness]:
    """Yield an engine whose draft has the model's names."""
    give_drafts(monkeypatch, checkpoints[2], is_published=False)
    harness = start(checkpoints, tmp_path)
    yield harness
    harness.clean_up()


def old_draft(checkpoints: list[Path]) -> Named:
    return tensors_of(checkpoints[2], PREFIX)


def new_draft(checkpoints: list[Path]) -> Named:
    return tensors_of(checkpoints[3], PREFIX)


def facts(engine: RefreshHarness) -> tuple[str, bool]:
    found = engine.control(GetStateReqInput).data["draft"]
    return found["weight_version"], found["is_stale"]


def send(engine: RefreshHarness, tensors: Named, target: TargetOfUpdate | None = None, **fields: Any) -> Any:
    """Send tensors in two buckets, as an update of its own; return the last answer."""
    found = begin(engine, target, **fields)
    for part in (tensors[::2], tensors[1::2]):
        found = bring(engine, part) if found.success else found
    return end(engine) if found.success else found


# --- the draft alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [name for name in SENDS if name not in ("delta", "disk")])
def test_every_transport_brings_a_draft(
    beside: RefreshHarness, checkpoints: list[Path], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_IPC_BUCKET_BYTES", 1 << 20)
    state, named = beside.scheduler.runner.state, new_draft(checkpoints)
    before, epoch = answer(beside, None), state.epoch
    assert begin(beside, DRAFT, named if len(transport) % 2 else None, weight_version="7").success
    for part in (named[::2], named[1::2]):
        verb = SENDS[transport](beside, Call(beside.number(), part))
        assert verb is not None
        came = beside.control(verb[0], update_id=update_id(beside), **verb[1])
        assert came.success and holds(state, old_draft(checkpoints)), came.message
    ended = end(beside)
    assert ended.success and ended.message == "Succeeded to load the draft of version 7.", ended.message
    assert holds(state, named) and facts(beside) == ("7", False)
    assert ended.data["draft"]["came"] == "alone" and len(ended.data["draft"]["content_digest"]) == 64
    assert (state.epoch, answer(beside, None)) == (epoch, before), "nothing of the model has moved"
    assert end(beside).data["draft"] == ended.data["draft"], "an end that is sent again has the same answer"
    assert end(beside).message == ended.message
    outcome = beside.control(GetWeightUpdateReqInput, update_id=update_id(beside)).data
    assert (outcome["outcome"], outcome["draft"]) == ("committed", ended.data["draft"])


def test_a_draft_of_the_models_names_comes_alone(apart: RefreshHarness, checkpoints: list[Path]) -> None:
    state, names = apart.scheduler.runner.state, tensors_of(checkpoints[3])
    before = answer(apart, None)
    assert send(apart, names, target=DRAFT).success
    assert holds(state, names) and answer(apart, None) == before
    assert begin(apart, DRAFT).success
    fields = {"model_path": str(checkpoints[2]), "update_id": update_id(apart)}
    came = apart.control(UpdateWeightsFromDiskReqInput, **fields)
    assert came.success and end(apart).success and holds(state, tensors_of(checkpoints[2])), came.message
    alone = apart.control(UpdateWeightsFromDiskReqInput, model_path=str(checkpoints[3]), selector="draft")
    assert alone.success and holds(state, names) and answer(apart, None) == before, alone.message
    refreshed = send(apart, tensors_of(checkpoints[1]), weight_version="8")
    assert refreshed.success and holds(state, names), "the model's tensors are not the draft's"
    assert facts(apart) == ("v0", True) and "The draft is stale" in refreshed.message


@pytest.mark.parametrize("staging", ["device", "journal", "in_place"])
def test_every_staging_takes_a_draft(
    checkpoints: list[Path], tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_drafts(monkeypatch, checkpoints[2], is_published=True)
    engine = start(checkpoints, tmp_path, staging)
    state, named = engine.scheduler.runner.state, new_draft(checkpoints)
    for target in (DRAFT, None):
        model = [] if target else tensors_of(checkpoints[1])
        if staging != "in_place":
            assert begin(engine, target).success and bring(engine, [*named[::2], *model[::2]]).success
            assert abort(engine).success and holds(state, old_draft(checkpoints))
        assert send(engine, [*model, *named], target=target).success and holds(state, named)
        assert send(engine, old_draft(checkpoints), target=DRAFT).success
    engine.clean_up()


def test_a_draft_that_could_not_be_put_back_slows_down_and_nothing_else(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_drafts(monkeypatch, checkpoints[2], is_published=True)
    engine = start(checkpoints, tmp_path, "in_place")
    before, named = answer(engine, None), new_draft(checkpoints)
    assert begin(engine, DRAFT).success and bring(engine, named[::2]).success and abort(engine).success
    found = engine.control(GetStateReqInput).data
    assert found["draft"]["is_stale"] and found["draft"]["torn"] and found["poisoned"] is None
    assert answer(engine, None) == before
    assert send(engine, named, target=DRAFT).success and facts(engine) == ("v0", False)
    engine.clean_up()


# --- with the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
def test_the_draft_comes_in_the_models_commit_or_is_stale(
    beside: RefreshHarness, checkpoints: list[Path], with_manifest: bool
) -> None:
    state, model = beside.scheduler.runner.state, tensors_of(checkpoints[1])
    both = [*model, *new_draft(checkpoints)]
    with_both = {"named": both} if with_manifest else {}
    first = send(beside, both, weight_version="1", **with_both)
    assert first.success and "stale" not in first.message, first.message
    assert first.data["draft"]["came"] == "with the model" and first.data["num_tensors"] == len(both)
    assert holds(state, new_draft(checkpoints)) and facts(beside) == ("1", False)
    digest = first.data["draft"]["content_digest"]
    second = send(beside, model, weight_version="2", **({"named": model} if with_manifest else {}))
    assert second.success and second.data["draft"]["came"] is None
    assert second.data["draft"]["is_stale"] and second.data["draft"]["content_digest"] == digest
    assert "The draft is stale, as its weights are still of version 1" in second.message
    assert facts(beside) == ("1", True) and second.data["weight_epoch"] == 2
    again = send(beside, new_draft(checkpoints), target=DRAFT)
    assert again.data["draft"]["content_digest"] == digest and facts(beside) == ("2", False)
    assert beside.control(UpdateWeightVersionReqInput, new_version="3").success and facts(beside) == ("3", False)


@pytest.mark.parametrize("target", [None, DRAFT], ids=["with the model", "alone"])
def test_half_of_a_draft_changes_nothing(beside: RefreshHarness, checkpoints: list[Path], target: Any) -> None:
    state, named = beside.scheduler.runner.state, new_draft(checkpoints)
    before, model = answer(beside, None), tensors_of(checkpoints[1]) if target is None else []
    refused = send(beside, [*model, *named[::2]], target=target)
    assert not refused.success and f"{len(named) // 2} of {len(named)} tensors missing: {PREFIX}" in refused.message
    assert (state.epoch.weight_epoch, facts(beside)) == (0, ("v0", False))
    assert holds(state, old_draft(checkpoints)) and answer(beside, None) == before


@pytest.mark.parametrize("damage", ["wrong value", "wrong shape", "a name of none", "a failed write"])
def test_after_any_failure_both_are_the_old_ones(
    beside: RefreshHarness, checkpoints: list[Path], damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, named = beside.scheduler.runner.state, new_draft(checkpoints)
    before, name = answer(beside, None), PREFIX + NORM
    if damage == "wrong value":
        named = with_value(named, name, float("nan"))
    elif damage == "wrong shape":
        named = [(each, tensor[:1] if each == name else tensor) for each, tensor in named]
    elif damage == "a name of none":
        named = [(f"{PREFIX}more", tensor) if each == name else (each, tensor) for each, tensor in named]
    with monkeypatch.context() as broken:
        if damage == "a failed write":
            fail_write(broken, state)
        refused = send(beside, [*tensors_of(checkpoints[1]), *named])
    assert not refused.success and state.epoch.weight_epoch == 0, refused.message
    assert holds(state, old_draft(checkpoints)) and answer(beside, None) == before
    abort(beside)  # one that a bucket failed is still open
    assert send(beside, [*tensors_of(checkpoints[1]), *new_draft(checkpoints)]).success
    assert holds(state, new_draft(checkpoints))


def test_a_folder_of_both_brings_both(beside: RefreshHarness, checkpoints: list[Path], tmp_path: Path) -> None:
    """Without a begin, in an update of the model, and in one of the draft, which leaves the model's tensors out."""
    state, folder = beside.scheduler.runner.state, tmp_path / "both"
    folder.mkdir()
    save_file(dict([*tensors_of(checkpoints[1]), *new_draft(checkpoints)]), folder / "model.safetensors")
    alone = beside.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), weight_version="1")
    assert alone.success and holds(state, new_draft(checkpoints)) and facts(beside) == ("1", False), alone.message
    assert alone.data["draft"]["came"] == "with the model"
    of_model = beside.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), selector="target")
    assert of_model.data["draft"]["is_stale"] and facts(beside) == ("1", True)
    for target in (None, DRAFT):
        assert send(beside, old_draft(checkpoints), target=DRAFT).success and begin(beside, target).success
        epoch = state.epoch.weight_epoch
        fields = {"model_path": str(folder), "update_id": update_id(beside)}
        came = beside.control(UpdateWeightsFromDiskReqInput, **fields)
        assert came.success and end(beside).success and holds(state, new_draft(checkpoints)), came.message
        assert state.epoch.weight_epoch == epoch + (target is None)


def test_a_delta_of_the_model_leaves_the_draft_behind(beside: RefreshHarness, checkpoints: list[Path]) -> None:
    base, named = dict(tensors_of(checkpoints[0])), tensors_of(checkpoints[1])
    assert begin(beside, None).success
    verb = delta(beside, Call(1, named, base))
    assert verb is not None
    came = beside.control(verb[0], update_id=update_id(beside), **verb[1])
    assert came.success and end(beside).data["draft"]["is_stale"], came.message
    assert begin(beside, DRAFT).success
    refused = beside.control(verb[0], update_id=update_id(beside), **delta(beside, Call(2, named, base))[1])  # type: ignore[index]
    assert not refused.success and "an adapter or a draft is sent whole" in refused.message
    assert abort(beside).success


# --- who may be meant -------------------------------------------------------------------------------------------------


def test_calls_without_begin_and_the_selector_of_sglang(beside: RefreshHarness, checkpoints: list[Path]) -> None:
    state, model = beside.scheduler.runner.state, tensors_of(checkpoints[1])

    def call(named: Named, **fields: Any) -> Any:
        body = {"payload": bytearray(save(dict(named))), "format": "safetensors"}
        return beside.control(UpdateWeightsFromTensorReqInput, **body, **fields)

    half = call([*model[:1], *new_draft(checkpoints)[:1]])
    assert half.success and holds(state, old_draft(checkpoints)), "a call alone is a part of the model, and of it alone"
    assert half.data["draft"]["is_stale"] and half.data["num_tensors"] == 1
    alone = call([*model, *new_draft(checkpoints)], selector="draft", weight_version="5")
    assert alone.data["draft"]["came"] == "alone" and facts(beside) == ("5", False), alone.message
    assert holds(state, new_draft(checkpoints)) and state.epoch.weight_epoch == 1
    assert begin(beside, None, selector="target").success
    refused = call(new_draft(checkpoints), selector="draft", update_id=update_id(beside))
    assert not refused.success and "the open weight update has the target model" in refused.message
    assert abort(beside).success and begin(beside, None, selector="target").success
    assert call([*model, *old_draft(checkpoints)], update_id=update_id(beside)).success and end(beside).success
    assert holds(state, new_draft(checkpoints)) and facts(beside) == ("5", True)
    assert begin(beside, None, selector="draft").success
    assert call(old_draft(checkpoints), selector="draft", update_id=update_id(beside)).success
    assert end(beside).data["draft"]["came"] == "alone" and holds(state, old_draft(checkpoints))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a part": ({"target": DRAFT, "coverage": "partial"}, "coverage partial: a draft is sent whole"),
    "per rank": ({"target": DRAFT, "per_rank": True, "placement_epoch": 0}, "a draft is sent whole"),
    "two targets": ({"target": TargetOfUpdate(draft=True, adapter="poet")}, 'target is {"draft": true}, or'),
    "half an adapter": ({"target": TargetOfUpdate(adapter="poet")}, 'target is {"draft": true}, or'),
    "two dialects": ({"target": TargetOfUpdate(adapter="a", config={}), "selector": "draft"}, "leave one of them out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_begin_refuses_what_cannot_be_meant(beside: RefreshHarness, case: str) -> None:
    fields, message = REFUSED[case]
    refused = begin(beside, **({"target": None} | fields))
    assert not refused.success and message in refused.message
    assert not beside.updater.is_open and facts(beside) == ("v0", False)


def test_a_server_without_a_draft_has_none_to_refresh(checkpoints: list[Path], tmp_path: Path) -> None:
    engine = start(checkpoints, tmp_path)
    assert engine.control(GetStateReqInput).data["draft"] is None
    for fields in ({"target": DRAFT}, {"target": None, "selector": "draft"}):
        refused = begin(engine, **fields)
        assert not refused.success and "no model drafts on this server" in refused.message
    done = send(engine, tensors_of(checkpoints[1]))
    assert done.success and "draft" not in done.data and "stale" not in done.message
    engine.clean_up()
