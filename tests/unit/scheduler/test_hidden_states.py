"""Hidden states that requests get of their tokens: batches, chunks, cached prefixes, retractions, drafts, refreshes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture.hidden_states import HiddenStates
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from rollout.core.sampling_params import SamplingParams
from rollout.scheduler import step
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.req import Req
from tests.drafters import KnownDrafter
from tests.late_loop import captured_loop  # noqa: F401
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness, Result

RANDOM = np.random.default_rng(7)
PROMPTS = [RANDOM.integers(2, 320, size=size).tolist() for size in (40, 3, 17, 61, 1)]
ALL = HiddenStatesParams(layers=(0, 1, 2, 3))
FINAL = HiddenStatesParams(layers=(3,))
NEW = 7
PARAMS = {"max_new_tokens": NEW, "temperature": 1.0, "sampling_seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


def states(result: Result) -> HiddenStates:
    assert result.finished is not None and result.finished.hidden_states is not None
    rows = result.finished.hidden_states
    spans = [(span.version, span.start, span.end) for span in rows.versions]
    return HiddenStates.of_bytes(rows.data, rows.dtype, rows.shape, range(rows.shape[1]), rows.start, spans)


def generate(
    harness: Harness, prompts: Sequence[list[int]] = PROMPTS, wanted: HiddenStatesParams | None = ALL, **fields: Any
) -> list[Result]:
    return harness.generate(list(prompts), PARAMS, hidden_states=wanted, **fields)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    """Return the results of each prompt alone, without a cache."""
    harness = Harness(folder, disable_radix_cache=True)
    return [generate(harness, [prompt])[0] for prompt in PROMPTS]


def same(got: Sequence[Result], want: Sequence[Result]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
        assert len(states(ours)) == len(ours.prompt_ids) + len(ours.token_ids) - 1
        assert states(ours).raw_TLD.tobytes() == states(theirs).raw_TLD.tobytes()


def test_the_bits_depend_on_neither_batch_nor_chunks_nor_cache(folder: Path, alone: list[Result]) -> None:
    together = Harness(folder)
    same(generate(together), alone)
    same(generate(together), alone)  # their prompts are in the cache
    in_chunks = Harness(folder, chunked_prefill_size=7, max_running_requests=3, max_total_tokens=100)
    got = generate(in_chunks)
    same(got, alone)
    for harness in (together, in_chunks):
        harness.check_idle()


def test_rows_in_bfloat16_are_the_bits_of_the_model(folder: Path) -> None:
    small = Harness(folder, dtype="bfloat16", chunked_prefill_size=7, max_total_tokens=100)
    single = Harness(folder, dtype="bfloat16", disable_radix_cache=True)
    want = [generate(single, [prompt])[0] for prompt in PROMPTS]
    same(generate(small), want)
    assert {states(result).dtype for result in want} == {"bfloat16"}


def test_a_retraction_keeps_rows_and_makes_the_others(folder: Path, alone: list[Result]) -> None:
    harness = Harness(folder, chunked_prefill_size=16)
    rids = [harness.submit(prompt, params=PARAMS, hidden_states=ALL) for prompt in PROMPTS]
    for _ in range(9):
        harness.tick()
        harness.scheduler.retract(harness.scheduler.queues.holding_kv())
    harness.run()
    got = [harness.results[rid] for rid in rids]
    same(got, alone)
    assert max(result.finished.num_retractions for result in got if result.finished) > 1


def test_asking_for_states_changes_nothing_else(folder: Path, alone: list[Result]) -> None:
    """Tokens, log-probabilities and routes are the same bits with states, with final ones alone, and without."""
    for wanted in (FINAL, None):
        for ours, theirs in zip(generate(Harness(folder), wanted=wanted), alone, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
            assert ours.routes.tobytes() == theirs.routes.tobytes()
            if wanted is not None:
                assert states(ours).raw_TLD.tobytes() == states(theirs).raw_TLD[:, 3:].tobytes()
    assert ours.finished is not None and ours.finished.hidden_states is None


def test_layers_come_in_the_order_of_the_request(folder: Path, alone: list[Result]) -> None:
    """Requests of one batch want other layers, or none."""
    harness = Harness(folder)
    orders: list[tuple[int, ...] | None] = [(2, 0), (3, 1), None, (1,), (0,)]
    rids = [
        harness.submit(prompt, params=PARAMS, hidden_states=order and HiddenStatesParams(layers=order))
        for prompt, order in zip(PROMPTS, orders, strict=True)
    ]
    harness.run()
    for rid, order, theirs in zip(rids, orders, alone, strict=True):
        record = harness.results[rid].finished
        assert record is not None and (record.hidden_states is None) == (order is None)
        if order is not None:
            assert states(harness.results[rid]).raw_TLD.tobytes() == states(theirs).raw_TLD[:, list(order)].tobytes()


@pytest.mark.parametrize("start", [1, 20, 39, 40])
def test_rows_begin_at_a_position_and_the_cache_serves_the_tokens_before(
    folder: Path, alone: list[Result], start: int
) -> None:
    harness = Harness(folder)
    generate(harness, PROMPTS[:1], None)
    (result,) = generate(harness, PROMPTS[:1], HiddenStatesParams(layers=ALL.layers, start=start))
    record = result.finished
    assert record is not None and record.cached_tokens == min(start, 39)
    assert states(result).start == start
    assert states(result).raw_TLD.tobytes() == states(alone[0]).raw_TLD[start:].tobytes()


def test_rows_of_cached_tokens_would_be_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: the cache skips tokens whose rows are wanted."""
    harness = Harness(folder)
    generate(harness, PROMPTS[:1], None)
    monkeypatch.setattr(Req, "matchable_len", property(lambda self: self.num_tokens - 1))
    with pytest.raises(AssertionError, match="rows of hidden states are missing"):
        generate(harness, PROMPTS[:1])


