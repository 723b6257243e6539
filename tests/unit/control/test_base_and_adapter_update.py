"""The model and adapters in one weight update: both are committed between the same two steps, or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.core.errors import FatalError
from rollout.core.messages.adapters import LoadLoraAdapterReqInput
from rollout.core.messages.weights import GetWeightUpdateReqInput, ManifestLists
from rollout.layers.lora import LoraSlots
from rollout.model.adapters import AdapterTable
from tests.adapter_updates import (
    FAMILY,
    IDS,
    SEED,
    Content,
    abort,
    answer,
    begin,
    bring,
    end,
    folder,
    make_content,
    refresh,
    started,
    update_id,
    with_value,
)
from tests.family_zoo import family_checkpoint
from tests.faults import transports
from tests.faults.harness import RefreshHarness
from tests.faults.transports import SENDS, Call, Damage, Named, delta, disk
from tests.troubleshooting import require_entry
from weight_sync.updater import WeightUpdater

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [family_checkpoint(tmp_path_factory.mktemp(f"model{n}"), FAMILY, SEED + n) for n in range(2)]


@pytest.fixture(scope="module")
def bases(checkpoints: list[Path]) -> list[Named]:
    return [list(load_file(checkpoint / "model.safetensors").items()) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [make_content(tmp_path_factory.mktemp(f"content{seed}") / "a", seed) for seed in range(3)]


Answers = list[list[Any]]


@pytest.fixture(scope="module")
def answers(checkpoints: list[Path], contents: list[Content], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of servers that were started with each base: with each content, and last without one."""
    paths = ",".join(f"c{number}={content.folder}" for number, content in enumerate(contents))
    found = []
    for checkpoint in checkpoints:
        harness = started(checkpoint, tmp_path_factory.mktemp("cold"), paths)
        found.append([answer(harness, name) for name in (*(f"c{number}" for number in range(len(contents))), None)])
    return found


@pytest.fixture
def engine(checkpoints: list[Path], contents: list[Content], tmp_path: Path) -> Iterator[RefreshHarness]:
    harness = started(checkpoints[0], tmp_path, f"poet={contents[0].folder}")
    yield harness
    harness.clean_up()


def begin_both(engine: RefreshHarness, content: Content, named: Named | None = None, **fields: Any) -> Any:
    return begin(engine, None, named, adapters=[content.target()], **fields)


def halves(base: Named, adapter: Named) -> tuple[Named, Named]:
    """Return two buckets that both hold tensors of both."""
    return [*base[::2], *adapter[::2]], [*adapter[1::2], *base[1::2]]


def require(engine: RefreshHarness, answers: Answers, base: int, content: int, version: int) -> None:
    state = engine.scheduler.runner.state
    assert (state.epoch.weight_epoch > 0, state.adapters.find("poet").label.version) == (base > 0, version)
    assert answer(engine, "poet") == answers[base][content] and answer(engine, None) == answers[base][-1]


# --- every transport --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("transport", [name for name in SENDS if name not in ("delta", "disk")])
def test_every_transport_brings_both(
    engine: RefreshHarness,
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    transport: str,
    with_manifest: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "_IPC_BUCKET_BYTES", 1 << 20)
    both = [*bases[1], *contents[1].named]
    begun = begin_both(engine, contents[1], both if with_manifest else None)
    assert begun.success, begun.message
    for part in halves(bases[1], contents[1].named):
        verb = SENDS[transport](engine, Call(engine.number(), part))
        assert verb is not None
        came = engine.control(verb[0], update_id=update_id(engine), **verb[1])
        assert came.success, came.message
        require(engine, answers, 0, 0, 0)
    ended = end(engine)
    assert ended.success, ended.message
    version = {"name": "poet", "version": 1, "content_digest": contents[1].digest}
    assert (ended.data["adapters"], ended.data["weight_epoch"]) == ([version], 1)
    assert (ended.data["num_tensors"], "adapter" in ended.data) == (len(both), False)
    require(engine, answers, 1, 1, 1)
    assert end(engine).data["adapters"] == [version], "an end that is sent again has the same answer"
    outcome = engine.control(GetWeightUpdateReqInput, update_id=update_id(engine)).data
    assert (outcome["outcome"], outcome["adapters"]) == ("committed", [version])


def test_a_folder_of_each_brings_both(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers
) -> None:
    assert begin_both(engine, contents[1]).success
    for verb, fields in (disk(engine, Call(engine.number(), bases[1])), *folder(engine, contents[1])):  # type: ignore[misc]
        came = engine.control(verb, update_id=update_id(engine), **fields)
        assert came.success, came.message
    assert end(engine).success
    require(engine, answers, 1, 1, 1)


