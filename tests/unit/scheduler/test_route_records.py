"""Rows of routes in a record are the choices of its tokens, whatever happens to the request.

Engines have two ranks, and their tokens are scattered unless a test sets another layout.  Each test plays the wrong
variant of a public engine and the right one; its number in the bug list B1 is in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capture.capturer import RoutedExpertsCapturer
from capture.slot_store import RouteSlotStore
from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.engine import build
from rollout.executor import model_runner
from rollout.layers.moe.router import TopKRouter
from rollout.scheduler.records import RecordReader
from rollout.scheduler.req import Req
from tests.late_loop import captured_loop  # noqa: F401
from tests.parallel_harness import ParallelHarness
from tests.routes_judge import EXPERTS, LAYERS, LAYOUTS, OneRank, decisive_checkpoint, moved_experts, prompt
from tests.scheduler_harness import Result

SCATTERED, WHOLE, BOTH = "tp2 all-to-all", "tp2", "dp2 of tp4 all-to-all"
PROMPTS = [prompt(7, 11), prompt(8, 2), prompt(9, 30), prompt(10, 5)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of old and new weights."""
    base = tmp_path_factory.mktemp("b1")
    return decisive_checkpoint(base / "old", 21), decisive_checkpoint(base / "new", 22)


@pytest.fixture(scope="module")
def judges(folders: tuple[Path, Path]) -> tuple[OneRank, OneRank]:
    return OneRank(folders[0]), OneRank(folders[1])


class Engines:
    """Engines on the old weights, and objections to their answers."""

    def __init__(self, folder: Path, judge: OneRank) -> None:
        self.folder, self.judge = folder, judge
        self.results: list[Result] = []

    def objections(
        self, prompts: Sequence[list[int]] = PROMPTS, num_new: int = 7, layout: str = SCATTERED, **settings: Any
    ) -> list[str]:
        """Return the objections to all prompts together, twice: the second time they are in the prefix cache."""
        with ParallelHarness(self.folder, **LAYOUTS[layout] | settings) as harness:
            self.results = [
                result for _ in range(2) for result in harness.generate(list(prompts), {"max_new_tokens": num_new})
            ]
            harness.check_idle()
        return [word for result in self.results for word in self.judge.objections(result, num_new)]


@pytest.fixture
def engines(folders: tuple[Path, Path], judges: tuple[OneRank, OneRank]) -> Engines:
    for ids in PROMPTS:
        judges[0].says(ids, 7)  # before anything is made wrong
    return Engines(folders[0], judges[0])


def routes_only(objections: list[str]) -> bool:
    """Return whether there are objections, all to rows: these bugs leave tokens and log-probabilities right."""
    return bool(objections) and all(" rows" in word for word in objections)


# --- 1, 3, 4: choices that were never shown ---------------------------------------------------------------------------