def test_a_scored_prompt_has_a_row_of_every_token(folder: Path, alone: list[Result]) -> None:
    harness = Harness(folder)
    for prompt, theirs in zip(PROMPTS, alone, strict=True):
        (result,) = harness.generate([prompt], {"max_new_tokens": 0}, hidden_states=ALL)
        assert len(states(result)) == len(prompt)
        assert states(result).raw_TLD.tobytes() == states(theirs).raw_TLD[: len(prompt)].tobytes()


def test_each_sample_of_a_prompt_has_its_rows(folder: Path, alone: list[Result]) -> None:
    harness, prompt = Harness(folder), PROMPTS[2]
    message = TokenizedGenerateReqInput(
        rid="a",
        input_ids=prompt,
        sampling_params=SamplingParams(n=3, ignore_eos=True, **PARAMS),
        return_logprob=True,
        hidden_states=ALL,
        siblings=[("b", 5), ("c", 9)],
    )
    harness.results |= {rid: Result(rid, prompt) for rid in "abc"}
    harness.channel.inbox.append(message)
    harness.run()
    same([harness.results["a"], harness.results["b"]], [alone[2]] * 2)
    other = harness.results["c"]
    (again,) = harness.generate(
        [prompt + other.token_ids[:-1]], {"max_new_tokens": 0}, hidden_states=ALL, return_logprob=False
    )
    assert states(other).raw_TLD.tobytes() == states(again).raw_TLD.tobytes(), "a row of each token that was sampled"


@pytest.mark.parametrize("kind", ["mixed", "right", "wrong"])
def test_only_kept_tokens_of_drafts_have_rows(folder: Path, alone: list[Result], kind: str) -> None:
    outputs = {tuple(result.prompt_ids): result.token_ids for result in alone}
    harness = Harness(folder, speculative_algorithm="NGRAM")
    harness.scheduler._steps._drafting = Drafting(KnownDrafter(outputs, 320, kind), None, 320, 4)
    same(generate(harness), alone)
    counts = harness.scheduler._steps.draft_counts
    assert counts.num_drafted > 0 and (kind != "right" or counts.num_kept == counts.num_drafted)