def test_a_delta_of_the_model_comes_with_an_adapter(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers
) -> None:
    assert begin_both(engine, contents[1]).success
    verb = delta(engine, Call(1, bases[1], dict(bases[0])))
    assert verb is not None
    came = engine.control(verb[0], update_id=update_id(engine), **verb[1])
    assert came.success, came.message
    assert bring(engine, contents[1].named).success and end(engine).success
    require(engine, answers, 1, 1, 1)


@pytest.mark.parametrize("staging", ["device", "journal", "in_place"])
def test_every_staging_takes_both(
    checkpoints: list[Path],
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    tmp_path: Path,
    staging: str,
) -> None:
    engine = started(checkpoints[0], tmp_path, f"poet={contents[0].folder}", staging=staging)
    if staging == "journal":
        assert begin_both(engine, contents[1]).success
        assert bring(engine, halves(bases[1], contents[1].named)[0]).success and abort(engine).success
        require(engine, answers, 0, 0, 0)
    assert begin_both(engine, contents[1]).success
    for part in halves(bases[1], contents[1].named):
        assert bring(engine, part).success
    assert end(engine).success
    require(engine, answers, 1, 1, 1)


def test_a_part_of_the_model_and_new_names(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers
) -> None:
    """Two adapters come, whose tensors PEFT's state names by them; a manifest in lists is sorted as well."""
    named = [(NORM, dict(bases[0])[NORM])]
    for name, content in (("clerk", contents[1]), ("monk-2", contents[2])):
        named += [(wire.replace(".weight", f".{name}.weight"), tensor) for wire, tensor in content.named]
    columns = [list(column) for column in zip(*((n, "float32", list(t.shape)) for n, t in named), strict=True)]
    lists = ManifestLists(names=columns[0], dtypes=columns[1], shapes=columns[2])
    targets = [contents[1].target("clerk"), contents[2].target("monk-2")]
    for count in (1, 2):
        assert begin(engine, None, adapters=targets, coverage="partial", manifest=lists).success
        assert bring(engine, named).success
        ended = end(engine)
        assert [each["name"] for each in ended.data["adapters"]] == ["clerk", "monk-2"]
        assert ended.data["weight_epoch"] == count
    assert [answer(engine, name) for name in ("clerk", "monk-2")] == answers[0][1:3]
    assert answer(engine, "poet") == answers[0][0], "an adapter that did not come is kept"


# --- what running requests see ----------------------------------------------------------------------------------------


def test_a_running_request_keeps_its_version_and_its_kv_is_not_matched(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers
) -> None:
    rid = engine.submit(IDS, params={"max_new_tokens": 200}, lora_name="poet")
    engine.tick()
    (running,) = engine.scheduler.queues.all()
    assert begin_both(engine, contents[1]).success
    for part in halves(bases[1], contents[1].named):
        assert bring(engine, part).success
    assert end(engine).success and engine.results[rid].finished is None
    require(engine, answers, 1, 1, 1)
    assert running.adapter is not None and running.adapter.label.version == 0


# --- neither ----------------------------------------------------------------------------------------------------------


def fill(engine: RefreshHarness, base: Named, content: Content, **fields: Any) -> None:
    assert begin_both(engine, content, **fields).success
    for part in halves(base, content.named):
        assert bring(engine, part).success


@pytest.mark.parametrize("lost", ["the write", "the vote", "the check"])
@pytest.mark.parametrize("slots", [1, 4])
def test_neither_moves_where_one_rank_fails(
    checkpoints: list[Path],
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
    slots: int,
) -> None:
    """This rank fails to write the adapter, or has what another failed to write.  One slot is overwritten."""
    engine = started(checkpoints[0], tmp_path, f"poet={contents[0].folder}", max_loras_per_batch=slots)
    fill(engine, bases[1], contents[1])
    with monkeypatch.context() as failing:
        if lost == "the write":
            failing.setattr(LoraSlots, "write", raise_no_memory)
        else:
            failing.setattr(engine.updater, "_commit_vote" if lost == "the vote" else "_vote", lambda mine: False)
        ended = end(engine)
    told = {"the write": "no memory; the old weights were restored", "the vote": "the update, did not commit"}
    assert not ended.success and told.get(lost, "another rank could not verify") in ended.message, ended.message
    require(engine, answers, 0, 0, 0)
    fill(engine, bases[1], contents[1])
    assert end(engine).success
    require(engine, answers, 1, 1, 1)


def raise_no_memory(*_: object) -> None:
    raise MemoryError("no memory")


