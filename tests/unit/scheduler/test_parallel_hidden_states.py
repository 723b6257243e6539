"""Hidden states, and heads and pooling, on several ranks: the rows of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.pooling import PoolingParams
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.scheduler.hidden_rows import HiddenRows
from rollout.scheduler.scheduler import Scheduler
from tests.head_zoo import headed_checkpoint
from tests.late_loop import overlap
from tests.model_zoo import tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17, list(range(100, 107)), [250, 2, 2, 9]]
DP2 = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "dp2 of tp2": DP2 | {"ep_size": 2},
    "two replicas": {"dp_size": 2},
    "tp2 ep2": {"tp_size": 2, "ep_size": 2},
    "tp2 all-to-all": {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "dp2 all-to-all": DP2 | {"ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "dp2 of tp4 all-to-all": {
        "tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4, "moe_a2a_backend": "all_to_all",
    },
}  # fmt: skip
IN_GATE = ("tp2", "dp2 of tp2")
LAYERS = HiddenStatesParams(layers=(0, 2, 3, 1))
POOLED = [PoolingParams(kind=kind) for kind in ("last", "mean", "cls", "all")]
SCORED = [PoolingParams(scores=True), PoolingParams(kind="all", scores=True)]
SIZE = 48
CLOSE = {"rtol": 0.0, "atol": 1e-10}  # float64; steps of other sizes round the last bits in another way


def layouts(in_gate: Sequence[str] = IN_GATE) -> Any:
    names = [pytest.param(name, marks=() if name in in_gate else pytest.mark.full) for name in LAYOUTS]
    return pytest.mark.parametrize("name", names)


# --- hidden states -----------------------------------------------------------------------------------------------


def rows_of(result: Result) -> np.ndarray:
    assert result.finished is not None and result.finished.hidden_states is not None
    rows = result.finished.hidden_states
    assert rows.dtype == "float64"
    return np.frombuffer(rows.data, "<f8").reshape(rows.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Result]:
    return Harness(folder, dtype="float64", num_threads=1).generate(
        PROMPTS, {"max_new_tokens": 6}, hidden_states=LAYERS
    )


@pytest.mark.parametrize("loop", ["sequential", pytest.param("late", marks=pytest.mark.full)])
@layouts()
def test_every_layout_gives_the_rows_of_one_rank(
    name: str, loop: str, folder: Path, expected: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second request wants none, so that ranks and steps differ in what they want."""
    if loop == "late":
        overlap(monkeypatch)
    with ParallelHarness(folder, chunked_prefill_size=16, **LAYOUTS[name]) as harness:
        for wanted in (lambda i: True, lambda i: i % 2 == 0, lambda i: i == 1):
            asked = [wanted(i) for i in range(len(PROMPTS))]
            rids = [
                harness.submit(
                    prompt,
                    params={"max_new_tokens": 6},
                    hidden_states=LAYERS if wants else None,
                    dp_rank=i % harness.num_dp_ranks,
                )
                for i, (prompt, wants) in enumerate(zip(PROMPTS, asked, strict=True))
            ]
            harness.run()
            for rid, want, wants in zip(rids, expected, asked, strict=True):
                got = harness.results[rid]
                assert got.token_ids == want.token_ids and np.allclose(got.logprobs, want.logprobs, **CLOSE)
                assert got.finished is not None and (got.finished.hidden_states is not None) == wants
                if wants:
                    np.testing.assert_allclose(rows_of(got), rows_of(want), **CLOSE)
        harness.check_idle()


def kept(harness: ParallelHarness) -> list[tuple[bool, dict[str, tuple[int, int]]]]:
    """Return of each rank whether it answers, and the rows and bytes that it keeps of each request."""

    def look(scheduler: Scheduler) -> tuple[bool, dict[str, tuple[int, int]]]:
        records = {req.rid: req.output.hidden for req in scheduler.queues.all()}
        sizes = {rid: (record.num_rows, len(record.data)) for rid, record in records.items() if record is not None}
        return scheduler.parallel.position.is_dp_leader, sizes

    return harness.on_each(look)