def test_rows_of_dropped_drafts_would_be_noticed(
    folder: Path, alone: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant: all rows of a step enter the record."""

    def enter_all(parts: Any, epoch: Any) -> None:
        for req, _, rows in parts:
            req.output.hidden.append(rows, epoch)

    monkeypatch.setattr(step, "enter_hidden", enter_all)
    outputs = {tuple(result.prompt_ids): result.token_ids for result in alone}
    harness = Harness(folder, speculative_algorithm="NGRAM")
    harness.scheduler._steps._drafting = Drafting(KnownDrafter(outputs, 320, "wrong"), None, 320, 4)
    with pytest.raises(AssertionError):
        same(generate(harness), alone)


def test_rows_name_the_weights_that_made_them(folder: Path, tmp_path: Path, alone: list[Result]) -> None:
    """A pause that retracts, and a refresh in the middle: rows before it stay, the others are of the new weights."""
    harness = Harness(folder, chunked_prefill_size=16)
    rid = harness.submit(PROMPTS[0], params=PARAMS, hidden_states=ALL)
    harness.tick()
    harness.tick()
    assert harness.control(PauseGenerationReqInput, mode="retract").success
    other = tiny_checkpoint(tmp_path / "m", "moe_dense_first", seed=6)
    assert refresh(harness, logical_tensors(other), "v1").success
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    result = harness.results[rid]
    found = states(result)
    (old, first, seam), (new, again, end) = found.weight_versions
    assert (old, first, new, end) == ("default", 0, "v1", 40 + NEW - 1) and 0 < seam == again < 40
    assert found.raw_TLD[:seam].tobytes() == states(alone[0]).raw_TLD[:seam].tobytes()
    ids = PROMPTS[0] + result.token_ids[:-1]
    (fresh,) = Harness(other).generate([ids], {"max_new_tokens": 0}, hidden_states=ALL)
    assert found.raw_TLD[seam:].tobytes() == states(fresh).raw_TLD[seam:].tobytes()


def test_an_abort_keeps_the_rows_that_exist(folder: Path, alone: list[Result]) -> None:
    harness = Harness(folder, chunked_prefill_size=16)
    rids = [harness.submit(PROMPTS[0], params=PARAMS, hidden_states=ALL) for _ in range(2)]
    for turns, most in ((1, 39), (4, 46)):
        rid = rids.pop(0)
        for _ in range(turns):
            harness.tick()
        harness.channel.inbox.append(AbortReqInput(rids=[rid]))
        harness.tick()
        result = harness.results[rid]
        record = result.finished
        assert record is not None and record.reason.type == "abort"
        rows = 0 if record.hidden_states is None else len(states(result))
        assert rows <= most
        if result.token_ids:
            assert rows == 40 + len(result.token_ids) - 1
        if rows:
            assert states(result).raw_TLD.tobytes() == states(alone[0]).raw_TLD[:rows].tobytes()
    harness.run()
    harness.check_idle()


def test_a_request_that_never_ran_has_no_rows(folder: Path) -> None:
    harness = Harness(folder)
    rid = harness.submit(PROMPTS[0], params=PARAMS, hidden_states=ALL)
    harness.channel.inbox.append(AbortReqInput(rids=[rid]))
    harness.run()
    record = harness.results[rid].finished
    assert record is not None and record.hidden_states is None


def test_tokens_behind_an_end_have_no_rows(folder: Path, alone: list[Result]) -> None:
    """A step in flight may compute a token after the end."""
    stop = alone[0].token_ids[3]
    cut = alone[0].token_ids.index(stop) + 1
    harness = Harness(folder)
    (result,) = harness.generate(PROMPTS[:1], PARAMS | {"stop_token_ids": [stop]}, hidden_states=ALL)
    assert result.token_ids == alone[0].token_ids[:cut]
    assert states(result).raw_TLD.tobytes() == states(alone[0]).raw_TLD[: 40 + cut - 1].tobytes()
