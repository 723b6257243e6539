"""An adapter as the target of a weight update: every transport, whole or not at all, and what serves meanwhile."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.control.adapter_target import AdapterTarget, AdapterTargets
from rollout.core.errors import FatalError
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    ManifestEntry,
    UpdateWeightVersionReqInput,
)
from rollout.layers.lora import LoraSlots
from rollout.model.adapter_weights import AdapterWeights
from rollout.model.adapters import AdapterTable
from tests.adapter_updates import (
    FAMILY,
    IDS,
    SEED,
    TRANSPORTS,
    Content,
    abort,
    answer,
    begin,
    bring,
    end,
    make_content,
    refresh,
    started,
    update_id,
    with_value,
)
from tests.family_zoo import family_checkpoint
from tests.faults.harness import RefreshHarness
from tests.faults.transports import SENDS, Call, Damage, delta
from tests.troubleshooting import require_entry
from weight_sync import plan
from weight_sync.manifest import Manifest
from weight_sync.tensor_meta import TensorMeta
from weight_sync.update_target import UpdateTarget

A, B = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.self_attn.q_proj.lora_B"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [make_content(tmp_path_factory.mktemp(f"content{seed}") / "a", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def answers(checkpoint: Path, contents: list[Content], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of a server that was started with each content."""
    paths = ",".join(f"c{number}={content.folder}" for number, content in enumerate(contents))
    harness = started(checkpoint, tmp_path_factory.mktemp("cold"), paths)
    return [answer(harness, f"c{number}") for number in range(len(contents))]


@pytest.fixture
def engine(checkpoint: Path, contents: list[Content], tmp_path: Path) -> Iterator[RefreshHarness]:
    harness = started(checkpoint, tmp_path, f"poet={contents[0].folder}")
    yield harness
    harness.clean_up()


def serves(harness: RefreshHarness, content: Content, version: int) -> bool:
    label = harness.scheduler.runner.state.adapters.find("poet").label
    return (label.version, label.content_digest) == (version, content.digest)


