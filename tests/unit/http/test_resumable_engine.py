"""Streams of a real engine that are cut and go on: over pauses, retractions and a refresh, with every row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.scheduler.records import RecordReader
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.streams import cut, events, joined, of_sample, plain, resumed

PROMPT = [5, 9, 2, 6, 5, 3, 5]
NUM_NEW = 200
SEEDED = {"temperature": 1.0, "top_k": 5, "sampling_seed": 11, "ignore_eos": True, "max_new_tokens": NUM_NEW}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=1, context_length=4096)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(
        folder, engine=EngineThread, max_total_tokens=4096, dtype="float32", enable_return_routed_experts=True
    ) as server:
        yield server
        assert server.scheduler.error is None


def body(rid: str, **params: Any) -> dict[str, Any]:
    return {
        "input_ids": PROMPT,
        "rid": rid,
        "sampling_params": SEEDED | params,
        "return_logprob": True,
        "top_logprobs_num": 1,
        "return_sampling_mask": True,
        "return_routed_experts": True,
        "routed_experts_format": "compact",
    }


def answers(live: Live, **params: Any) -> list[Any]:
    got = live.generate(**body("whole", **params))
    return [plain(each) for each in (got if isinstance(got, list) else [got])]


def record(sample: Any) -> Any:
    """Return what a stream and the answer of another request have in common: not its name, nor its cached tokens."""
    own = {"id", "cached_tokens", "num_retractions", "prefill_weight_versions"}
    return sample | {"meta_info": {name: value for name, value in sample["meta_info"].items() if name not in own}}


def disturb(live: Live, folder: Path, how: str) -> None:
    """Pause the engine while a stream has no reader, and do something meanwhile."""
    mode = "retract" if how == "retract" else "in_place"
    assert live.client.post("/pause_generation", json={"mode": mode}).json()["paused"]
    if how == "refresh":
        verb = {"model_path": str(folder), "flush_cache": False, "weight_version": "next"}
        assert live.client.post("/update_weights_from_disk", json=verb).json()["success"]
    assert live.client.post("/continue_generation", json={}).status_code == 200


@pytest.mark.parametrize("how", ["plain", "pause", "retract", "refresh"])
@pytest.mark.parametrize("stream_format", ["incremental", "cumulative"])
def test_a_cut_stream_has_the_rows_of_one_that_was_not_cut(
    live: Live, folder: Path, how: str, stream_format: str
) -> None:
    wanted = answers(live, n=2)
    rid = f"{how}-{stream_format}"
    got = cut(live, 5, **body(rid, n=2), resumable=True, stream_format=stream_format)
    if how != "plain":
        disturb(live, folder, how)
    counts = [of_sample(got, index)[-1]["meta_info"]["completion_tokens"] for index in range(2)]
    assert max(counts) < NUM_NEW, "nothing was left to resume"
    rest = resumed(live, rid, counts)
    for index in range(2):
        parts = of_sample([*got, *rest], index)
        sample = plain(joined(parts) if stream_format == "incremental" else parts[-1])
        kept = plain(of_sample(resumed(live, rid, 0), index)[-1])  # the whole record, asked for once more
        if stream_format == "incremental":
            kept = plain(joined(of_sample(resumed(live, rid, 0), index)))
        assert sample == kept
        versions = [span["version"] for span in sample["meta_info"]["weight_versions"]]
        if how == "refresh":
            assert versions[-1] == "next" and len(sample["output_ids"]) == NUM_NEW
        else:
            assert record(sample) == record(wanted[index])


def test_a_stream_goes_on_at_any_token(live: Live) -> None:
    got = list(events(live, **body("any"), stream=True, resumable=True, stream_format="incremental"))
    answer = plain(joined(got))
    for count in (0, 1, 2, 77, NUM_NEW - 1, NUM_NEW):
        rest = resumed(live, "any", count)
        part = plain(joined(rest))
        assert part["output_ids"] == answer["output_ids"][count:]
        for name in ("output_token_logprobs", "output_top_logprobs", "output_token_sampling_mask"):
            assert part["meta_info"][name] == answer["meta_info"][name][count:]
        first_row = len(PROMPT) + count - 1 if count else 0
        assert part["meta_info"]["routed_experts"] == answer["meta_info"]["routed_experts"][first_row:]


def test_rows_that_a_stream_sends_for_other_tokens_are_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong reader of records begins a row too late, as if the newest token had a row."""
    right = RecordReader._routes
    monkeypatch.setattr(
        RecordReader, "_routes", lambda self, req, slots, begin=0: right(self, req, slots, begin and begin + 1)
    )
    with pytest.raises((AssertionError, KeyError)):
        joined(list(events(live, **body("wrong"), stream=True, stream_format="incremental")))


