"""Models that draft for groups of ranks with requests of their own: the bits of the same ranks without drafts.

Groups draft to different depths, or not at all.  A draft with experts has them on all ranks, which meet in its
forwards; a dense one must not wait for the other group.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from examples.make_checkpoint.tokenizer import save_tokenizer, train_tokenizer
from rollout.core.grammar import Grammar
from rollout.core.messages.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
)
from rollout.scheduler.model_drafting import ModelDrafting
from tests.adapter_updates import begin, bring, end
from tests.draft_updates import DRAFT, tensors_of
from tests.faults.transports import Named
from tests.invariance import Ask
from tests.kernels import native_ops
from tests.model_zoo import tiny_checkpoint
from tests.mtp_zoo import mtp_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Result
from tests.unit.engine.test_invariance_mtp import tell

DP = {"dp_size": 2, "enable_dp_attention": True}
FOUR: dict[str, Any] = {"tp_size": 4, "ep_size": 4} | DP
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"tp_size": 2, "ep_size": 2} | DP,
    "dp2, experts split": {"tp_size": 2} | DP,
    "dp2 of tp2": FOUR,
    "dp2 of tp2, all-to-all": FOUR | {"moe_a2a_backend": "all_to_all"},
}
DRAFTS = ["a layer", "a small model", "a small model with experts"]
OFTEN = [("dp2", "a small model"), ("dp2", "a small model with experts"), ("dp2 of tp2, all-to-all", "a layer")]
REGEX = Grammar("regex", "(ab|ba){2,6}(yes|no)!?")
PROMPT = [5, 9, 2, 6, 5, 3, 5, 8, 9, 2, 6, 5, 3]


class Sent(NamedTuple):
    """One request to a group."""

    group: int
    prompt: list[int]
    params: dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two contents of a model that has a layer that drafts."""
    base = tmp_path_factory.mktemp("models")
    folders = [mtp_checkpoint(base / str(seed), "glm4_moe", seed) for seed in (3, 4)]
    for folder in folders:
        save_tokenizer(train_tokenizer(320), folder, 256)  # for grammars
    return folders


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("small")
    return [tiny_checkpoint(base / str(seed), "dense", seed=seed) for seed in (6, 7)]


@pytest.fixture(scope="module")
def plain(folders: list[Path]) -> Callable[[str], list[Result]]:
    """Return the answers of a layout without drafts."""
    known: dict[str, list[Result]] = {}

    def answers(name: str) -> list[Result]:
        if name not in known:
            with start(folders[0], name) as engine:
                known[name] = send(engine, requests())
        return known[name]

    return answers


def start(folder: Path, name: str, draft: str | None = None, small: Path | None = None, **more: Any) -> ParallelHarness:
    """Start the ranks; what drafts is verified whatever it costs.  A small model with experts is the served one."""
    settings: dict[str, Any] = {"dtype": "float32", "weight_version": "v1", **LAYOUTS[name], **more}
    if draft == "a layer":
        settings |= {"speculative_algorithm": "NEXTN"}
    elif draft is not None:
        path = folder if draft.endswith("experts") else small
        settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(path)}
    engine = ParallelHarness(folder, **settings)
    assert engine.control(GetStateReqInput).data["batch_invariant"]
    for drafting in draftings(engine) if draft is not None else []:
        drafting._choice = None
        assert drafting.runner.meets_groups == (draft != "a small model")
    return engine


def draftings(engine: ParallelHarness) -> list[ModelDrafting]:
    """Return what drafts on each rank."""
    found = [scheduler._steps._drafting for scheduler in engine.schedulers]
    assert all(isinstance(drafting, ModelDrafting) for drafting in found)
    return found  # type: ignore[return-value]


def requests() -> list[Sent]:
    """Return requests of which one group has more than the other, with and without grammars and lists."""
    common = {"temperature": 1.0, "ignore_eos": False}
    ways: list[dict[str, Any]] = [
        {"max_new_tokens": 14},
        {"max_new_tokens": 9, "temperature": 0.0},
        {"max_new_tokens": 20, "grammar": REGEX},
        {"max_new_tokens": 12, "allowed_token_ids": [40, 41, 42], "bad_word_ids": [[40], [41, 42]]},
        {"max_new_tokens": 1},
    ]
    rng = random.Random(5)
    lengths, groups = (3, 40, 17, 5, 9), (0, 0, 1, 0, 1)
    return [
        Sent(group, [rng.randrange(320) for _ in range(length)], common | way | {"sampling_seed": n})
        for n, (group, length, way) in enumerate(zip(groups, lengths, ways, strict=True))
    ]