def test_a_base_that_cannot_be_written_leaves_the_adapter(
    engine: RefreshHarness,
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(engine, bases[1], contents[1])
    with monkeypatch.context() as failing:
        weights = engine.scheduler.runner.state.model.weights
        calls = iter([raise_no_memory])
        derived = weights.recompute_derived
        failing.setattr(type(weights), "recompute_derived", lambda self: next(calls, derived)())
        ended = end(engine)
    assert not ended.success and "no memory; the old weights were restored" in ended.message, ended.message
    require(engine, answers, 0, 0, 0)


def test_a_slot_that_cannot_be_put_back_ends_the_engine(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine, bases[1], contents[1])
    monkeypatch.setattr(engine.updater, "_commit_vote", lambda mine: False)
    monkeypatch.setattr(AdapterTable, "write_back", raise_no_memory)
    with pytest.raises(FatalError, match="the slot of an adapter has the content of no version"):
        end(engine)


@pytest.mark.mutant
def test_a_base_that_is_committed_by_itself_is_noticed(
    engine: RefreshHarness,
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit that votes on the model before it writes the adapter leaves one without the other."""

    def commit_apart(self: WeightUpdater) -> Any:
        assert self.update is not None
        self.update.transaction.commit(self._commit_vote)
        raise_no_memory()

    fill(engine, bases[1], contents[1])
    monkeypatch.setattr(WeightUpdater, "commit", commit_apart)
    with pytest.raises(FatalError):
        end(engine)
    with pytest.raises(AssertionError):
        require(engine, answers, 0, 0, 0)


IN_A_BUCKET: dict[str, tuple[Callable[[Named, Content], Named], str]] = {
    "NaN in the adapter": (lambda base, it: [*base, *with_value(it.named, A, float("nan"))], "not finite in"),
    "another value in the adapter": (lambda base, it: [*base, *with_value(it.named, A, 0.5)], "fingerprint"),
    "another value in the model": (lambda base, it: [*with_value(base, NORM, 0.5), *it.named], "fingerprint"),
    "a module of routed experts": (
        lambda base, it: [*base, ("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", torch.ones(4, 64))], "experts"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_A_BUCKET)
def test_a_wrong_bucket_fails_both(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers, what: str
) -> None:
    change, reason = IN_A_BUCKET[what]
    assert begin_both(engine, contents[1], [*bases[1], *contents[1].named]).success
    came = bring(engine, change(bases[1], contents[1]))
    assert not came.success and reason in came.message, came.message
    assert "the weight update is failed" in bring(engine, bases[1]).message
    assert not end(engine).success
    require(engine, answers, 0, 0, 0)


@pytest.mark.parametrize("lacks", ["lora_B", "norm"])
def test_an_end_without_all_tensors_of_both_is_refused(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers, lacks: str
) -> None:
    assert begin_both(engine, contents[1]).success
    status = engine.control(GetWeightUpdateReqInput).data
    assert (status["target"], status["missing"]) == ("model, adapter poet", len(bases[1]) + len(contents[1].named))
    assert bring(engine, [(n, t) for n, t in (*bases[1], *contents[1].named) if lacks not in n]).success
    ended = end(engine)
    assert not ended.success and "tensors missing: " in ended.message and lacks in ended.message, ended.message
    require(engine, answers, 0, 0, 0)


@pytest.mark.parametrize("transport", [name for name in SENDS if name not in ("delta", "disk")])
def test_damage_on_the_way_moves_neither(
    engine: RefreshHarness,
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "_IPC_BUCKET_BYTES", 1 << 20)
    both = [*bases[1], *contents[1].named]
    damages: tuple[Damage, ...] = ("killed", "truncated", "flipped")
    for damage in damages[:2] if transport == "tensor pickle" else damages:
        assert begin_both(engine, contents[1], both).success
        verb = SENDS[transport](engine, Call(engine.number(), both, damage=damage))
        if verb is not None:
            came = engine.control(verb[0], update_id=update_id(engine), **verb[1])
            assert not came.success, f"{damage}: {came.message}"
        assert not end(engine).success, damage
        if engine.updater.is_open:
            assert abort(engine).success
    require(engine, answers, 0, 0, 0)
    fill(engine, bases[1], contents[1])
    engine.lapse()
    assert not end(engine).success
    require(engine, answers, 0, 0, 0)


# --- refusals at the begin --------------------------------------------------------------------------------------------


Given = Callable[[Named, list[Content]], dict[str, Any]]
AT_BEGIN: dict[str, tuple[Given, str]] = {
    "no adapter": (lambda _, it: {"adapters": []}, "is an empty list"),
    "one adapter twice": (lambda _, it: {"adapters": [it[1].target(), it[2].target()]}, "name one adapter twice"),
    "a target, too": (lambda _, it: {"target": it[1].target(), "adapters": [it[1].target()]}, "are for the model"),
    "by rank": (
        lambda _, it: {"adapters": [it[1].target()], "per_rank": True, "placement_epoch": 0}, "without per_rank"
    ),
    "a name that no tensor can have": (
        lambda _, it: {"adapters": [it[1].target(), it[2].target("a b")]}, "cannot come with others"
    ),
    "a manifest without the adapter": (lambda base, it: {"adapters": [it[1].target()], "named": base}, "is empty"),
    "a manifest without the model": (
        lambda _, it: {"adapters": [it[1].target()], "named": it[1].named}, "the manifest lacks"
    ),
    "tensors without the adapter's name": (
        lambda base, it: {"adapters": [it[1].target(), it[2].target("clerk")], "named": [*base, *it[1].named]},
        "a tensor's name has its adapter's",
    ),
    "an adapter of another rank": (lambda _, it: {"adapters": [it[1].target(r=9)]}, "has rank 9"),
    "a name that both may have": (
        lambda base, it: {
            "adapters": [it[1].target()], "named": [*base, ("mtp.lora_A.weight", torch.ones(4, 64)), *it[1].named],
        },
        "may be a tensor of the model or of an adapter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_BEGIN)
def test_what_cannot_come_together_is_refused_at_the_begin(
    engine: RefreshHarness,
    bases: list[Named],
    contents: list[Content],
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    if what == "a name that both may have":
        monkeypatch.setattr(engine.weights, "_ignored", ("mtp.",))
    given, reason = AT_BEGIN[what]
    fields = given(bases[1], contents)
    refused = begin(engine, fields.pop("target", None), fields.pop("named", None), **fields)
    assert not refused.success and reason in refused.message and "\n" not in refused.message, refused.message
    require_entry(refused.message)
    assert not engine.updater.is_open
    require(engine, answers, 0, 0, 0)


def test_a_full_table_refuses_with_what_holds_each_slot(
    checkpoints: list[Path], bases: list[Named], contents: list[Content], answers: Answers, tmp_path: Path
) -> None:
    paths = f"poet={contents[0].folder},clerk={contents[2].folder}"
    engine = started(checkpoints[0], tmp_path, paths, max_loras_per_batch=2)
    refused = begin(engine, None, adapters=[contents[1].target("third")])
    assert not refused.success and "all 2 slots are taken" in refused.message and "poet@0" in refused.message
    fill(engine, bases[1], contents[1])  # for poet, whose slot a request takes meanwhile
    rid = engine.submit([5, 9, 200], params={"max_new_tokens": 200}, lora_name="poet")
    engine.tick()
    ended = end(engine)
    assert not ended.success and "poet@0 (newest, in use)" in ended.message, ended.message
    outcome = engine.control(GetWeightUpdateReqInput, update_id=update_id(engine)).data
    assert outcome["outcome"] == "aborted" and engine.results[rid].finished is None
    engine.run()
    require(engine, answers, 0, 0, 0)
    fill(engine, bases[1], contents[1])
    assert end(engine).success
    require(engine, answers, 1, 1, 1)


def test_an_adapter_is_loaded_while_both_come(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers
) -> None:
    """A load by folder in between takes the next version, and the update the one after it."""

    fill(engine, bases[1], contents[1])
    path = str(contents[2].folder)
    loaded = engine.control(LoadLoraAdapterReqInput, lora_name="poet", lora_path=path, load_inplace=True)
    assert loaded.success and answer(engine, "poet") == answers[0][2]
    assert end(engine).data["adapters"][0]["version"] == 2
    require(engine, answers, 1, 1, 2)


def test_a_server_without_slots_refuses(checkpoints: list[Path], contents: list[Content], tmp_path: Path) -> None:
    settings = {"enable_return_routed_experts": False, "skip_tokenizer_init": True}
    engine = RefreshHarness(checkpoints[0], "host", tmp_path, **settings)
    refused = begin_both(engine, contents[1])
    assert not refused.success and "start it with --enable-lora" in refused.message


def test_both_follow_each_other_and_single_updates(
    engine: RefreshHarness, bases: list[Named], contents: list[Content], answers: Answers
) -> None:
    """Layouts that one update sorted are sorted again, and the plans of the model serve updates of it alone."""
    for turn in range(2):
        fill(engine, bases[1 - turn], contents[1], manifest=None)
        assert end(engine).success
        assert refresh(engine, contents[2]).success and answer(engine, "poet") == answers[1 - turn][2]