@pytest.fixture
def silent_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second MoE layer chooses and does not say."""
    show = TopKRouter.show

    def only_first(self: TopKRouter, logical_ids_TK: torch.Tensor, hooks: Any) -> None:
        if self.moe_layer == 0:
            show(self, logical_ids_TK, hooks)

    monkeypatch.setattr(TopKRouter, "show", only_first)


def test_1_3_and_4_a_layer_that_shows_nothing_is_an_error(engines: Engines, silent_layer: None) -> None:
    with pytest.raises(AssertionError, match=r"MoE layers \[1\] did not record"):
        engines.objections()


@pytest.mark.mutant
@pytest.mark.parametrize("value", [0, 113], ids=["zeros", "whatever was there"])
def test_1_3_and_4_a_capture_that_says_nothing_of_it_is_caught(
    engines: Engines, silent_layer: None, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(self: RoutedExpertsCapturer) -> torch.Tensor:
        assert self._rows_TLK is not None
        self._rows_TLK[:, sorted(self._absent)] = value
        return torch.as_tensor(self._rows_TLK)

    monkeypatch.setattr(RoutedExpertsCapturer, "finish_step", filled)
    assert routes_only(engines.objections())


# --- 6: rows that belong to other tokens ------------------------------------------------------------------------------

Rows = Callable[..., tuple[np.ndarray, np.ndarray]]


def with_rows(monkeypatch: pytest.MonkeyPatch, change: Callable[[Req, np.ndarray], np.ndarray]) -> None:
    """Patch the reader of records so that `change` changes the routes of each record."""
    rows: Rows = RecordReader._rows

    def changed(self: RecordReader, req: Req, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        routes, epochs = rows(self, req, *rest)
        return change(req, routes), epochs

    monkeypatch.setattr(RecordReader, "_rows", changed)


def shifted(req: Req, routes: np.ndarray) -> np.ndarray:
    return np.roll(routes, len(req.output_ids), axis=0)


def duplicated(req: Req, routes: np.ndarray) -> np.ndarray:
    return routes[np.minimum(np.arange(len(routes)), req.prompt_len - 1)]


def test_6_sglang_12162_rows_belong_to_their_tokens(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.objections() == []
    sequences = [result.prompt_ids + result.token_ids for result in engines.results[:4]]
    recorded = [result.routes for result in engines.results[:4]]
    assert engines.objections(sequences, num_new=1) == []  # as prompts: every row from one forward
    for scored, rows in zip(engines.results[:4], recorded, strict=True):
        assert np.array_equal(scored.routes[: len(rows)], rows)
    for wrong in (shifted, duplicated):
        with monkeypatch.context() as patch:
            with_rows(patch, wrong)
            assert routes_only(engines.objections()), wrong


# --- 7, 8, 11: buffers ------------------------------------------------------------------------------------------------


class BufferOf(RoutedExpertsCapturer):
    """A wrong capturer: its buffer has rows for the number of tokens that a step was expected to have."""

    rows = 0

    def record(self, moe_layer: int, logical_ids_TK: torch.Tensor) -> None:
        buffer_TK = torch.zeros(self.rows, self.top_k, dtype=torch.int64)
        buffer_TK[torch.arange(len(logical_ids_TK))] = logical_ids_TK
        super().record(moe_layer, buffer_TK[: len(logical_ids_TK)])


def test_7_sglang_26860_a_prompt_that_is_not_split_may_be_long(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"chunked_prefill_size": -1, "max_running_requests": 4}
    assert engines.objections([prompt(11, 400)], **whole) == []
    monkeypatch.setattr(model_runner, "RoutedExpertsCapturer", BufferOf)
    BufferOf.rows = max(-1, 4)  # of the two settings above
    with pytest.raises(IndexError):
        engines.objections([prompt(11, 400)], **whole)


def test_8_vllm_35744_every_kv_slot_has_a_row(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(12 + number, 20) for number in range(4)]
    assert engines.objections(prompts, max_total_tokens=64) == []
    slots: set[int] = set()
    write = RouteSlotStore.write

    def watch(self: RouteSlotStore, slots_T: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        slots.update(slots_T.tolist())
        write(self, slots_T, rows_TLK)

    with monkeypatch.context() as patch:
        patch.setattr(RouteSlotStore, "write", watch)
        assert engines.objections(prompts, max_total_tokens=64) == []
    assert slots == set(range(64))
    monkeypatch.setattr(
        build, "RouteSlotStore", lambda num_slots, *sizes: RouteSlotStore(num_slots - 8, *sizes)
    )  # of another group of layers, say
    with pytest.raises((IndexError, RuntimeError)):
        engines.objections(prompts, max_total_tokens=64)


class OneBuffer(RoutedExpertsCapturer):
    """A wrong capturer: the rows of every step are views of the same memory."""

    _memory: torch.Tensor | None = None

    def finish_step(self) -> torch.Tensor:
        rows_TLK = super().finish_step()
        if self._memory is None:
            self._memory = torch.empty(512, *rows_TLK.shape[1:], dtype=rows_TLK.dtype)
        return self._memory[: len(rows_TLK)].copy_(rows_TLK)


class NotesWithoutACopy(RouteSlotStore):
    """A wrong store: it keeps arrays uncopied until a read, and the next step does not wait."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def write(self, slots: torch.Tensor, rows_TLK: torch.Tensor) -> None:
        self._noted.append((slots, rows_TLK))

    def read(self, slots: np.ndarray) -> np.ndarray:
        for noted in self._noted:
            super().write(*noted)
        self._noted.clear()
        return super().read(slots)


def test_11_vllm_ascend_10727_no_step_overwrites_the_rows_of_another(
    engines: Engines,
    loop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert engines.objections(layout=WHOLE) == []
    monkeypatch.setattr(model_runner, "RoutedExpertsCapturer", OneBuffer)
    if loop != "sequential":
        assert routes_only(engines.objections(layout=WHOLE))
        return
    assert engines.objections(layout=WHOLE) == []  # a finished step's rows were copied
    monkeypatch.setattr(build, "RouteSlotStore", NotesWithoutACopy)
    assert routes_only(engines.objections(layout=WHOLE))


# --- 9, 10, 12: rows of KV that was there before, and of KV that was given up -----------------------------------------


def zero_prefix(req: Req, routes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(routes[: req.cached_tokens]), routes[req.cached_tokens :]])


