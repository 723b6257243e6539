"""Streams in two forms, and streams that are asked for again from a token on, over a stand-in of the scheduler."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capture.token_logprobs import TokenLogprobs
from rollout.client import RolloutClient
from rollout.core.messages.io_struct import AbortReqInput, TokenizedGenerateReqInput
from rollout.core.messages.req_output import FinishedRecord, FinishReason, HiddenStatesRows
from rollout.core.sampling_params import SamplingParams
from rollout.http.native import resumable
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.sample import SampleRecord
from tests.http_harness import Live, live_server
from tests.streams import cut, events, joined, of_sample, plain, resumed

TEXT = "añ😀 b\u200d語!"
ROWS: dict[str, Any] = {
    "return_logprob": True,
    "top_logprobs_num": 2,
    "token_ids_logprob": [3, 4],
    "return_routed_experts": True,
    "routed_experts_format": "compact",
}


def body(rid: str, num_new: int = 30, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": num_new, "ignore_eos": True} | fields.pop("params", {})
    return {"text": TEXT, "rid": rid, "sampling_params": params} | ROWS | fields


def whole(live: Live, rid: str, **fields: Any) -> Any:
    answer = live.generate(**body(rid, **fields))
    return [plain(each) for each in answer] if isinstance(answer, list) else plain(answer)


@pytest.fixture(autouse=True)
def _waits_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "SWEEP_S", 0.02)


# --- the incremental form ----------------------------------------------------------------------------------------

NO_LOGPROBS: dict[str, Any] = {"return_logprob": False, "top_logprobs_num": 0, "token_ids_logprob": None}


@pytest.mark.parametrize("fields", [{}, {"routed_experts_start_len": 3}, NO_LOGPROBS])
def test_an_incremental_stream_adds_up_to_the_answer(live: Live, fields: dict[str, Any]) -> None:
    got = list(events(live, **body("a", **fields), stream=True, stream_format="incremental"))
    assert len(got) > 5
    assert plain(joined(got)) == whole(live, "a", **fields)


def test_an_incremental_stream_of_several_samples(live: Live) -> None:
    got = list(events(live, **body("a", params={"n": 2}), stream=True, stream_format="incremental"))
    answers = whole(live, "a", params={"n": 2})
    assert [plain(joined(of_sample(got, index))) for index in range(2)] == answers


def test_a_stop_string_is_cut_off_in_an_incremental_stream(live: Live) -> None:
    fields: dict[str, Any] = {"params": {"stop": ["b\u200d語"]}}
    got = list(events(live, **body("a", **fields), stream=True, stream_format="incremental"))
    answer = whole(live, "a", **fields)
    assert "".join(part["text"] for part in got) == answer["text"] == "añ😀 "


def test_compact_log_probabilities_of_a_part_say_where_they_begin(live: Live) -> None:
    got = list(events(live, **body("a", logprobs_format="compact"), stream=True, stream_format="incremental"))
    for part in got:
        meta = part["meta_info"]
        columns = TokenLogprobs.decode_text(meta["output_logprobs"])
        assert columns.start == meta["prompt_tokens"] + meta["output_start"]
        assert columns.token_ids.tolist() == part["output_ids"]


# --- from token k ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"params": {"stop": ["!a"]}}, {"params": {"skip_special_tokens": False}}])
def test_a_stream_goes_on_at_every_token(live: Live, fields: dict[str, Any]) -> None:
    sent = body("k", extra_key="slow", num_new=20, **fields)
    uncut = list(events(live, **sent, stream=True, resumable=True, stream_format="incremental"))
    answer = plain(joined(uncut))
    assert answer == whole(live, "k", num_new=20, **fields)
    ends = [0] + [part["meta_info"]["completion_tokens"] for part in uncut]
    assert len(ends) > 8
    for number, end in enumerate(ends):
        rest = resumed(live, "k", end)
        assert rest[-1]["meta_info"]["finish_reason"] is not None
        assert plain(joined([*uncut[:number], *rest])) == answer, end


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream_format", ["cumulative", "incremental"])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_cut_stream_equals_one_that_was_not_cut(live: Live, n: int, stream_format: str, at: int) -> None:
    fields: dict[str, Any] = {"params": {"n": n}, "num_new": 16}
    rid = f"{n}{stream_format}{at}"
    got = cut(live, at, **body(rid, extra_key="slow", **fields), resumable=True, stream_format=stream_format)
    counts = [0] * n
    for event in got:
        counts[event.get("index", 0)] = event["meta_info"]["completion_tokens"]
    rest = resumed(live, rid, counts)
    answers = whole(live, rid, **fields)
    for index, answer in enumerate(answers if n > 1 else [answers]):
        parts = of_sample([*got, *rest], index)
        if stream_format == "incremental":
            assert plain(joined(parts)) == answer
        else:
            assert plain(parts[-1]) == answer
            assert [len(part["output_ids"]) for part in parts] == sorted(len(part["output_ids"]) for part in parts)
            assert all(part["output_ids"] == answer["output_ids"][: len(part["output_ids"])] for part in parts)


def test_a_cumulative_stream_begins_beyond_the_tokens_that_the_client_has(live: Live) -> None:
    list(events(live, **body("a", num_new=9), stream=True, resumable=True))
    assert [len(each["output_ids"]) for each in resumed(live, "a", 3)] == [9]
    assert [len(each["output_ids"]) for each in resumed(live, "a", 9)] == [9]  # its end was perhaps not seen


def test_a_stream_is_kept_after_its_end_and_after_a_second_loss(live: Live) -> None:
    count = cut(live, 2, **body("a", extra_key="slow"), resumable=True)[-1]["meta_info"]["completion_tokens"]
    for _ in range(2):
        stream = events(live, "/generate/resume", rid="a", from_token=count)
        event = next(stream)
        assert len(event["output_ids"]) > count
        count = len(event["output_ids"])
        stream.close()
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    assert resumed(live, "a", 0)[-1]["meta_info"]["completion_tokens"] == 30


def test_an_abort_ends_a_stream_that_nobody_reads(live: Live) -> None:
    got = cut(live, 2, **body("a", extra_key="slow"), resumable=True, stream_format="incremental")
    live.client.post("/abort_request", json={"rid": "a"})
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    rest = resumed(live, "a", got[-1]["meta_info"]["completion_tokens"])
    assert rest[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert joined([*got, *rest])["output_ids"]


def test_a_failed_stream_says_so_to_its_next_reader(live: Live) -> None:
    cut(live, 2, **body("a", extra_key="slow"), resumable=True)
    live.scheduler.misreport = True
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    live.scheduler.misreport = False
    [error] = resumed(live, "a", 0)
    assert "tokens were made" in error["error"]["message"]


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"resumable": True}, "need stream: true"),
        ({"stream_format": "incremental"}, "need stream: true"),
        ({"resumable": True, "stream": True, "rid": None}, "needs a rid of its own"),
        ({"resumable": True, "stream": True, "rid": ["a"], "text": ["b"]}, "needs a rid of its own"),
    ],
)
def test_a_stream_that_cannot_be_resumed_is_refused(live: Live, fields: dict[str, Any], words: str) -> None:
    status, message = live.refused(**{"text": "a", "rid": "a"} | fields)
    assert status == 400 and words in message


@pytest.mark.parametrize(
    ("rid", "from_token", "status", "words"),
    [
        ("nobody", 0, 404, "Send the request again"),
        ("plain", 0, 404, "it was not resumable"),
        ("a", 10, 400, "from_token is 10, but sample 0 has 9 tokens so far"),
        ("a", [0, 0], 400, "from_token has 2 entries for 1 samples"),
        ("a", [], 400, "from_token has 0 entries for 1 samples"),
        ("a", -1, 400, "greater than or equal to 0"),
    ],
)
def test_what_is_not_there_cannot_be_resumed(live: Live, rid: str, from_token: Any, status: int, words: str) -> None:
    list(events(live, **body("a", num_new=9), stream=True, resumable=True))
    list(events(live, **body("plain", num_new=2), stream=True))
    assert live.refused("/generate/resume", rid=rid, from_token=from_token)[0] == status
    assert words in live.refused("/generate/resume", rid=rid, from_token=from_token)[1]


def test_the_last_reader_takes_a_stream_over(live: Live) -> None:
    first = events(live, **body("a", extra_key="slow"), stream=True, resumable=True)
    next(first)
    second = resumed(live, "a", 0)
    assert second[-1]["meta_info"]["completion_tokens"] == 30
    *_, error = first
    assert error["error"]["code"] == 409 and "a stream has one reader" in error["error"]["message"]
    assert resumed(live, "a", 30)[-1]["output_ids"] == second[-1]["output_ids"]  # it is still kept


def test_a_name_in_flight_is_not_taken_again_and_an_ended_one_is(live: Live) -> None:
    cut(live, 1, **body("a", extra_key="slow"), resumable=True)
    assert "already in flight" in live.refused(**body("a", stream=True, resumable=True))[1]
    assert resumed(live, "a", 0)[-1]["meta_info"]["completion_tokens"] == 30
    list(events(live, **body("a", num_new=3), stream=True, resumable=True))
    assert resumed(live, "a", 0)[-1]["meta_info"]["completion_tokens"] == 3


# --- limits ------------------------------------------------------------------------------------------------------


def held(live: Live, rids: list[str]) -> list[str]:
    """Return which of the streams are known."""
    found = []
    for rid in rids:
        answer = live.client.post("/generate/resume", json={"rid": rid, "from_token": 10**6})
        assert answer.status_code in (400, 404)
        found += [rid] if answer.status_code == 400 else []
    return found


def is_held(live: Live, rid: str) -> bool:
    return held(live, [rid]) == [rid]


def test_a_stream_without_a_reader_is_aborted_after_a_while(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "KEPT_S", 0.1)
    stream = events(live, **body("late", extra_key="slow", num_new=140), stream=True, resumable=True)
    next(stream)
    stream.close()
    live.wait_until(lambda: live.manager.num_in_flight == 0)
    assert any("late" in message.rids for message in live.sent(AbortReqInput))
    assert held(live, ["late"]) == []


def test_too_many_streams_without_a_reader_are_forgotten_the_oldest_first(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(events(live, **body("sent", num_new=2), stream=True, resumable=True))
    monkeypatch.setattr(resumable, "MAX_KEPT_SAMPLES", 2)
    names = ["c0", "c1", "c2"]
    for name in names:
        cut(live, 1, **body(name, extra_key="slow", num_new=140), resumable=True)
        live.wait_until(functools.partial(is_held, live, name))
    live.wait_until(lambda: held(live, ["sent", *names]) == ["c1", "c2"])
    live.wait_until(lambda: any("c0" in message.rids for message in live.sent(AbortReqInput)))
    live.client.post("/abort_request", json={"abort_all": True, "rid": ""})


def test_streams_without_a_reader_hold_so_many_bytes(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(live, 1, **body("big", extra_key="slow", num_new=140), resumable=True)
    assert held(live, ["big"]) == ["big"]
    monkeypatch.setattr(resumable, "MAX_KEPT_BYTES", 5000)
    live.wait_until(lambda: held(live, ["big"]) == [])
    live.wait_until(lambda: live.manager.num_in_flight == 0)


def test_a_stream_over_the_limit_alone_takes_no_other_with_it(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    list(events(live, **body("small", num_new=2), stream=True, resumable=True))
    small = measured([record_of(8)])
    monkeypatch.setattr(resumable, "MAX_KEPT_BYTES", 4 * small)
    list(events(live, **body("large", num_new=140), stream=True, resumable=True))
    live.wait_until(lambda: held(live, ["small", "large"]) == ["small"])


def test_a_connection_that_hangs_after_it_was_taken_over_keeps_no_stream_alive() -> None:
    async def scene() -> None:
        streams = resumable.ResumableStreams()
        stream = streams.begin("r", handle_of([record_of(4)]), is_incremental=False)
        first = stream.reader
        streams.resume("r", 0)
        streams.leave(stream, first)
        assert streams.kept == [], "the second reader is there"
        again, _ = streams.resume("r", 0)  # while the second one hangs
        streams.leave(again, stream.reader)
        assert streams.kept == [stream]

    asyncio.run(scene())


def handle_of(records: list[SampleRecord]) -> GenerateHandle:
    form: Any = None
    return GenerateHandle(records, replies_with_list=True, tokenizer=None, form=form, abort=lambda rids: None)


def record_of(num_prompt: int, **fields: Any) -> SampleRecord:
    return SampleRecord(TokenizedGenerateReqInput(input_ids=[1] * num_prompt, **RECORD | fields), 0.0, "v")


RECORD: dict[str, Any] = {"rid": "r", "sampling_params": SamplingParams()}


def measured(records: list[SampleRecord]) -> int:
    stream = resumable.ResumableStream("r", handle_of(records), is_incremental=False)
    stream.measure()
    return stream.num_bytes


def test_the_bytes_of_a_stream_count_hidden_states_and_shared_prompts_once() -> None:
    few = measured([record_of(10)])
    with_states = record_of(10)
    rows = HiddenStatesRows(data=bytes(10**6), dtype="float32", shape=(1, 1, 250_000), start=0)
    with_states.finished = FinishedRecord(reason=FinishReason(type="length", length=1), hidden_states=rows)
    assert measured([with_states]) >= few + 10**6
    source = TokenizedGenerateReqInput(input_ids=[1] * 10_000, siblings=[("s", 1), ("t", 2)], **RECORD)
    group = [SampleRecord(each, 0.0, "v") for each in source.samples()]
    one = measured(group[:1])
    assert one > 10_000 * 36 and measured(group) < one + 3 * few, "the samples hold one list of ids"
    wide = SamplingParams(logit_bias=dict.fromkeys(range(4096), 1.0), stop=["x" * 1000] * 32)
    assert measured([record_of(10, sampling_params=wide)]) > few + 4096 * 60 + 32_000


def test_many_clients_that_leave_at_once_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_KEPT_SAMPLES", 8)
    names = [f"m{number}" for number in range(40)]
    threads = [
        threading.Thread(target=cut, args=(live, 1), kwargs=body(name, extra_key="slow") | {"resumable": True})
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.wait_until(lambda: len(held(live, names)) <= 8)
    live.wait_until(lambda: live.manager.num_in_flight == 0)


# --- the server's default ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglangs(folder: Path) -> Iterator[Live]:
    """Serve with SGLang's flag: streams are incremental unless their request names a form."""
    with live_server(folder, incremental_streaming_output=True) as server:
        yield server


