"""An adapter as the target of an update of several ranks and replicas: on all of them, or on none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout.core.errors import AdapterError
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