def test_9_tpu_inference_3583_rows_of_a_reused_prompt_are_real(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engines.objections() == []
    assert sum(result.finished.cached_tokens for result in engines.results) >= 44  # type: ignore[union-attr]
    with_rows(monkeypatch, zero_prefix)
    assert routes_only(engines.objections())


PRESSED = {"max_total_tokens": 80, "layout": BOTH, "num_new": 24}


def only_recomputed(req: Req, routes: np.ndarray) -> np.ndarray:
    return routes if req.saved_rows is None else routes[len(req.saved_rows.epochs) :]


@pytest.mark.full
def test_10_vllm_39917_a_retraction_loses_no_rows(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(30 + number, 12) for number in range(10)]
    assert engines.objections(prompts, **PRESSED) == []  # type: ignore[arg-type]
    assert any(result.finished.num_retractions for result in engines.results)  # type: ignore[union-attr]
    with_rows(monkeypatch, only_recomputed)
    assert routes_only(engines.objections(prompts, **PRESSED))  # type: ignore[arg-type]


@pytest.fixture
def retracted(folders: tuple[Path, Path]) -> Iterator[Callable[[], tuple[Result, int]]]:
    def run() -> tuple[Result, int]:
        """Run a request of 20 tokens over a refresh; also return how many it had when it was retracted."""
        with ParallelHarness(folders[0], **LAYOUTS[BOTH], weight_version="v1") as harness:
            rid = harness.submit(PROMPTS[0], params={"max_new_tokens": 20}, dp_rank=1, stream=True)
            for _ in range(6):
                harness.tick()
            assert harness.control(PauseGenerationReqInput, mode="retract").success
            before = len(harness.results[rid].token_ids)
            path = {"model_path": str(folders[1]), "weight_version": "v2"}
            updated = harness.control(UpdateWeightsFromDiskReqInput, **path)
            assert updated.success, updated.message
            assert harness.control(ContinueGenerationReqInput).success
            harness.run()
            return harness.results[rid], before

    yield run


def pairs(result: Result, before: int, judges: tuple[OneRank, OneRank]) -> bool:
    """Return whether the first `before` tokens have rows and log-probabilities of old weights, later rows of new ones.

    The row of the last of those tokens was computed after the refresh, for nothing had consumed it.
    """
    rows_before = len(result.prompt_ids) + before - 1
    old = judges[0].says(result.prompt_ids, 20)
    new = judges[1].says(result.prompt_ids + result.token_ids, 1)
    assert result.token_ids[:before] == old.token_ids[:before]
    assert np.allclose(result.logprobs[:before], old.logprobs[:before], rtol=0, atol=1e-10)
    return np.array_equal(result.routes[:rows_before], old.routes[:rows_before]) and np.array_equal(
        result.routes[rows_before:], new.routes[rows_before : len(result.routes)]
    )


def test_12_miles_3277_rows_stay_with_their_log_probabilities(
    retracted: Callable[[], tuple[Result, int]], judges: tuple[OneRank, OneRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, before = retracted()
    assert 3 < before < 20 and len(result.token_ids) == 20
    assert result.versions == [("v1", 0, before), ("v2", before, 20)]
    assert pairs(result, before, judges)
    payload = result.finished.routed_experts  # type: ignore[union-attr]
    spans = [(span.version, span.start, span.end) for span in payload.versions]  # type: ignore[union-attr]
    rows = len(PROMPTS[0]) + before - 1
    assert spans == [("v1", 0, rows), ("v2", rows, len(PROMPTS[0]) + 19)]
    monkeypatch.setattr(RecordReader, "save_rows", lambda self, req: None)
    result, before = retracted()
    assert len(result.routes) == len(PROMPTS[0]) + 19  # complete, and of the wrong weights
    assert not pairs(result, before, judges)


# --- 32, 33: requests with rows --------------------------------------------------------------------------------------


def test_32_xtuner_1827_only_who_asks_gets_routes(
    folders: tuple[Path, Path], judges: tuple[OneRank, OneRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_routes() -> list[bool]:
        with ParallelHarness(folders[0], **LAYOUTS[BOTH]) as harness:
            rids = [
                harness.submit(ids, params={"max_new_tokens": 4}, return_routed_experts=number % 2 == 0)
                for number, ids in enumerate(PROMPTS)
            ]
            harness.run()
            results = [harness.results[rid] for rid in rids]
        assert not [word for result in results for word in judges[0].objections(result, 4)]
        return [result.finished.routed_experts is not None for result in results]  # type: ignore[union-attr]

    assert has_routes() == [True, False, True, False]
    routes = RecordReader._routes

    def everybody(self: RecordReader, req: Req, *rest: Any) -> Any:
        req.source.return_routed_experts = True
        return routes(self, req, *rest)

    monkeypatch.setattr(RecordReader, "_routes", everybody)
    assert has_routes() == [True] * 4


@pytest.mark.full
def test_33_trt_llm_17778_rows_are_of_logical_experts(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows [tokens - 1, MoE layers, K] hold logical ids, in any placement of the experts."""
    moved = moved_experts(5, 2)
    assert engines.objections(**moved) == []
    for result in engines.results:
        assert result.routes.shape == (len(result.prompt_ids) + 7 - 1, LAYERS, 3) and result.routes.max() < EXPERTS
    show = TopKRouter.show

    def slots(self: TopKRouter, logical_ids_TK: torch.Tensor, hooks: Any) -> None:
        show(self, self.placement.logical_to_physical(self.moe_layer, logical_ids_TK), hooks)

    monkeypatch.setattr(TopKRouter, "show", slots)
    assert routes_only(engines.objections(**moved))