def require_one_keeper(harness: ParallelHarness) -> None:
    """Raise `AssertionError` unless all ranks count rows, and only the ones that answer keep their numbers."""
    sizes = kept(harness)
    answering: dict[str, tuple[int, int]] = {}
    for answers, of_rank in sizes:
        answering |= of_rank if answers else {}
    assert len(answering) == len(PROMPTS)
    for answers, of_rank in sizes:
        for rid, (num_rows, num_bytes) in of_rank.items():
            assert num_rows == answering[rid][0] > 0
            assert num_bytes == (num_rows * len(LAYERS.layers) * SIZE * 8 if answers else 0)


@pytest.mark.parametrize("name", [*IN_GATE, pytest.param("dp2 of tp4 all-to-all", marks=pytest.mark.full)])
def test_only_the_rank_that_answers_keeps_rows(name: str, folder: Path) -> None:
    with ParallelHarness(folder, chunked_prefill_size=128, **LAYOUTS[name]) as harness:
        for index, prompt in enumerate(PROMPTS):
            params = {"max_new_tokens": 20, "ignore_eos": True}
            harness.submit(prompt, params=params, hidden_states=LAYERS, dp_rank=index % harness.num_dp_ranks)
        for _ in range(5):
            harness.tick()
        require_one_keeper(harness)
        harness.run()
        harness.check_idle()


@pytest.mark.mutant
def test_a_rank_that_keeps_rows_in_vain_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = HiddenRows.__init__
    monkeypatch.setattr(HiddenRows, "__init__", lambda self, num_layers, answers: begin(self, num_layers))
    with ParallelHarness(folder, chunked_prefill_size=128, tp_size=2) as harness:
        for prompt in PROMPTS:
            harness.submit(prompt, params={"max_new_tokens": 20, "ignore_eos": True}, hidden_states=LAYERS)
        for _ in range(5):
            harness.tick()
        with pytest.raises(AssertionError):
            require_one_keeper(harness)
        harness.run()


# --- heads and pooling -------------------------------------------------------------------------------------------


def pool(harness: Harness, params: PoolingParams, prompts: list[list[int]] = PROMPTS) -> list[np.ndarray]:
    results = harness.generate(
        prompts, {"max_new_tokens": 0}, pooling=params, return_logprob=False, return_routed_experts=False
    )
    return [numbers(result) for result in results]


def numbers(result: Result) -> np.ndarray:
    record = result.finished
    assert record is not None and record.pooled is not None
    return np.frombuffer(record.pooled.data, "<f4").reshape(record.pooled.num_rows, -1)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of old and new weights."""
    base = tmp_path_factory.mktemp("classifiers")
    for name, seed in (("old", 3), ("new", 8)):
        headed_checkpoint(base / name, "qwen3_moe", "ForSequenceClassification", seed=seed)
    return base / "old", base / "new"


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagger")
    headed_checkpoint(folder, "qwen3_moe", "ForTokenClassification")
    return folder


def one_rank(folder: Path) -> Harness:
    return Harness(folder, dtype="float64", num_threads=1, enable_return_routed_experts=False)


def several(folder: Path, name: str) -> ParallelHarness:
    return ParallelHarness(folder, chunked_prefill_size=16, enable_return_routed_experts=False, **LAYOUTS[name])


@layouts()
def test_heads_and_pooling_of_every_layout_give_the_numbers_of_one_rank(
    name: str, classifiers: tuple[Path, Path], tagger: Path
) -> None:
    """Numbers are computed in float64, and rounded to float32 in the answer: mostly the same bits."""
    for folder, kinds in ((classifiers[0], [*POOLED, SCORED[0]]), (tagger, SCORED[1:])):
        alone = one_rank(folder)
        with several(folder, name) as harness:
            for params in kinds:
                for got, want in zip(pool(harness, params), pool(alone, params), strict=True):
                    np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-10, err_msg=repr(params))
            harness.check_idle()


@layouts(IN_GATE[:1])
def test_a_refresh_carries_the_head_to_every_rank(name: str, classifiers: tuple[Path, Path]) -> None:
    old, new = classifiers
    before, after = (pool(one_rank(folder), SCORED[0]) for folder in classifiers)
    with several(old, name) as harness:
        for got, want in zip(pool(harness, SCORED[0]), before, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-10)
        answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(new), weight_version="v1")
        assert answer.success, answer.message
        for got, want in zip(pool(harness, SCORED[0]), after, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-10)