# --- budgets -----------------------------------------------------------------------------------------------------


def test_a_budget_and_a_seed_go_on_where_an_earlier_request_stopped(live: Live) -> None:
    [answer] = answers(live)
    for count in (1, 60, NUM_NEW - 1):
        sent = body("rest") | {"input_ids": [*PROMPT, *answer["output_ids"][:count]], "prior_output_tokens": count}
        rest = live.generate(**sent)
        assert rest["output_ids"] == answer["output_ids"][count:]
        assert rest["meta_info"]["finish_reason"] == {"type": "length", "length": NUM_NEW - count}


@pytest.mark.parametrize(
    ("path", "fields", "get"),
    [
        ("/v1/completions", {"prompt": [*PROMPT, 7, 8], "max_tokens": 5}, lambda reply: reply["usage"]),
        ("/v1/completions", {"prompt": [*PROMPT, 7, 8]}, lambda reply: {"completion_tokens": 16 - 2}),
        ("/v1/chat/completions", {"input_ids": [*PROMPT, 7, 8], "max_tokens": 5}, lambda reply: reply["usage"]),
        (
            "/inference/v1/generate",
            {"token_ids": [*PROMPT, 7, 8], "sampling_params": {"max_tokens": 5, "ignore_eos": True}},
            lambda reply: {"completion_tokens": len(reply["choices"][0]["token_ids"])},
        ),
    ],
)
def test_every_door_counts_what_was_used_before(live: Live, path: str, fields: dict[str, Any], get: Any) -> None:
    extra = {} if "token_ids" in fields else {"ignore_eos": True}
    reply = live.client.post(path, json=fields | extra | {"prior_output_tokens": 2}).json()
    assert get(reply)["completion_tokens"] == (3 if "max_tokens" in str(fields) else 14)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prior_output_tokens": 7}, "the prompt has 7 tokens in all"),
        ({"prior_output_tokens": 2, "input_ids": None, "text": "abc"}, "send the prompt as input_ids"),
        ({"prior_output_tokens": 4, "sampling_params": {"max_new_tokens": 4}}, "there is nothing to resume"),
        ({"prior_output_tokens": 1, "sampling_params": {"presence_penalty": 0.5}}, "cannot count earlier output"),
        ({"prior_output_tokens": 1, "sampling_params": {"regex": "a+"}}, "would begin it anew"),
        ({"prior_output_tokens": [1, 1]}, "there is one prompt"),
        ({"prior_output_tokens": -1}, "greater than or equal to 0"),
    ],
)
def test_a_budget_that_cannot_be_counted_is_refused(live: Live, fields: dict[str, Any], words: str) -> None:
    status, message = live.refused(**{"input_ids": PROMPT} | fields)
    assert status == 400 and words in message


def test_each_sample_of_a_prompt_goes_on_with_its_own_seed(live: Live) -> None:
    """Sample i of a request with n samples has the seed plus i, before and after an interruption."""
    rest = {"input_ids": [*PROMPT, 7, 8, 9], "prior_output_tokens": 3, "sampling_params": SEEDED | {"n": 3}}
    samples = live.generate(**rest)
    for index, sample in enumerate(samples):
        own = SEEDED | {"sampling_seed": SEEDED["sampling_seed"] + index}
        assert live.generate(**rest | {"sampling_params": own})["output_ids"] == sample["output_ids"]
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3
