"""Scores of prompts: the same bits in any schedule, and in every form of an answer.

Shapes: T scored tokens, K likeliest ones at each place.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from capture.token_logprobs import TokenLogprobs
from rollout.client import ResponseFormatError, RolloutClient, ServerError, scoring
from rollout.core.errors import BadRequest, LockstepError
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from rollout.core.messages.req_output import (
    Alternatives,
    FinishedRecord,
    FinishReason,
    LogprobDelta,
    PromptLogprobs,
    ReqOutput,
    VersionSpan,
)
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.tokenizer_manager import response
from rollout.tokenizer_manager.sample import SampleRecord
from tests.alternatives import alternatives
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness, Result

WANTED = {"logprob_start_len": 2, "top_logprobs_num": 100, "token_ids_logprob": [5, 9, 0]}
SCORE = {"max_new_tokens": 0, "temperature": 0.7}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(root / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 250, 20).tolist()
    return [shared + rng.integers(1, 250, length).tolist() for length in (3, 40, 11, 60, 1)]


def scores(result: Result) -> tuple[Any, ...]:
    assert result.finished is not None and result.finished.prompt_logprobs is not None
    found = result.finished.prompt_logprobs
    assert len(found.values) == len(result.prompt_ids) - 2 and found.alternatives is not None
    assert len(found.alternatives.top_ids) == 4 * 100 * (len(found.values) - 1)
    return found.values, found.alternatives


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[tuple[Any, ...]]:
    return [scores(Harness(folders[0]).generate([prompt], SCORE, **WANTED)[0]) for prompt in prompts()]


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 7}, {"max_total_tokens": 128}], ids=str)
def test_scores_are_the_same_bits_in_any_schedule(
    folders: list[Path], alone: list[tuple[Any, ...]], settings: dict[str, Any]
) -> None:
    harness = Harness(folders[0], **settings)
    for _ in range(2):  # the second time with prefix hits
        assert [scores(result) for result in harness.generate(prompts(), SCORE, **WANTED)] == alone
    harness.check_idle()


def test_scores_survive_a_retraction(folders: list[Path], alone: list[tuple[Any, ...]]) -> None:
    harness = Harness(folders[0], chunked_prefill_size=16)
    rids = [harness.submit(prompt, params=SCORE, **WANTED) for prompt in prompts()]
    for _ in range(3):
        harness.tick()
    assert not all(harness.results[rid].finished for rid in rids)
    harness.control(PauseGenerationReqInput, mode="retract")
    harness.control(ContinueGenerationReqInput)
    harness.run()
    assert [scores(harness.results[rid]) for rid in rids] == alone
    assert sum(harness.results[rid].finished.num_retractions for rid in rids)  # type: ignore[union-attr]


def test_spans_say_which_weights_scored(folders: list[Path], alone: list[tuple[Any, ...]]) -> None:
    harness = Harness(folders[0], chunked_prefill_size=16)
    rid = harness.submit(prompts()[3], params=SCORE, **WANTED)
    for _ in range(2):
        harness.tick()
    harness.control(PauseGenerationReqInput, mode="in_place")
    answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folders[1]), weight_version="next")
    assert answer.success, answer
    harness.control(ContinueGenerationReqInput)
    harness.run()
    found = harness.results[rid].finished.prompt_logprobs  # type: ignore[union-attr]
    assert found is not None
    first, second = found.versions
    assert (first.version, first.start, second.version, second.end) == ("default", 1, "next", len(found.values))
    values, beside = alone[3]
    rows = (first.end - 1) * 100 * 4
    assert found.values[: first.end] == values[: first.end] and found.values[first.end] != values[first.end]
    assert found.alternatives.top_logprobs[:rows] == beside.top_logprobs[:rows]
    assert found.alternatives.top_logprobs[rows : rows + 400] != beside.top_logprobs[rows : rows + 400]


def test_output_tokens_have_the_same_alternatives_in_a_stream(folders: list[Path]) -> None:
    params = {"max_new_tokens": 9, "temperature": 1.0, "sampling_seed": 3}
    asked = {"top_logprobs_num": 20, "token_ids_logprob": [7]}
    whole, streamed = (Harness(folders[0]).generate(prompts(), params, stream=each, **asked) for each in (False, True))
    for ours, theirs in zip(whole, streamed, strict=True):
        assert (ours.token_ids, ours.top, ours.chosen) == (theirs.token_ids, theirs.top, theirs.chosen)
        assert len(ours.top) == len(ours.chosen) == 9 and {len(ids) for _, ids in ours.top} == {20}
        assert theirs.num_messages > 5


# --- forms of an answer ------------------------------------------------------------------------------------------


def a_record(dtype: type = np.float32, num_top: int = 3, vocab_size: int = 300) -> SampleRecord:
    """Return a record of five prompt tokens and two output tokens, with NaN and infinity among log-probabilities."""
    source = TokenizedGenerateReqInput(
        rid="r", input_ids=[1, 2, 3, 4, 5], sampling_params=SamplingParams(), return_logprob=True,
        logprob_start_len=1, top_logprobs_num=num_top, token_ids_logprob=[9, 8],
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def beside(count: int) -> Alternatives:
        values = -rng.random((count, num_top + 2)).astype(dtype)
        values.flat[0] = math.nan
        values.flat[-1] = -math.inf
        ids = rng.integers(0, vocab_size, (count, num_top)).astype("<i4")
        return Alternatives(
            dtype=np.dtype(dtype).name,  # type: ignore[arg-type]
            top_logprobs=values[:, :num_top].tobytes(), top_ids=ids.tobytes(),
            chosen_logprobs=values[:, num_top:].tobytes(),
        )  # fmt: skip

    record = SampleRecord(source, 0.0, "v")
    scored = -rng.random(3).astype(dtype)
    prompt = PromptLogprobs(
        start=1, values=[None, *scored.tolist()], alternatives=beside(3),
        versions=[VersionSpan("a", 1, 3), VersionSpan("b", 3, 4)],
    )  # fmt: skip
    for token in (6, 7):
        last = FinishedRecord(reason=FinishReason(type="length", length=2), prompt_logprobs=prompt)
        delta = LogprobDelta(values=(-rng.random(1).astype(dtype)).tolist(), alternatives=beside(1))
        count = len(record.output_ids) + 1
        record.append(
            ReqOutput(
                rid="r", token_ids=[token], num_output_tokens=count, weight_version="v", logprobs=delta,
                finished=last if token == 7 else None,
            ), 1.0,
        )  # fmt: skip
    return record


def meta_of(record: SampleRecord, **form: Any) -> dict[str, Any]:
    shape = response.RouteShape(8, 2, (0,), 1)
    return response.build_meta_info(record, response.ResponseForm(shape, **form), response.OutputEntries())


def nested(rows: TokenLogprobs, column: str) -> list[Any]:
    """Convert the arrays of a column to nested lists."""
    if column == "token":
        return [[value, token, None] for value, token in zip(rows.logprobs.tolist(), rows.token_ids.tolist())]
    values = rows.top_logprobs if column == "top" else rows.chosen_logprobs
    ids = rows.top_ids if column == "top" else np.broadcast_to(rows.chosen_ids, values.shape)
    return [[[v, i, None] for v, i in zip(*row)] for row in zip(values.tolist(), ids.tolist())]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_top", [0, 3])
def test_the_compact_form_says_what_the_nested_one_says(dtype: type, num_top: int) -> None:
    record = a_record(dtype, num_top)
    lists, compact = meta_of(record), meta_of(record, logprobs_format="compact", vocab_size=300)
    assert compact["logprobs_format"] == "compact" and "logprobs_format" not in lists
    for side, skipped in (("output", 0), ("input", 1)):
        rows = TokenLogprobs.decode_text(compact[f"{side}_logprobs"])
        assert rows.logprobs.dtype == dtype and rows.token_ids.dtype == np.uint16
        assert rows.start == (5 if side == "output" else 2)
        for column, name in (("token", "token_logprobs"), ("top", "top_logprobs"), ("chosen", "token_ids_logprobs")):
            if column == "top" and not num_top:
                assert f"{side}_{name}" not in lists and rows.top_ids.shape == (len(rows), 0)
                continue
            expected = lists[f"{side}_{name}"][skipped:]
            assert repr(nested(rows, column)) == repr(expected), name
            assert f"{side}_{name}" not in compact
    spans = [[each["version"], each["start"], each["end"]] for each in compact["input_logprob_weight_versions"]]
    assert spans == [["a", 0, 2], ["b", 2, 3]]
    assert msgspec.json.decode(response.encode_json(compact)) == compact | {"finish_reason": compact["finish_reason"]}


def test_a_large_vocabulary_has_wide_ids() -> None:
    compact = meta_of(a_record(vocab_size=70_000), logprobs_format="compact", vocab_size=70_000)
    assert TokenLogprobs.decode_text(compact["output_logprobs"]).top_ids.dtype == np.int32


def test_a_prompt_that_was_not_scored_has_no_record() -> None:
    record = a_record()
    record.finished = msgspec.structs.replace(record.finished, prompt_logprobs=None)
    compact = meta_of(record, logprobs_format="compact", vocab_size=300)
    assert compact["input_logprobs"] is None and compact["input_logprob_weight_versions"] == []


@pytest.mark.parametrize("lost", ["top_ids", "top_logprobs", "chosen_logprobs"])
def test_rows_that_got_lost_are_an_error(lost: str) -> None:
    record = a_record()
    delta = LogprobDelta(values=[-1.0], alternatives=Alternatives(dtype="float32", **{lost: b"\0" * 4}))
    with pytest.raises(LockstepError, match="another number"):
        record.append(ReqOutput(rid="r", token_ids=[1], num_output_tokens=3, weight_version="v", logprobs=delta), 1.0)


def test_the_helper_of_tests_makes_what_the_engine_makes() -> None:
    made = alternatives([([-1.0, -2.0], [5, 6])], [[-3.0]])
    assert np.frombuffer(made.top_logprobs, made.dtype).tolist() == [-1.0, -2.0]


# --- the client --------------------------------------------------------------------------------------------------


class Canned:
    """A server of 300 tokens whose answers give token `i` the log-probability `-i`."""

    def __init__(self, **wrong: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.wrong = wrong

    def client(self) -> RolloutClient:
        return RolloutClient("http://server", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        return httpx.Response(
            200, json=[self._sample(*each, body) for each in zip(body["input_ids"], body["logprob_start_len"])]
        )

    def _sample(self, ids: list[int], start: int, body: dict[str, Any]) -> dict[str, Any]:
        tokens, width = np.array(ids[start + 1 :], dtype=np.uint16), body["top_logprobs_num"]
        rows = TokenLogprobs(
            tokens, -tokens.astype(np.float32), np.tile(np.arange(width, dtype=np.uint16), (len(tokens), 1)),
            np.zeros((len(tokens), width), np.float32), np.array([], dtype=np.uint16),
            np.zeros((len(tokens), 0), np.float32), 300, start + 1,
        )  # fmt: skip
        meta = {
            "id": "r", "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(ids),
            "logprobs_format": "compact", "input_logprobs": rows.encode_text(),
            "output_logprobs": None,
            "input_logprob_weight_versions": [{"version": "v", "start": 0, "end": len(tokens)}],
        }  # fmt: skip
        return {"output_ids": [], "meta_info": meta | self.wrong}


def test_sequences_are_scored_in_calls_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [list(range(1, 2 + length)) for length in (4, 9, 1, 6, 30, 2)]
    server = Canned()
    results = server.client().score(sequences, start=[1, 3, 2, 1, 5, 1], top_k=2, concurrency=2)
    assert [len(body["input_ids"]) for body in server.bodies] == [2, 2, 2]
    assert all(body["logprobs_format"] == "compact" for body in server.bodies)
    for sequence, start, result in zip(sequences, [1, 3, 2, 1, 5, 1], results, strict=True):
        assert result.start == start and len(result) == len(sequence) - start
        assert result.logprobs.tolist() == [-token for token in sequence[start:]]
        assert result.top_ids.shape == result.top_logprobs.shape == (len(result), 2)
        assert [(span.version, span.start, span.end) for span in result.weight_versions] == [("v", 0, len(result))]
    server.bodies.clear()
    monkeypatch.setattr(scoring, "MAX_ENTRIES", 20)  # the long one goes alone
    server.client().score(sequences, top_k=2)
    assert [[len(ids) for ids in body["input_ids"]] for body in server.bodies] == [[5], [10, 2], [7], [31], [3]]
    server.bodies.clear()
    monkeypatch.setattr(scoring, "MAX_TOKENS", 12)
    server.client().score(sequences)
    assert [[len(ids) for ids in body["input_ids"]] for body in server.bodies] == [[5], [10, 2], [7], [31], [3]]
    assert server.client().score([]) == []


@pytest.mark.parametrize(
    ("sequences", "options"),
    [
        ([1, 2, 3], {}),
        ([[1, 2], [1]], {"start": 2}),
        ([[1, 2]], {"start": 0}),
        ([[1, 2]], {"start": [1, 1]}),
        ([[]], {}),
        ([[1, 2]], {"concurrency": 0}),
        ([[1, 2]], {"replay_routed_experts": []}),
        ([[1, 2]], {"temperature": math.nan}),
    ],
)
def test_what_cannot_be_scored_is_refused_before_it_is_sent(sequences: Any, options: dict[str, Any]) -> None:
    server = Canned()
    with pytest.raises(BadRequest):
        server.client().score(sequences, **options)
    assert not server.bodies


OTHER = Canned()._sample([1, 2, 4], 0, {"top_logprobs_num": 0})["meta_info"]["input_logprobs"]
WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "no record": ({"input_logprobs": None}, ResponseFormatError),
    "a damaged one": ({"input_logprobs": OTHER[:-8] + "AAAAAAA="}, ResponseFormatError),
    "one of other tokens": ({"input_logprobs": OTHER}, ResponseFormatError),
    "nested lists": ({"logprobs_format": None, "input_token_logprobs": [[None, 1, None]]}, ResponseFormatError),
    "an abort": ({"finish_reason": {"type": "abort", "message": "gone"}}, ServerError),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_wrong_is_an_error(case: str) -> None:
    wrong, error = WRONG[case]
    with pytest.raises(error) as caught:
        Canned(**wrong).client().score([[1, 2, 3]])
    assert 10 < len(str(caught.value)) < 300


def test_fewer_likely_tokens_than_asked_for_are_an_error() -> None:
    with pytest.raises(ResponseFormatError, match="0 top tokens at each position, expected 4"):
        Canned(
            input_logprobs=Canned()._sample([1, 2, 3], 0, {"top_logprobs_num": 0})["meta_info"]["input_logprobs"]
        ).client().score([[1, 2, 3]], top_k=4)