def send(engine: ParallelHarness, sent: Sequence[Sent]) -> list[Result]:
    """Send requests to their groups, some of them later, then to the other group, where the first one has none."""
    rids = []
    for n, each in enumerate(sent):
        rids.append(submit(engine, each, each.group))
        if n % 2:
            engine.tick()
    engine.run()
    rids += [submit(engine, each, 1) for each in sent[:2]]
    engine.run()
    engine.check_idle()
    return [engine.results[rid] for rid in rids]


def submit(engine: ParallelHarness, each: Sent, group: int) -> str:
    return engine.submit(each.prompt, params=each.params, dp_rank=group, return_sampling_mask=True)


def differences(ours: Sequence[Result], theirs: Sequence[Result]) -> list[int]:
    """Return which results differ in any bit."""
    wrong = []
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        facts = [(each.token_ids, each.logprobs, each.mask, each.finished.reason) for each in (one, other)]
        if facts[0] != facts[1] or not np.array_equal(one.routes, other.routes):
            wrong.append(n)
    return wrong


def cases() -> list[Any]:
    """Return all layouts with all drafts, some of them for the gate."""
    return [
        pytest.param(name, draft, marks=() if (name, draft) in OFTEN else pytest.mark.full, id=f"{name}, {draft}")
        for name in LAYOUTS
        for draft in DRAFTS
    ]


@pytest.mark.parametrize(("name", "draft"), cases())
def test_groups_that_draft_answer_as_groups_that_do_not(
    name: str, draft: str, folders: list[Path], small: list[Path], plain: Callable[[str], list[Result]]
) -> None:
    want = plain(name)
    with start(folders[0], name, draft, small[0], chunked_prefill_size=16, speculative_num_steps=4) as engine:
        for drafting in draftings(engine):
            if draft == "a layer":  # a random layer is almost never right
                tell(drafting, [Ask(tuple(each.prompt)) for each in requests()], want[: len(requests())])
        assert differences(send(engine, requests()), want) == []
        for drafting in draftings(engine):
            assert drafting.counts.num_drafted > 10
            assert draft == "a small model" or drafting.counts.num_kept > 10


@pytest.mark.mutant
def test_a_layer_that_writes_the_models_kv_is_found(folders: list[Path], plain: Callable[[str], list[Result]]) -> None:
    with start(folders[0], "dp2", "a layer") as engine:
        for scheduler, drafting in zip(engine.schedulers, draftings(engine), strict=True):
            drafting.runner._attention = scheduler.runner.attention
        assert differences(send(engine, requests()), plain("dp2"))


def refreshed(engine: ParallelHarness, named: Named, num_tokens: int, draft: Named | None = None) -> Result:
    """Answer with a refresh at the first turn with `num_tokens` tokens or more; `draft` comes ten tokens later."""
    params = {"max_new_tokens": 50, "temperature": 0.8, "sampling_seed": 4}
    rid = engine.submit(PROMPT, params=params, dp_rank=0)
    until(engine, rid, num_tokens)
    assert engine.control(PauseGenerationReqInput, mode="in_place").success
    assert update(engine, named, None, "v2").success
    for _ in range(3):
        engine.tick()
    assert engine.control(ContinueGenerationReqInput).success
    if draft is not None:
        until(engine, rid, num_tokens + 10)
        assert update(engine, draft, DRAFT, "v2").success
    engine.run()
    engine.check_idle()
    return engine.results[rid]


def until(engine: ParallelHarness, rid: str, num_tokens: int) -> None:
    """Take turns until the request has `num_tokens` tokens."""
    engine.tick()
    req = engine.schedulers[0]._by_rid[rid]
    while len(req.output_ids) < num_tokens:
        engine.tick()


def update(engine: ParallelHarness, named: Named, target: Any, version: str) -> Any:
    assert begin(engine, target, weight_version=version).success
    came = bring(engine, named)
    assert came.success, came.message
    return end(engine)


@pytest.mark.parametrize("draft", ["a layer", "a small model with experts"])
def test_refreshes_of_the_model_and_of_its_draft_in_the_middle(draft: str, folders: list[Path]) -> None:
    """The draft comes with the model, or later and alone.  The other group has no request."""
    new = tensors_of(folders[1])
    with start(folders[0], "dp2", draft) as engine:
        got = refreshed(engine, new, 17, None if draft == "a layer" else new)
        states = [scheduler.runner.state.draft for scheduler in engine.schedulers]
        counts = draftings(engine)[0].counts
    (_, _, cut), (version, begins, ends) = got.versions
    assert (version, begins, ends) == ("v2", cut, 50) and cut >= 17
    assert counts.num_drafted > 20
    assert all(state is not None and state.weight_version == "v2" and not state.is_stale for state in states)
    with start(folders[0], "dp2") as engine:
        want = refreshed(engine, new, cut)
    assert got.versions == want.versions and differences([got], [want]) == []


