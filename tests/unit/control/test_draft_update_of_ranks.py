"""A draft's weights as the target of an update of several ranks and replicas: on all of them, or on none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.messages.io_struct import GetStateReqInput
from tests.adapter_updates import FAMILY, SEED, abort, begin, bring, end
from tests.draft_updates import DRAFT, PREFIX, fail_write, give_drafts, holds, tensors_of
from tests.family_zoo import family_checkpoint
from tests.faults.transports import Named
from tests.parallel_harness import ParallelHarness
from weight_sync.update import WeightUpdate

LAYOUTS = {"two ranks": {"tp_size": 2}, "two replicas": {"dp_size": 2}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the model, the draft, and the next versions of both."""
    return [family_checkpoint(tmp_path_factory.mktemp(f"model{n}"), FAMILY, SEED + n) for n in range(4)]


@pytest.fixture(params=LAYOUTS)
def engine(
    request: pytest.FixtureRequest, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ParallelHarness]:
    give_drafts(monkeypatch, checkpoints[1], is_published=True)
    settings = {"skip_tokenizer_init": True, "enable_return_routed_experts": False, "dtype": "float32"}
    with ParallelHarness(checkpoints[0], **settings | LAYOUTS[request.param]) as harness:
        yield harness


def all_hold(engine: ParallelHarness, draft: Named, epoch: int, version: str, *, is_stale: bool = False) -> bool:
    """Return whether all ranks have this draft and version of it, and the model of this epoch."""
    states = [each.runner.state for each in engine.schedulers]
    drafts = [state.draft for state in states]
    facts = {
        (state.epoch.weight_epoch, it.weight_version, it.is_stale) for state, it in zip(states, drafts, strict=True)
    }
    return facts == {(epoch, version, is_stale)} and all(holds(state, draft) for state in states)


def test_all_ranks_take_the_draft_and_the_model_or_neither(
    engine: ParallelHarness,
    checkpoints: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    old, new = tensors_of(checkpoints[1], PREFIX), tensors_of(checkpoints[3], PREFIX)
    model = tensors_of(checkpoints[2])

    def send(target: Any, named: Named, version: str) -> Any:
        assert begin(engine, target, weight_version=version).success
        assert bring(engine, named[::2]).success and bring(engine, named[1::2]).success
        return end(engine)

    for target, named in ((DRAFT, new), (None, [*model, *new])):
        with monkeypatch.context() as one_cannot:
            fail_write(one_cannot, engine.schedulers[1].runner.state)
            refused = send(target, named, "1")
        assert not refused.success and all_hold(engine, old, 0, "default"), refused.message
        logged = [line for line in capfd.readouterr().err.splitlines() if "could not commit" in line]
        assert len(logged) == 1 and "this rank has no memory for it" in logged[0], "the one that answers has no reason"
    assert send(DRAFT, new, "1").success and all_hold(engine, new, 0, "1")
    assert send(None, [*model, *old], "2").success and all_hold(engine, old, 1, "2")
    assert send(None, model, "3").success and all_hold(engine, old, 2, "2", is_stale=True)
    assert engine.control(GetStateReqInput).data["draft"]["is_stale"]


def test_a_draft_that_came_to_one_rank_alone_is_refused_on_all(
    engine: ParallelHarness, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tensors_of(checkpoints[1], PREFIX), tensors_of(checkpoints[3], PREFIX)
    first, take = engine.schedulers[0].runner.state.draft, WeightUpdate._take

    def on_one(self: WeightUpdate, bucket: Any, cast: bool) -> None:
        is_first = self.beside[0].target.draft is first  # type: ignore[attr-defined]
        parts = bucket.layout.views(bucket.content)
        take(self, [(meta.name, it) for meta, it in parts if is_first or not meta.name.startswith(PREFIX)], cast)

    monkeypatch.setattr(WeightUpdate, "_take", on_one)
    assert begin(engine, None).success and bring(engine, [*tensors_of(checkpoints[2]), *new]).success
    refused = end(engine)
    assert not refused.success and "came to some ranks, and not to all" in refused.message
    assert all_hold(engine, old, 0, "default")


@pytest.mark.parametrize("engine", ["two ranks"], indirect=True)
def test_a_draft_that_is_torn_on_another_rank_is_told(engine: ParallelHarness, checkpoints: list[Path]) -> None:
    """The first rank answers, and the draft of the second one could not be put back.  Replicas answer each."""
    targets = [scheduler._verbs[GetStateReqInput].__self__._draft for scheduler in engine.schedulers]  # type: ignore[attr-defined]
    targets[1].torn = "its old weights could NOT be restored"
    assert begin(engine, DRAFT).success and abort(engine).success
    found = engine.control(GetStateReqInput).data["draft"]
    assert found["torn"] == targets[1].torn and found["is_stale"] and found["content_digest"] is None
    new = tensors_of(checkpoints[3], PREFIX)
    assert begin(engine, DRAFT, weight_version="1").success and bring(engine, new).success
    sent = end(engine)
    assert sent.success and sent.data["draft"]["torn"] is None and targets[1].torn is None
    assert engine.control(GetStateReqInput).data["draft"]["torn"] is None
