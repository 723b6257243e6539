"""Registered adapters: their tensors come in updates of the model as NAME:TENSOR, and are served from the commit on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from rollout.adapters.peft_folder import Adapter, read_adapter
from rollout.core.messages.adapters import RegisterLoraAdapterReqInput, UnloadLoraAdapterReqInput
from rollout.core.messages.weights import (
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
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
    make_content,
    refresh,
    started,
    update_id,
    with_value,
)
from tests.family_zoo import family_checkpoint
from tests.faults import transports
from tests.faults.harness import RefreshHarness
from tests.faults.transports import SENDS, Call, Named
from tests.troubleshooting import require_entry

NAME = "miles_lora"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
AWAITED = "its first weights have not come"
Answers = list[list[Any]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [family_checkpoint(tmp_path_factory.mktemp(f"model{n}"), FAMILY, SEED + n) for n in range(2)]


@pytest.fixture(scope="module")
def base(checkpoints: list[Path]) -> Named:
    """The other weights of the model."""
    return list(load_file(checkpoints[1] / "model.safetensors").items())


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [make_content(tmp_path_factory.mktemp(f"content{seed}") / "a", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def answers(checkpoints: list[Path], contents: list[Content], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The answers of servers that were started with each base: with each content, and last without one."""
    paths = ",".join(f"c{number}={content.folder}" for number, content in enumerate(contents))
    found = []
    for checkpoint in checkpoints:
        harness = started(checkpoint, tmp_path_factory.mktemp("cold"), paths)
        found.append([answer(harness, name) for name in ("c0", "c1", None)])
    return found


@pytest.fixture(scope="module")
def shared(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RefreshHarness]:
    harness = started(checkpoints[0], tmp_path_factory.mktemp("shared"), "", lora_paths=None, max_loras_per_batch=2)
    yield harness
    harness.clean_up()


@pytest.fixture
def engine(shared: RefreshHarness) -> Iterator[RefreshHarness]:
    """An engine of two slots that has served nothing by these names since its last test."""
    yield shared
    if shared.updater.is_open:
        shared.updater.drop("the test is over")
    shared.updater.book.clear_loss()
    table = shared.scheduler.runner.state.adapters
    for name in {*table.sources, *table.awaited}:
        unload(shared, name)


def register(engine: RefreshHarness, content: Content, name: str = NAME, **fields: Any) -> Any:
    fields = {"config_dict": content.config} | fields
    return engine.control(RegisterLoraAdapterReqInput, lora_name=name, **fields)


def unload(engine: RefreshHarness, name: str = NAME, **fields: Any) -> Any:
    return engine.control(UnloadLoraAdapterReqInput, lora_name=name, **fields)


def prefixed(content: Content, name: str = NAME) -> Named:
    return [(f"{name}:{wire}", tensor) for wire, tensor in content.named]


def begin_alone(engine: RefreshHarness, **fields: Any) -> Any:
    return begin(engine, None, sync_base=False, **fields)


def push(engine: RefreshHarness, content: Content, name: str = NAME, **fields: Any) -> Any:
    """Bring a content in an update of its own, in two buckets; return the last answer."""
    assert begin_alone(engine).success
    named = prefixed(content, name)
    for part in (named[::2], named[1::2]):
        came = bring(engine, part)
        assert came.success, came.message
    return end(engine, **fields)


def checksums_of(content: Content) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in content.named}


def version_of(engine: RefreshHarness, name: str = NAME) -> int | None:
    table = engine.scheduler.runner.state.adapters
    return table.find(name).label.version if table.serves(name) else None


def refusal_of_request(engine: RefreshHarness, name: str = NAME) -> str:
    (result,) = engine.generate([IDS], {"max_new_tokens": 1}, lora_name=name)
    assert result.finished is not None and result.finished.reason.status_code == 404, result.finished
    return str(result.finished.reason.message)


def require_one_line(refused: Any, reason: str, status: int = 400) -> None:
    assert not refused.success and reason in refused.message and "\n" not in refused.message, refused.message
    assert refused.status_code == status, refused
    require_entry(refused.message)