# --- every transport --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_an_adapter(
    engine: RefreshHarness, contents: list[Content], answers: list[Any], transport: str, with_manifest: bool
) -> None:
    base = answer(engine, None)
    assert answer(engine, "poet") == answers[0]
    begun = begin(engine, contents[1].target(), contents[1].named if with_manifest else None)
    assert begun.success, begun.message
    for verb, fields in TRANSPORTS[transport](engine, contents[1]):
        came = engine.control(verb, update_id=update_id(engine), **fields)
        assert came.success, came.message
        assert answer(engine, "poet") == answers[0], "the old version serves until the end"
    ended = end(engine)
    assert ended.success, ended.message
    assert ended.data["adapter"] == {"name": "poet", "version": 1, "content_digest": contents[1].digest}
    assert ended.data["num_tensors"] == len(contents[1].named) and ended.data["weight_epoch"] == 0
    assert answer(engine, "poet") == answers[1], "bit for bit as if the server had started with it"
    assert answer(engine, None) == base
    assert end(engine).data["adapter"] == ended.data["adapter"], "an end that is sent again has the same answer"
    outcome = engine.control(GetWeightUpdateReqInput, update_id=update_id(engine)).data
    assert (outcome["outcome"], outcome["adapter"]) == ("committed", ended.data["adapter"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_have_the_digest_of_their_folder(
    engine: RefreshHarness, contents: list[Content], dtype: torch.dtype, tmp_path: Path
) -> None:
    named = [(name, tensor.to(dtype)) for name, tensor in contents[1].named]
    assert begin(engine, contents[1].target(), named if dtype == torch.float64 else None).success
    assert bring(engine, named).success
    folder = make_copy(contents[1], tmp_path / "typed", dict(named))
    assert end(engine).data["adapter"]["content_digest"] == folder.digest


def make_copy(content: Content, folder: Path, tensors: dict[str, torch.Tensor]) -> Content:
    folder.mkdir()
    (folder / "adapter_config.json").write_text((content.folder / "adapter_config.json").read_text())
    save_file(tensors, folder / "adapter_model.safetensors")
    return Content(folder)


def test_a_new_name_is_served_from_its_first_commit(
    engine: RefreshHarness, contents: list[Content], answers: list[Any]
) -> None:
    assert refresh(engine, contents[2], "clerk").data["adapter"]["version"] == 0
    assert answer(engine, "clerk") == answers[2] and answer(engine, "poet") == answers[0]


# --- what running requests see ----------------------------------------------------------------------------------------


def test_a_running_request_keeps_its_version(
    engine: RefreshHarness, contents: list[Content], answers: list[Any]
) -> None:
    alone = engine.generate([IDS], {"max_new_tokens": 200}, lora_name="poet")[0]
    rid = engine.submit(IDS, params={"max_new_tokens": 200}, lora_name="poet")
    engine.tick()
    assert refresh(engine, contents[1]).success
    assert engine.results[rid].finished is None, "it still runs"
    new = engine.submit(IDS, params={"max_new_tokens": 4}, lora_name="poet")
    engine.run()
    assert (engine.results[rid].token_ids, engine.results[rid].logprobs) == (alone.token_ids, alone.logprobs)
    assert (engine.results[new].token_ids, engine.results[new].logprobs) == answers[1]


@pytest.mark.parametrize("staging", ["journal", "in_place"])
def test_steps_run_while_tensors_come(
    checkpoint: Path, contents: list[Content], answers: list[Any], tmp_path: Path, staging: str
) -> None:
    engine = started(checkpoint, tmp_path, f"poet={contents[0].folder}", staging=staging)
    assert begin(engine, contents[1].target()).success and bring(engine, contents[1].named).success
    assert not engine.scheduler.serving.is_writing
    assert answer(engine, "poet") == answers[0]
    assert end(engine).success and answer(engine, "poet") == answers[1]


# --- refusals ---------------------------------------------------------------------------------------------------------

Change = Callable[[Content], dict[str, Any]]


def _without(content: Content, part: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in content.named if part not in name]


def _renamed(content: Content, old: str, new: str) -> list[tuple[str, torch.Tensor]]:
    return [(name.replace(old, new), tensor) for name, tensor in content.named]


def _narrowed(content: Content, part: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor[:, 1:].clone() if part in name else tensor) for name, tensor in content.named]


AT_BEGIN: dict[str, tuple[Change, str]] = {
    "another model's": (
        lambda it: {"target": it.target(), "named": _renamed(it, "layers.1.", "layers.71.")}, "to another model"
    ),
    "another width": (
        lambda it: {"target": it.target(), "named": _narrowed(it, "lora_A")},
        "is adapted from",
    ),
    "no target in the model": (lambda it: {"target": it.target(target_modules=["query"])}, "has no module that"),
    "targets as a pattern": (lambda it: {"target": it.target(target_modules=".*q_proj")}, "needs a manifest"),
    "some layers": (lambda it: {"target": it.target(layers_to_transform=[0])}, "with layers_to_transform"),
    "missing B": (lambda it: {"target": it.target(), "named": _without(it, B)}, f"{B[:-7]} has no tensor lora_B"),
    "another rank": (lambda it: {"target": it.target(r=2), "named": it.named}, "are not of rank 2"),
    "a rank over the slots'": (lambda it: {"target": it.target(r=9)}, "has rank 9; --max-lora-rank is 8"),
    "DoRA": (lambda it: {"target": it.target(use_dora=True)}, "DoRA"),
    "alpha 0": (lambda it: {"target": it.target(lora_alpha=0)}, "must be a positive number"),
    "an embedding": (
        lambda it: {"target": it.target(), "named": [("lm_head.lora_A.weight", torch.ones(4, 64))]}, "has no tensor"
    ),
    "a name that none can have": (lambda it: {"target": it.target("a@3")}, "holds no '@'"),
    "a part": (lambda it: {"target": it.target(), "coverage": "partial"}, "an adapter is sent whole"),
    "by rank": (
        lambda it: {"target": it.target(), "per_rank": True, "placement_epoch": 0}, "an adapter is sent whole"
    ),
    "what becomes of adapters": (lambda it: {"target": it.target(), "adapters": "refuse"}, "are for the model"),
    "the base's version": (lambda it: {"target": it.target(), "base_version": "v7"}, "are version 'v0', not 'v7'"),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_BEGIN)
def test_what_cannot_be_served_is_refused_before_it_is_sent(
    engine: RefreshHarness, contents: list[Content], answers: list[Any], what: str
) -> None:
    change, reason = AT_BEGIN[what]
    begun = begin(engine, **change(contents[1]))
    assert not begun.success and reason in begun.message and "\n" not in begun.message, begun.message
    if what != "a name that none can have":
        require_entry(begun.message)
    assert serves(engine, contents[0], 0) and not engine.updater.is_open
    assert refresh(engine, contents[1]).success and answer(engine, "poet") == answers[1]


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
def test_an_adapter_of_any_size_is_refused_before_it_takes_memory(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch, with_manifest: bool
) -> None:
    rank, taken = 10**9, []
    monkeypatch.setattr(AdapterWeights, "__init__", lambda self, metas, canonical: taken.append(metas))
    shapes = {A: [rank, 64], A.replace("lora_A", "lora_B"): [64, rank]}
    manifest = [ManifestEntry(name=name, dtype="float32", shape=shape) for name, shape in shapes.items()]
    begun = begin(engine, contents[1].target(r=rank), manifest=manifest if with_manifest else None)
    assert not begun.success and "with --max-lora-rank 8 it has at most" in begun.message, begun.message
    require_entry(begun.message)
    assert not taken and not engine.updater.is_open


IN_A_BUCKET: dict[str, tuple[Callable[[Content], list[tuple[str, torch.Tensor]]], str]] = {
    "NaN": (lambda it: with_value(it.named, A, float("nan")), "not finite in"),
    "another value": (lambda it: with_value(it.named, A, 0.5), "fingerprint"),
    "another model's": (lambda it: _renamed(it, "layers.1.", "layers.71."), "layers.71."),
    "a base tensor": (lambda it: [("model.norm.weight", torch.ones(64))], "is not the name of a tensor of a LoRA"),
    "routed experts": (
        lambda it: [("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", torch.ones(4, 64))], "experts"
    ),
    "another shape": (lambda it: _narrowed(it, "lora_B"), "the adapter expects"),
    "FP8": (lambda it: [(name, tensor.to(torch.float8_e4m3fn)) for name, tensor in it.named], "a matrix of floats"),
    "whole numbers": (lambda it: [(name, tensor.to(torch.int32)) for name, tensor in it.named], "a matrix of floats"),
}  # fmt: skip


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("what", IN_A_BUCKET)
def test_a_wrong_bucket_fails_the_update_and_nothing_else(
    engine: RefreshHarness, contents: list[Content], answers: list[Any], what: str, with_manifest: bool
) -> None:
    change, reason = IN_A_BUCKET[what]
    if what == "another value" and not with_manifest:
        pytest.skip("nothing was stated that it could differ from")
    assert begin(engine, contents[1].target(), contents[1].named if with_manifest else None).success
    came = bring(engine, change(contents[1]))
    assert not came.success and reason in came.message, came.message
    again = bring(engine, contents[1].named)
    assert not again.success and "the weight update is failed" in again.message
    ended = end(engine)
    assert not ended.success and serves(engine, contents[0], 0) and answer(engine, "poet") == answers[0]
    assert refresh(engine, contents[1]).success and answer(engine, "poet") == answers[1]


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
def test_an_end_without_all_tensors_is_refused_by_name(
    engine: RefreshHarness, contents: list[Content], answers: list[Any], with_manifest: bool
) -> None:
    assert begin(engine, contents[1].target(), contents[1].named if with_manifest else None).success
    assert bring(engine, _without(contents[1], B)).success
    ended = end(engine)
    assert not ended.success and f"1 of {len(contents[1].named)} tensors missing: {B}.weight" in ended.message
    assert serves(engine, contents[0], 0) and answer(engine, "poet") == answers[0]


def test_a_delta_is_refused(engine: RefreshHarness, contents: list[Content]) -> None:
    assert begin(engine, contents[1].target()).success
    verb = delta(engine, Call(1, contents[1].named))
    assert verb is not None
    came = engine.control(verb[0], update_id=update_id(engine), **verb[1])
    assert not came.success and came.message == "a delta changes the model alone: an adapter or a draft is sent whole"
    assert abort(engine).success and serves(engine, contents[0], 0)


def test_a_folder_of_another_configuration_is_refused(engine: RefreshHarness, contents: list[Content]) -> None:
    assert begin(engine, contents[1].target(lora_alpha=16)).success
    ((verb, fields),) = TRANSPORTS["folder"](engine, contents[1])
    came = engine.control(verb, update_id=update_id(engine), **fields)
    assert not came.success and "adapter_config.json differs from the configuration" in came.message
    assert abort(engine).success and serves(engine, contents[0], 0)


@pytest.mark.parametrize("transport", [name for name in SENDS if name not in ("delta", "disk")])
def test_damage_on_the_way_is_noticed_and_drops_nothing_else(
    engine: RefreshHarness, contents: list[Content], answers: list[Any], transport: str
) -> None:
    """Each transport of the fault matrix, with a flipped bit, half of the bytes, and a sender that dies."""
    damages: tuple[Damage, ...] = ("truncated", "killed", "flipped")
    for damage in damages[:2] if transport == "tensor pickle" else damages:  # half of a pickle is not content
        assert begin(engine, contents[1].target(), contents[1].named).success
        verb = SENDS[transport](engine, Call(engine.number(), contents[1].named, damage=damage))
        if verb is not None:
            came = engine.control(verb[0], update_id=update_id(engine), **verb[1])
            assert not came.success, f"{damage}: {came.message}"
        assert not end(engine).success, damage
        if engine.updater.is_open:
            assert abort(engine).success
        assert serves(engine, contents[0], 0), damage
    assert answer(engine, "poet") == answers[0]
    assert refresh(engine, contents[1]).success and answer(engine, "poet") == answers[1]


def test_a_sender_that_falls_silent_leaves_the_old_version(
    engine: RefreshHarness, contents: list[Content], answers: list[Any]
) -> None:
    assert begin(engine, contents[1].target()).success and bring(engine, contents[1].named[:4]).success
    engine.lapse()
    late = bring(engine, contents[1].named[4:])
    assert not late.success and "the lease" in late.message
    assert serves(engine, contents[0], 0) and answer(engine, "poet") == answers[0]
    assert engine.control(GetWeightUpdateReqInput, update_id=update_id(engine)).data["outcome"] == "lost"


def test_calls_in_the_wrong_state_are_refused(engine: RefreshHarness, contents: list[Content]) -> None:
    assert "no weight update is open" in engine.control(EndWeightUpdateReqInput).message
    assert begin(engine, contents[1].target()).success
    status = engine.control(GetWeightUpdateReqInput).data
    assert (status["target"], status["missing"]) == ("adapter poet", len(contents[1].named))
    for fields in ({"update_id": "other"}, {"update_id": "other", "target": contents[2].target()}):
        other = engine.control(BeginWeightUpdateReqInput, **fields)
        assert not other.success and "already open" in other.message
    assert not engine.control(EndWeightUpdateReqInput, update_id="other").success
    assert bring(engine, contents[1].named).success
    assert end(engine, phase="verify").success
    assert not bring(engine, contents[1].named).success
    assert end(engine, phase="commit").data["adapter"]["version"] == 1
    assert not abort(engine).success and serves(engine, contents[1], 1)


def test_a_version_that_is_renamed_meanwhile_is_the_models(engine: RefreshHarness, contents: list[Content]) -> None:
    """An update of an adapter publishes no version of the model, so it must not take the new name with it."""
    assert engine.control(BeginWeightUpdateReqInput, target=contents[1].target()).success
    assert engine.control(UpdateWeightVersionReqInput, new_version="v9").success
    assert engine.scheduler.runner.state.epoch.weight_version == "v9"
    assert engine.updater.update is not None and engine.updater.update.transaction.weight_version is None


def test_an_update_is_freed_as_it_ends(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it waits for a collection of cycles: its tensors may be large, and collections are rare."""
    made: list[weakref.ref[object]] = []
    initialise = UpdateTarget.__post_init__

    def noted(target: UpdateTarget) -> None:
        initialise(target)
        made.extend((weakref.ref(target), weakref.ref(target.weights)))

    monkeypatch.setattr(UpdateTarget, "__post_init__", noted)
    gc.disable()
    try:
        assert refresh(engine, contents[1], with_manifest=False).success
        assert begin(engine, None).success and abort(engine).success, "only the last update is remembered"
        deadline = time.monotonic() + 60
        while any(each() is not None for each in made) and time.monotonic() < deadline:
            time.sleep(0.01)  # its staging is closed in the background
        assert len(made) == 2 and not any(each() is not None for each in made)
    finally:
        gc.enable()


def test_a_dropped_update_leaves_no_copy_of_its_adapter(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target is kept for the next one, but not what one update converted, nor what it found in its slot."""
    made: list[weakref.ref[object]] = []
    prepare = AdapterTable.prepare

    def noted(table: AdapterTable, *given: Any) -> Any:
        prepared = prepare(table, *given)
        made.append(weakref.ref(prepared))
        return prepared

    monkeypatch.setattr(AdapterTable, "prepare", noted)
    for loses_the_vote in (False, True):
        assert begin(engine, contents[1].target(), contents[1].named).success
        assert bring(engine, contents[1].named).success
        if loses_the_vote:
            monkeypatch.setattr(engine.updater, "_commit_vote", lambda mine: False)
            assert not end(engine).success
        else:
            assert end(engine, phase="verify").success and abort(engine).success
        gc.collect()
        assert len(made) >= 2 and not any(each() is not None for each in made)


def test_what_a_manifest_announced_is_planned_once(
    engine: RefreshHarness, contents: list[Content], answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents, names and a failure between them change nothing of that; another configuration does."""
    made: list[int] = []
    plan_bucket = plan.plan_bucket
    monkeypatch.setattr(plan, "plan_bucket", lambda *given: made.append(1) or plan_bucket(*given))
    for count, number in enumerate((1, 2, 1)):
        assert refresh(engine, contents[number]).success and answer(engine, "poet") == answers[number]
        assert begin(engine, contents[0].target("clerk"), contents[0].named).success
        bad = with_value(contents[0].named, A, float("nan"))
        assert not bring(engine, bad).success and abort(engine).success, count
        assert refresh(engine, contents[0], "clerk").success and answer(engine, "clerk") == answers[0]
        assert answer(engine, "poet") == answers[number]
        made += [0] if count == 0 else []
    assert made.index(0) == len(made) - 1, "all plans were made in the first round"
    assert begin(engine, contents[1].target(lora_alpha=16), contents[1].named).success
    assert bring(engine, contents[1].named).success and made[-1] == 1
    assert end(engine).data["adapter"]["content_digest"] != contents[1].digest


def test_targets_are_kept_up_to_a_number_of_bytes(engine: RefreshHarness, contents: list[Content]) -> None:
    table, content = engine.scheduler.runner.state.adapters, contents[1]
    size = sum(tensor.nbytes for _, tensor in content.named)
    targets, made = AdapterTargets(table, max_bytes=2 * size), []

    def target(key: str, alpha: int) -> AdapterTarget:
        metas = [(TensorMeta(name, tensor.dtype, tuple(tensor.shape)), None) for name, tensor in content.named]
        return targets.target(content.target(lora_alpha=alpha), Manifest.of(metas, key))

    for key, alpha in (("a", 8), ("b", 8), ("a", 8), ("a", 16), ("a", 8), ("b", 8)):
        made.append(target(key, alpha))
    assert [made.index(each) for each in made] == [0, 1, 0, 3, 0, 5], "the one that was used longest ago has gone"


def test_a_load_that_finds_no_slot_says_what_is_full(
    checkpoint: Path, contents: list[Content], answers: list[Any], tmp_path: Path
) -> None:
    paths = f"poet={contents[0].folder},clerk={contents[2].folder}"
    engine = started(checkpoint, tmp_path, paths, max_loras_per_batch=2)
    refused = refresh(engine, contents[1], "third")
    assert not refused.success and "all 2 slots are taken" in refused.message and "poet@0" in refused.message
    assert not engine.updater.is_open and serves(engine, contents[0], 0) and answer(engine, "poet") == answers[0]
    assert engine.control(GetWeightUpdateReqInput, update_id=update_id(engine)).data["outcome"] == "aborted"


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("lost", ["the write", "the vote"])
def test_a_commit_that_one_rank_fails_puts_the_old_version_back(
    checkpoint: Path,
    contents: list[Content],
    answers: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
    slots: int,
) -> None:
    """This rank fails in the middle of the write, or has what another failed to write.

    With one slot the new version has overwritten the one that serves.
    """
    engine = started(checkpoint, tmp_path, f"poet={contents[0].folder}", max_loras_per_batch=slots)
    assert begin(engine, contents[1].target()).success and bring(engine, contents[1].named).success
    with monkeypatch.context() as failing:
        if lost == "the vote":
            failing.setattr(engine.updater, "_commit_vote", lambda mine: False)
        else:
            failing.setattr(LoraSlots, "write", fails_at(3, LoraSlots.write))
        ended = end(engine)
    assert not ended.success and "the old weights were restored" in ended.message, ended.message
    assert serves(engine, contents[0], 0) and answer(engine, "poet") == answers[0]
    assert refresh(engine, contents[1]).success and answer(engine, "poet") == answers[1]


def fails_at(count: int, write: Callable[..., None]) -> Callable[..., None]:
    """Return a function that writes as `write` does, and fails at its `count`th call."""
    calls = itertools.count(1)

    def once(*given: Any) -> None:
        if next(calls) == count:
            raise MemoryError("no memory")
        write(*given)

    return once


def test_an_engine_whose_slot_cannot_be_put_back_ends(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    assert begin(engine, contents[1].target()).success and bring(engine, contents[1].named).success
    monkeypatch.setattr(engine.updater, "_commit_vote", lambda mine: False)
    monkeypatch.setattr(AdapterTable, "write_back", fail)
    with pytest.raises(FatalError, match="the slot of an adapter has the content of no version"):
        end(engine)


def test_an_adapter_that_a_rank_cannot_serve_is_refused(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begin(engine, contents[1].target()).success and bring(engine, contents[1].named).success
    monkeypatch.setattr(engine.updater, "_vote", lambda mine: False)
    ended = end(engine)
    assert not ended.success and "another rank could not verify" in ended.message and serves(engine, contents[0], 0)


# --- a refresh of the model -------------------------------------------------------------------------------------------


def test_a_refresh_of_the_model_keeps_adapters_or_refuses_them(engine: RefreshHarness, contents: list[Content]) -> None:
    model = dict(engine.scheduler.runner.state.model.weights.metas())
    refused = begin(engine, None, adapters="refuse")
    assert not refused.success and refused.message.startswith("this update refuses adapters, and this server has poet")
    require_entry(refused.message)
    assert begin(engine, None).success
    tensors = [(name, torch.full(meta.shape, 0.01, dtype=meta.dtype)) for name, meta in model.items()]
    assert bring(engine, tensors).success and end(engine).data["weight_epoch"] == 1
    assert serves(engine, contents[0], 0), "kept"
    assert refresh(engine, contents[1]).data["weight_epoch"] == 1