@pytest.mark.full
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("seed", range(2))
def test_random_schedules_of_two_groups(seed: int, draft: str, folders: list[Path], small: list[Path]) -> None:
    """Requests come, are aborted, retracted and paused at random.  Each has the tokens that it has without drafts."""
    rng = random.Random(seed)
    sent = [
        Sent(
            rng.choice([0, 0, 1]),
            [rng.randrange(320) for _ in range(rng.randint(1, 30))],
            {"temperature": rng.choice([0.0, 1.0]), "sampling_seed": n, "max_new_tokens": rng.randint(1, 30)},
        )
        for n in range(30)
    ]
    with start(folders[0], "dp2") as engine:
        rids = [submit(engine, each, each.group) for each in sent]
        engine.run()
        want = [engine.results[rid] for rid in rids]
    pool = {"max_total_tokens": 130, "chunked_prefill_size": 16, "max_running_requests": 6, "context_length": 96}
    with start(folders[0], "dp2", draft, small[0], **pool) as engine:
        rids = []
        for each in sent:
            rids.append(submit(engine, each, each.group))
            for _ in range(rng.choice([0, 0, 1, 3])):
                engine.tick()
            if rng.random() < 0.15:
                engine.channel.inbox.append(AbortReqInput(rids=[rng.choice(rids)]))
            if rng.random() < 0.1:
                assert engine.control(PauseGenerationReqInput, mode=rng.choice(["in_place", "retract"])).success
                assert engine.control(ContinueGenerationReqInput).success
        engine.run()
        engine.check_idle()
        got = [engine.results[rid] for rid in rids]
        assert all(drafting.counts.num_drafted > 20 for drafting in draftings(engine))
    assert sum(result.finished.num_retractions for result in got) > 0
    num_whole = 0
    for ours, theirs in zip(got, want, strict=True):
        count = len(ours.token_ids)
        assert ours.token_ids == theirs.token_ids[:count] and ours.logprobs == theirs.logprobs[:count]
        num_whole += ours.finished.reason.type == "length"
    assert num_whole > 20


def test_a_draft_computes_nothing_while_generation_is_paused(folders: list[Path]) -> None:
    """Its weights may be under a write then.  Ranks of several groups take turns all the same."""
    with start(folders[0], "dp2", "a layer") as engine:
        rid = engine.submit(PROMPT, params={"max_new_tokens": 9}, dp_rank=0)
        engine.tick()
        assert len(engine.schedulers[0]._by_rid[rid].output_ids) == 1
        assert engine.control(PauseGenerationReqInput, mode="in_place").success
        seen: list[Any] = []
        for drafting in draftings(engine):
            drafting.runner.model = Noted(drafting.runner.model, seen)
        for _ in range(3):
            engine.tick()
        assert not seen
        assert engine.control(ContinueGenerationReqInput).success
        engine.run()
        assert (len(PROMPT), [len(PROMPT), 0]) in seen, "the draft computes the prompt in the turn after the pause"


def test_groups_bring_their_tokens_to_the_same_forwards(folders: list[Path]) -> None:
    """The group without requests runs as many forwards as the other one, with no rows."""
    with start(folders[0], "dp2", "a layer", speculative_num_steps=3) as engine:
        seen: list[list[Any]] = []
        for drafting in draftings(engine):
            seen.append([])
            drafting.runner.model = Noted(drafting.runner.model, seen[-1])
        engine.generate([PROMPT], {"max_new_tokens": 8}, dp_rank=1)
    own = [[count for count, _ in calls] for calls in seen]
    assert set(own[0]) == {0} and min(own[1]) > 0 and len(own[0]) == len(own[1]) > 6
    assert [told for _, told in seen[0]] == [told for _, told in seen[1]] == [[0, count] for count in own[1]]


class Noted:
    """A draft that notes how many rows a forward has, on this rank and in each group."""

    def __init__(self, model: Any, calls: list[Any]) -> None:
        self._model, self._calls = model, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, batch: Any, *rest: Any) -> torch.Tensor:
        self._calls.append((batch.num_tokens, batch.global_num_tokens))
        return self._model(batch, *rest)