# --- what comes into force --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [name for name in SENDS if name not in ("delta", "disk")])
def test_every_transport_brings_it_beside_the_model_and_alone(
    checkpoints: list[Path],
    base: Named,
    contents: list[Content],
    answers: Answers,
    tmp_path: Path,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Register once, as miles does, and update twice: with the model, and the adapter alone."""
    monkeypatch.setattr(transports, "_IPC_BUCKET_BYTES", 1 << 20)
    engine = started(checkpoints[0], tmp_path, "", lora_paths=None)
    assert register(engine, contents[0]).data["pending"]
    assert AWAITED in refusal_of_request(engine)
    for count, (more, fields) in enumerate(((base, {}), ([], {"sync_base": False}))):
        content = contents[count]
        named = [*more, *prefixed(content)]
        assert begin(engine, None, **fields).success
        for part in (named[::2], named[1::2]):
            verb = SENDS[transport](engine, Call(engine.number(), part))
            assert verb is not None
            came = engine.control(verb[0], update_id=update_id(engine), **verb[1])
            assert came.success, came.message
            assert version_of(engine) == (count - 1 if count else None)
        ended = end(engine)
        assert ended.success, ended.message
        told = {"name": NAME, "version": count, "content_digest": content.digest}
        assert (ended.data["adapters"], ended.data["weight_epoch"]) == ([told], 1)
        assert answer(engine, NAME) == answers[1][count] and answer(engine, None) == answers[1][-1]
    engine.clean_up()


def test_an_update_without_its_tensors_leaves_it(
    checkpoints: list[Path], base: Named, contents: list[Content], answers: Answers, tmp_path: Path
) -> None:
    engine = started(checkpoints[0], tmp_path, "", lora_paths=None)
    assert register(engine, contents[0]).success
    assert push(engine, contents[0]).success and answer(engine, NAME) == answers[0][0]
    assert begin(engine, None).success and bring(engine, base).success
    ended = end(engine)
    assert ended.success and "adapters" not in ended.data, ended
    assert version_of(engine) == 0 and answer(engine, NAME) == answers[1][0]
    assert begin_alone(engine).success and end(engine).success, "nothing comes, and nothing changes"
    assert version_of(engine) == 0
    engine.clean_up()


def test_adapters_alone_hold_no_step_whatever_the_staging(
    checkpoints: list[Path], contents: list[Content], tmp_path: Path
) -> None:
    engine = started(checkpoints[0], tmp_path, "", lora_paths=None, staging="in_place")
    assert register(engine, contents[0]).success and push(engine, contents[0]).success
    assert [(ended.target, ended.steps_held) for ended in engine.updater.book.ended] == [(f"adapter {NAME}", False)]
    engine.clean_up()


def test_two_adapters_come_in_one_bucket_and_a_manifest_names_the_ones_that_must(
    engine: RefreshHarness, contents: list[Content], answers: Answers
) -> None:
    both = [
        tensor for pair in zip(prefixed(contents[0], "x"), prefixed(contents[1], "y-1"), strict=True) for tensor in pair
    ]
    for name, content in (("x", contents[0]), ("y-1", contents[1])):
        assert register(engine, content, name).success
    assert begin_alone(engine, named=both).success
    status = engine.control(GetWeightUpdateReqInput).data
    assert (status["target"], status["missing"]) == ("adapter x, adapter y-1", len(both))
    assert bring(engine, both).success and end(engine).success
    assert [answer(engine, name) for name in ("x", "y-1")] == answers[0][:2]
    again = prefixed(contents[1], "x")
    assert begin_alone(engine, named=again).success and bring(engine, again).success and end(engine).success
    assert (version_of(engine, "x"), version_of(engine, "y-1")) == (1, 0)


def test_a_new_configuration_is_for_the_next_update(engine: RefreshHarness, contents: list[Content]) -> None:
    assert register(engine, contents[0]).success and push(engine, contents[0]).success
    served = answer(engine, NAME)
    told = register(engine, contents[0], config_dict=contents[0].config | {"lora_alpha": 80})
    assert told.success and not told.data["pending"]
    assert answer(engine, NAME) == served and version_of(engine) == 0
    assert push(engine, contents[0]).success
    assert answer(engine, NAME) != served and version_of(engine) == 1


def test_a_running_request_keeps_its_version(engine: RefreshHarness, contents: list[Content], answers: Answers) -> None:
    assert register(engine, contents[0]).success and push(engine, contents[0]).success
    version = version_of(engine)
    rid = engine.submit(IDS, params={"max_new_tokens": 100}, lora_name=NAME)
    engine.tick()
    (running,) = engine.scheduler.queues.all()
    assert push(engine, contents[1]).success and engine.results[rid].finished is None
    assert running.adapter is not None and running.adapter.label.version == version
    assert answer(engine, NAME) == answers[0][1], "KV of the version before is not matched"
    engine.run()


# --- nothing comes into force -----------------------------------------------------------------------------------------


def incomplete(content: Content) -> Named:
    return [(name, tensor) for name, tensor in prefixed(content) if A not in name]


WRONG: dict[str, tuple[Callable[[Content], Named], str]] = {
    "a tensor is missing": (incomplete, "1 of 24 tensors missing: "),
    "another adapter's name": (lambda it: prefixed(it, "nobody"), "may bring the registered adapters miles_lora"),
    "no adapter's name": (lambda it: it.named, "the name of its adapter is missing"),
    "a tensor of the model": (
        lambda it: [*prefixed(it), ("model.norm.weight", torch.ones(64))],
        "began with sync_base false, for adapters alone",
    ),
    "a module that it does not have": (
        lambda it: [*prefixed(it), (f"{NAME}:model.layers.0.mlp.gate.lora_A.weight", torch.ones(4, 64))],
        "has no tensor",
    ),
    "another shape": (
        lambda it: [*incomplete(it), (f"{NAME}:{A}", torch.ones(4, 65))], "has shape [4, 65]"
    ),
    "NaN": (
        lambda it: [(f"{NAME}:{name}", tensor) for name, tensor in with_value(it.named, A, float("nan"))], "not finite"
    ),
}  # fmt: skip


@pytest.mark.parametrize("was_served", [False, True], ids=["new", "served"])
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_stream_changes_nothing(
    engine: RefreshHarness, contents: list[Content], answers: Answers, what: str, was_served: bool
) -> None:
    spoil, reason = WRONG[what]
    assert register(engine, contents[0]).success
    if was_served:
        assert push(engine, contents[0]).success
    version = version_of(engine)
    assert begin_alone(engine).success
    came = bring(engine, spoil(contents[1]))
    ended = end(engine)
    require_one_line(ended if came.success else came, reason)
    assert not ended.success and version_of(engine) == version and not engine.updater.is_open
    assert answer(engine, NAME) == answers[0][0] if was_served else AWAITED in refusal_of_request(engine)
    assert push(engine, contents[1]).success and answer(engine, NAME) == answers[0][1]


@pytest.mark.parametrize("loss", ["abort", "end with abort", "lease", "vote"])
def test_a_lost_update_leaves_the_registration(
    engine: RefreshHarness, contents: list[Content], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert register(engine, contents[0]).success
    assert begin_alone(engine).success and bring(engine, prefixed(contents[0])).success
    if loss == "vote":
        with monkeypatch.context() as failing:
            failing.setattr(engine.updater, "_commit_vote", lambda mine: False)
            assert not end(engine).success
    elif loss == "lease":
        engine.lapse()
    else:
        assert (abort(engine) if loss == "abort" else end(engine, abort=True)).success
    assert not engine.updater.is_open and version_of(engine) is None
    assert AWAITED in refusal_of_request(engine)
    assert push(engine, contents[0]).success and version_of(engine) is not None


def test_checksums_of_the_sender_hold_or_refuse_the_update(engine: RefreshHarness, contents: list[Content]) -> None:
    assert register(engine, contents[0]).success
    stated = checksums_of(contents[0])
    first, *others = stated
    assert push(engine, contents[0], expected_lora_checksums={NAME: stated}).success
    version = version_of(engine)
    for wrong, reason in (
        ({NAME: stated | {first: stated[others[0]]}}, "1 of 24 tensors have other bytes"),
        ({NAME: stated | {"gone": "0" * 64}}, "1 did not come"),
        ({NAME: {name: stated[name] for name in others}}, "1 came without one"),
        ({NAME: stated, "other": stated}, "has the adapters miles_lora, other, and these came: miles_lora"),
        ({}, "has the adapters none, and these came: miles_lora"),
    ):
        require_one_line(push(engine, contents[0], expected_lora_checksums=wrong), reason)
        assert version_of(engine) == version and not engine.updater.is_open


def test_checksums_are_of_the_bytes_that_were_sent(engine: RefreshHarness, contents: list[Content]) -> None:
    """Tensors in bfloat16 lie in float32 until the commit."""
    sent = [(name, tensor.to(torch.bfloat16)) for name, tensor in contents[0].named]
    stated = {name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest() for name, tensor in sent}
    assert register(engine, contents[0]).success and begin_alone(engine).success
    assert bring(engine, [(f"{NAME}:{name}", tensor) for name, tensor in sent]).success
    ended = end(engine, expected_lora_checksums={NAME: stated})
    assert ended.success, ended.message


# --- registrations ----------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a rank over the slots'": ({"config_dict": {"peft_type": "LORA", "r": 9, "lora_alpha": 4,
                                                "target_modules": ["q_proj"]}}, "has rank 9"),
    "another method": ({"config_dict": {"peft_type": "LOHA"}}, "only LORA is served"),
    "all linear modules": ({"config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 4,
                                            "target_modules": "all-linear"}}, "needs a manifest of its tensors"),
    "no such module": ({"config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["conv"]}},
                       "has no module that target_modules conv adapts"),
    "a colon": ({"name": "a:b"}, "holds no ':'"),
    "a version": ({"name": "A@2"}, "holds no '@'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_registration_changes_nothing(engine: RefreshHarness, contents: list[Content], what: str) -> None:
    fields, reason = BAD[what]
    require_one_line(register(engine, contents[0], **fields), reason)
    assert not engine.scheduler.runner.state.adapters.awaited


def test_a_registration_amid_an_update_is_refused_unless_it_is_there(
    engine: RefreshHarness, contents: list[Content]
) -> None:
    assert register(engine, contents[0]).success and begin_alone(engine).success
    assert register(engine, contents[0]).success, "a call that is sent again"
    changed = {"config_dict": contents[0].config | {"lora_alpha": 80}}
    for fields in (changed, {"name": "another"}):
        require_one_line(register(engine, contents[0], **fields), "register an adapter before its update begins", 409)
    require_one_line(unload(engine), "may come in the open weight update", 409)
    assert bring(engine, prefixed(contents[0])).success and end(engine).success
    assert version_of(engine) is not None


def test_an_unload_ends_the_registration(engine: RefreshHarness, contents: list[Content]) -> None:
    assert register(engine, contents[0]).success
    assert unload(engine).success, "no weights had come"
    assert unload(engine).status_code == 404
    assert register(engine, contents[0]).success and push(engine, contents[0]).success
    assert unload(engine).success and "there is no adapter" in refusal_of_request(engine)
    assert begin_alone(engine).success
    require_one_line(bring(engine, prefixed(contents[0])), "may bring the registered adapters none")


def test_tensors_before_a_begin_or_a_registration_are_refused(engine: RefreshHarness, contents: list[Content]) -> None:
    for is_registered in (False, True):
        if is_registered:
            assert register(engine, contents[0]).success
        payload = bytearray(save(dict(prefixed(contents[0]))))
        came = engine.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors")
        require_one_line(came, "/register_lora_adapter, then begin_weight_update come before its tensors")


def test_a_name_without_a_slot_is_refused(engine: RefreshHarness, contents: list[Content]) -> None:
    """Two slots: one has a version, one is meant for a registered name."""
    assert register(engine, contents[0], "x").success and push(engine, contents[0], "x").success
    assert register(engine, contents[0], "y").success
    refused = register(engine, contents[0], "z")
    require_one_line(refused, "all 2 slots are taken (--max-loras-per-batch): x@")
    assert "without weights: y" in refused.message
    assert register(engine, contents[0], "y", config_dict=contents[0].config | {"lora_alpha": 2}).success
    assert unload(engine, "y").success and register(engine, contents[0], "z").success


@pytest.mark.parametrize("ends", ["commit", "abort", "end with abort", "a wrong bucket", "no begin", "without it"])
def test_a_deferred_registration_is_for_one_update(engine: RefreshHarness, contents: list[Content], ends: str) -> None:
    assert register(engine, contents[0], defer_publish=True).data["pending"]
    assert register(engine, contents[0], defer_publish=True).success, "a call that is sent again"
    if ends != "no begin":
        assert begin_alone(engine).success
    if ends == "commit":
        assert bring(engine, prefixed(contents[0])).success and end(engine).success
        require_one_line(register(engine, contents[0], defer_publish=True), "defer_publish is for a name that is not")
        assert push(engine, contents[1]).success, "it holds for later updates"
        return
    if ends == "abort":
        assert abort(engine).success
    elif ends == "a wrong bucket":
        assert not bring(engine, contents[0].named).success and not end(engine).success
    elif ends == "without it":
        assert end(engine).success
    elif ends == "no begin":
        table = engine.scheduler.runner.state.adapters
        assert table.awaited == [NAME]
        assert engine.control(EndWeightUpdateReqInput, abort=True).success
        assert engine.control(EndWeightUpdateReqInput, abort=True).status_code == 409, "there is nothing to drop"
    else:
        assert end(engine, abort=True).success
    assert "there is no adapter" in refusal_of_request(engine)
    assert register(engine, contents[0], defer_publish=True).success, "and may be registered again"


def test_a_refused_begin_leaves_a_deferred_registration(engine: RefreshHarness, contents: list[Content]) -> None:
    """It has opened no update, so that the next one may bring the adapter still."""
    table = engine.scheduler.runner.state.adapters
    assert register(engine, contents[0], defer_publish=True).success
    assert begin_alone(engine, base_version="another").status_code == 409
    assert table.awaited == [NAME]
    assert push(engine, contents[0]).success and table.serves(NAME)


GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "a part": ({"coverage": "partial"}, "coverage partial"),
    "a base": ({"base_digest": "0" * 64}, "base_digest"),
    "adapters": ({"adapters": "refuse"}, "adapters"),
    "a placement": ({"adopt_placement": True}, "adopt_placement"),
}


@pytest.mark.parametrize("what", GIVEN)
def test_fields_of_the_model_are_refused_without_it(engine: RefreshHarness, what: str) -> None:
    fields, reason = GIVEN[what]
    require_one_line(begin_alone(engine, **fields), f"{reason}: with sync_base false registered adapters alone come")


def test_other_forms_of_adapters_go_on_beside_it(
    engine: RefreshHarness, contents: list[Content], answers: Answers
) -> None:
    assert register(engine, contents[0]).success
    assert refresh(engine, contents[1], NAME).success and answer(engine, NAME) == answers[0][1]
    assert push(engine, contents[0]).success and answer(engine, NAME) == answers[0][0]
    require_one_line(begin(engine, contents[0].target(NAME), sync_base=False), "sync_base false")


@pytest.mark.mutant
def test_a_registration_that_serves_at_once_is_noticed(
    engine: RefreshHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang serves a new name with zeros: here that would be an answer of the model under the adapter's name."""
    table = engine.scheduler.runner.state.adapters

    def serve_zeros(names: list[str]) -> None:
        for name in names:
            table.load(name, zeros)

    read = read_adapter(contents[0].folder)
    zeros = Adapter({m: w._replace(b=torch.zeros_like(w.b)) for m, w in read.modules.items()}, "0" * 64)
    with monkeypatch.context() as wrong:
        wrong.setattr(table, "register", serve_zeros)
        assert register(engine, contents[0]).success
    with pytest.raises(AssertionError):
        refusal_of_request(engine)