@pytest.mark.parametrize("fields", [{}, {"return_sampling_mask": None}, {"resumable": True}])
def test_a_flag_makes_streams_incremental(sglangs: Live, fields: dict[str, Any]) -> None:
    """The first request is read as a plain one, the others in full."""
    short = {"input_ids": [40, 41, 42], "rid": "s", "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    got = list(events(sglangs, **short, **fields, stream=True))
    assert [token for event in got for token in event["output_ids"]] == [40, 41, 42] * 3
    assert all("output_start" in event["meta_info"] for event in got)
    if fields.get("resumable"):
        (rest,) = resumed(sglangs, "s", 7)
        assert rest["output_ids"] == [41, 42] and rest["meta_info"]["output_start"] == 7
    assert sglangs.generate(**short)["output_ids"] == [40, 41, 42] * 3, "an answer that is no stream is whole"


def test_a_request_chooses_its_form_whatever_the_default(sglangs: Live, live: Live) -> None:
    for server in (sglangs, live):
        for form in ("cumulative", "incremental"):
            got = list(events(server, **body("f", num_new=4), stream=True, stream_format=form))
            assert all(("output_start" in event["meta_info"]) == (form == "incremental") for event in got)
    with RolloutClient(sglangs.url) as client:
        *_, last = client.stream(None, input_ids=[40, 41], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        assert last.output_ids == [40, 41, 40, 41]
