"""An adapter as the target of an update of several ranks and replicas: on all of them, or on none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollout.core.errors import AdapterError
from rollout.core.messages.adapters import RegisterLoraAdapterReqInput, UnloadLoraAdapterReqInput
from rollout.core.messages.weights import GetWeightUpdateReqInput
from tests.adapter_updates import FAMILY, SEED, Content, begin, bring, end, make_content, refresh, update_id
from tests.family_zoo import family_checkpoint
from tests.parallel_harness import ParallelHarness

LAYOUTS = {"two ranks": {"tp_size": 2}, "two replicas": {"dp_size": 2}}


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[Content]:
    return [make_content(tmp_path_factory.mktemp(f"content{seed}") / "a", seed) for seed in range(2)]


@pytest.fixture(params=LAYOUTS)
def engine(
    request: pytest.FixtureRequest, contents: list[Content], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ParallelHarness]:
    checkpoint = family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)
    settings = {"enable_lora": True, "lora_paths": f"poet={contents[0].folder}", "skip_tokenizer_init": True}
    settings |= {"enable_return_routed_experts": False, "max_loras_per_batch": 2, "dtype": "float32"}
    with ParallelHarness(checkpoint, **settings | LAYOUTS[request.param]) as harness:
        yield harness


def served(engine: ParallelHarness) -> list[tuple[int, str]]:
    labels = [each.runner.state.adapters.find("poet").label for each in engine.schedulers]
    return [(label.version, label.content_digest) for label in labels]


def test_all_ranks_serve_the_version_or_none(
    engine: ParallelHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (0, contents[0].digest), (1, contents[1].digest)
    with monkeypatch.context() as one_cannot:

        def refuse(*_: object, **__: object) -> None:
            raise AdapterError("this rank has no memory for it")

        assert begin(engine, contents[1].target(), contents[1].named).success
        assert bring(engine, contents[1].named).success
        one_cannot.setattr(engine.schedulers[1].runner.state.adapters, "prepare", refuse)
        refused = end(engine)
        assert not refused.success and served(engine) == [old, old], refused.message
    outcome = engine.control(GetWeightUpdateReqInput, update_id=update_id(engine)).data["outcome"]
    assert outcome == "aborted"
    answer = refresh(engine, contents[1])
    assert answer.success and served(engine) == [new, new], answer.message
    assert answer.data["adapter"] == {"name": "poet", "version": 1, "content_digest": contents[1].digest}


def state_of(engine: ParallelHarness) -> list[tuple[int, int, str]]:
    epochs = [each.runner.state.epoch.weight_epoch for each in engine.schedulers]
    return [(epoch, *label) for epoch, label in zip(epochs, served(engine), strict=True)]


@pytest.mark.parametrize("fails", ["its check", "its write"])
def test_all_ranks_take_the_model_and_the_adapter_or_neither(
    engine: ParallelHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    weights = engine.schedulers[0].runner.state.model.weights
    base = [(name, torch.full(meta.shape, 0.01, dtype=meta.dtype)) for name, meta in weights.metas().items()]
    table = engine.schedulers[1].runner.state.adapters
    epoch, version, digest = state_of(engine)[0]
    content = contents[0] if digest == contents[1].digest else contents[1]
    both = [*base, *content.named]

    def refuse(*_: object, **__: object) -> None:
        raise AdapterError("this rank has no memory for it")

    for is_well in (False, True):
        assert begin(engine, None, both, adapters=[content.target()]).success
        assert bring(engine, both[::2]).success and bring(engine, both[1::2]).success
        with monkeypatch.context() as one_cannot:
            if not is_well:
                one_cannot.setattr(table, "prepare" if fails == "its check" else "write", refuse)
            ended = end(engine)
        after = (epoch + 1, version + 1, content.digest) if is_well else (epoch, version, digest)
        assert ended.success == is_well and state_of(engine) == [after, after], ended.message
    assert ended.data["adapters"][0]["version"] == version + 1


@pytest.mark.parametrize("fails", ["its check", "its write"])
def test_all_ranks_have_the_registration_and_take_its_tensors_or_none(
    engine: ParallelHarness, contents: list[Content], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    tables = [each.runner.state.adapters for each in engine.schedulers]
    named = [(f"miles_lora:{name}", tensor) for name, tensor in contents[0].named]
    target = {"lora_name": "miles_lora", "config_dict": contents[0].config, "defer_publish": True}
    label = tables[0].find("poet").label

    def refuse(*_: object, **__: object) -> None:
        raise AdapterError("this rank has no memory for it")

    for is_well in (False, True):
        assert engine.control(RegisterLoraAdapterReqInput, **target).success
        assert [table.awaited for table in tables] == [["miles_lora"]] * 2
        assert begin(engine, None, sync_base=False).success
        assert bring(engine, named).success
        with monkeypatch.context() as one_cannot:
            if not is_well:
                one_cannot.setattr(tables[1], "prepare" if fails == "its check" else "write", refuse)
            ended = end(engine)
        assert ended.success == is_well, ended.message
        assert [table.serves("miles_lora") for table in tables] == [is_well] * 2
        assert [table.awaited for table in tables] == [[]] * 2, "a deferred one is for one update"
    served = [table.find("miles_lora").label for table in tables]
    assert served[0] == served[1] and served[0].content_digest == contents[0].digest
    assert tables[0].find("poet").label == label
    assert engine.control(UnloadLoraAdapterReqInput, lora_name="miles_lora").success
