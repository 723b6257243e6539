import base64
import math

import numpy as np
import pytest

from capture.codec import encode_compact, encode_compatible
from capture.routed_experts import RoutedExperts, missing_id
from capture.sampling_mask import SamplingMask
from rollout.client.errors import ResponseFormatError, ServerError
from rollout.client.generation import generate, generate_body, num_samples, parse_event
from rollout.client.sse import SseDecoder
from rollout.client.types import FinishReason, RouteLayout, TokenLogprob, VersionSpan
from rollout.client.wire import Reply, error_message
from rollout.core.errors import BadRequest
from tests.canned_server import json_response

LAYOUT = RouteLayout(num_hidden_layers=3, top_k=2, moe_layer_ids=(1, 2), num_experts=8)
OUTPUT_IDS = [11, 12, 13]
PROMPT_TOKENS = 4


def routes(num_rows=6, start=0):
    ids = np.argsort(np.random.default_rng(0).random((num_rows, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    return RoutedExperts(ids, 8, (1, 2), 3, start, (("v1", 0, num_rows),) if num_rows else ())


def compact(routed):
    return {
        "routed_experts": base64.b64encode(encode_compact(routed)).decode(),
        "routed_experts_format": "compact",
        "routed_experts_start_len": routed.start,
    }


def sample(reason=None, **meta):
    """Return a finished sample as the server writes it."""
    return {
        "text": "one two three",
        "output_ids": OUTPUT_IDS,
        "meta_info": {
            "id": "r1",
            "finish_reason": reason or {"type": "length", "length": 3},
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "weight_version": "v2",
            "weight_versions": [
                {"version": "v1", "start": 0, "end": 1},
                {"version": "v2", "start": 1, "end": 3, "weight_epoch": 7},
            ],
            **meta,
        },
    }


def answer(content, layout=None, prompt="hello", **options):
    """Return the client's result for an answer to a request with these options."""
    return generate(prompt, options, layout).parse(Reply(200, json_response(content).body))


# --- requests ----------------------------------------------------------------------------------------------------


def test_the_body_holds_what_was_given_and_nothing_else():
    body = generate_body(
        "hello",
        {
            "sampling_params": {"n": 2, "temperature": 0.5},
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_start_len": 1,
            "rid": "r1",
            "timeout": 3.0,
            "extra_body": {"custom": 1},
        },
    )
    assert body == {
        "text": "hello",
        "sampling_params": {"n": 2, "temperature": 0.5},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 1,
        "routed_experts_format": "compact",
        "rid": "r1",
        "custom": 1,
    }
    assert generate_body("hello", {}) == {"text": "hello"}


@pytest.mark.parametrize(
    "ids", [[[1, 2], [3]], ((1, 2), (3,)), [np.array([1, 2]), np.array([3])], [[np.int64(1), np.int64(2)], [3]]]
)
def test_ids_may_be_lists_tuples_or_arrays(ids):
    assert generate_body(None, {"input_ids": ids})["input_ids"] == [[1, 2], [3]]


def test_one_sequence_of_ids_as_an_array():
    body = generate_body(None, {"input_ids": np.arange(3)})
    assert body["input_ids"] == [0, 1, 2]
    assert num_samples(body) is None


@pytest.mark.parametrize(("prompt", "options"), [(None, {}), ("text", {"input_ids": [1]}), ("text", {"inputs": 1})])
def test_arguments_that_cannot_be_sent_are_refused(prompt, options):
    with pytest.raises(BadRequest):
        generate_body(prompt, options)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": "a"}, None),
        ({"text": "a", "sampling_params": {"n": 1}}, None),
        ({"text": "a", "sampling_params": {"n": 4}}, 4),
        ({"text": ["a"]}, 1),
        ({"input_ids": [1, 2]}, None),
        ({"input_ids": [[1], [2]], "sampling_params": {"n": 3}}, 6),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
    ],
)
def test_the_number_of_samples_follows_from_the_body(body, expected):
    assert num_samples(body) == expected


# --- answers -----------------------------------------------------------------------------------------------------


def test_every_field_of_a_sample():
    content = sample(
        reason={"type": "stop", "matched": 13},
        output_token_logprobs=[[-0.5, 11, None], [None, 12, None], [-1.5, 13, "three"]],
        output_top_logprobs=[[[-0.5, 11, None], [-0.9, 4, None]], None, [[-1.5, 13, None]]],
        output_token_ids_logprobs=[[[-3.0, 7, None]]] * 3,
        input_token_logprobs=[[None, 1, None], [-2.0, 2, None]],
        input_top_logprobs=[None, [[-2.0, 2, None]]],
        **compact(routes()),
    )
    output = answer(content, return_logprob=True, return_routed_experts=True)
    assert (output.rid, output.text, output.output_ids) == ("r1", "one two three", OUTPUT_IDS)
    assert output.finish_reason == FinishReason("stop", matched=13)
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (4, 3, 2)
    assert output.weight_version == "v2"
    assert output.weight_versions == [VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 3, 7)]
    assert output.logprobs[0] == -0.5
    assert math.isnan(output.logprobs[1])
    assert output.token_logprobs[2] == TokenLogprob(-1.5, 13, "three")
    assert output.top_logprobs == [[(-0.5, 11, None), (-0.9, 4, None)], None, [(-1.5, 13, None)]]
    assert output.chosen_logprobs == [[(-3.0, 7, None)]] * 3
    assert output.prompt_logprobs == [(None, 1, None), (-2.0, 2, None)]
    assert output.prompt_top_logprobs == [None, [(-2.0, 2, None)]]
    assert output.routed_experts == routes()
    assert output.meta_info == content["meta_info"]
    assert output.prompt_ids is None
    assert answer(content | {"prompt_token_ids": [1, 2, 3, 4]}, return_prompt_token_ids=True).prompt_ids == [1, 2, 3, 4]


def test_what_was_not_asked_for_is_none():
    output = answer(sample())
    assert output.logprobs is output.token_logprobs is output.top_logprobs is output.prompt_logprobs is None
    assert output.routed_experts is None


def test_a_server_without_tokenizer_sends_no_text():
    content = sample()
    del content["text"]
    assert answer(content).text is None


def test_batches_and_several_samples_are_lists():
    outputs = answer([sample(id=f"r{i}") for i in range(4)], prompt=["a", "b"], sampling_params={"n": 2})
    assert [output.rid for output in outputs] == ["r0", "r1", "r2", "r3"]
    assert len(answer([sample()], prompt=["a"])) == 1


@pytest.mark.parametrize("content", [[sample()], [sample()] * 3, sample()])
def test_a_wrong_number_of_samples_is_an_error(content):
    with pytest.raises(ResponseFormatError, match="2 samples"):
        answer(content, sampling_params={"n": 2})


@pytest.mark.parametrize(
    "content",
    [
        [],
        "text",
        {},
        {"output_ids": [1]},
        {"output_ids": None, "meta_info": {"id": "r", "finish_reason": None}},
        sample(reason={"type": "exploded"}),
        sample(reason="length"),
        sample(output_token_logprobs=[[1, 2]]),
        sample(weight_versions=[{"version": "a"}]),
        sample(routed_experts=5, routed_experts_format="compact"),
    ],
)
def test_malformed_samples_are_errors(content):
    with pytest.raises(ResponseFormatError):
        answer(content)


def test_an_answer_that_is_not_json_is_an_error():
    with pytest.raises(ResponseFormatError, match="not JSON"):
        generate("a", {}, None).parse(Reply(200, b"<html>"))


@pytest.mark.parametrize(
    "logprobs",
    [
        {},
        {"output_token_logprobs": [[-1.0, 11, None]]},
        {"output_token_logprobs": [[-1.0, i, None] for i in (12, 11, 13)]},
    ],
)
def test_logprobs_that_do_not_belong_to_the_tokens_are_errors(logprobs):
    with pytest.raises(ResponseFormatError, match="do not match the 3 output tokens"):
        answer(sample(**logprobs), return_logprob=True)


def test_scoring_returns_a_phantom_logprob_and_no_tokens():
    content = sample(output_token_logprobs=[[-1.0, 5, None]], completion_tokens=0, **compact(routes(PROMPT_TOKENS - 1)))
    content["output_ids"] = []
    output = answer(content, return_logprob=True, return_routed_experts=True)
    assert output.output_ids == []
    assert len(output.routed_experts) == PROMPT_TOKENS - 1


# --- sampling masks ----------------------------------------------------------------------------------------------

MASKS = [[11], [3, 12], [13, 20]]


def test_masks_in_either_form():
    ids, offsets = SamplingMask.from_lists(MASKS).encode_csr()
    for form in (MASKS, {"token_ids": ids, "offsets": offsets}):
        meta = {"output_token_sampling_mask": form, "output_token_sampling_logprobs": [0.0, None, -0.5]}
        output = answer(sample(**meta), return_sampling_mask=True)
        assert output.sampling_mask.to_lists() == MASKS
        assert output.sampling_logprobs[0] == 0.0 and math.isnan(output.sampling_logprobs[1])


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"output_token_sampling_mask": MASKS},
        {"output_token_sampling_mask": MASKS[:2], "output_token_sampling_logprobs": [0.0, 0.0]},
        {"output_token_sampling_mask": MASKS, "output_token_sampling_logprobs": [0.0]},
        {"output_token_sampling_mask": [[11], [3], [13]], "output_token_sampling_logprobs": [0.0] * 3},
        {"output_token_sampling_mask": [[11], [], [13]], "output_token_sampling_logprobs": [0.0] * 3},
        {
            "output_token_sampling_mask": {"token_ids": "AAAA", "offsets": "AAAA"},
            "output_token_sampling_logprobs": [0.0] * 3,
        },
        {"output_token_sampling_mask": {"offsets": "AAAA"}, "output_token_sampling_logprobs": [0.0] * 3},
        {"output_token_sampling_mask": 7, "output_token_sampling_logprobs": [0.0] * 3},
    ],
)
def test_masks_that_do_not_belong_to_the_tokens_are_errors(meta):
    with pytest.raises(ResponseFormatError):
        answer(sample(**meta), return_sampling_mask=True)


# --- routes ------------------------------------------------------------------------------------------------------


def test_rows_after_a_start():
    assert answer(sample(**compact(routes(3, start=3))), return_routed_experts=True).routed_experts.start == 3
    content = sample(**compact(routes(0, start=4)))
    content["output_ids"] = []
    assert len(answer(content, return_routed_experts=True).routed_experts) == 0


def test_the_headerless_form_needs_the_layout():
    content = sample(routed_experts=encode_compatible(routes(4, start=2)), routed_experts_start_len=2)
    with pytest.raises(ResponseFormatError, match="route_layout"):
        answer(content, return_routed_experts=True)
    routed = answer(content, layout=LAYOUT, return_routed_experts=True).routed_experts
    assert np.array_equal(routed.logical_ids_TLK, routes(4, start=2).logical_ids_TLK)
    assert routed.start == 2


def test_missing_short_long_and_incomplete_rows_are_errors():
    incomplete = routes().logical_ids_TLK.copy()
    incomplete[2] = missing_id(8)
    wrong = [{}, compact(routes(5)), compact(routes(7)), compact(routes(6, start=1))]
    wrong.append(compact(RoutedExperts(incomplete, 8, (1, 2), 3)))
    for meta in wrong:
        with pytest.raises(ResponseFormatError, match="routed experts"):
            answer(sample(**meta), return_routed_experts=True)


def test_damaged_rows_are_errors():
    meta = compact(routes())
    for damaged in (meta["routed_experts"][:-8], "A" + meta["routed_experts"][1:], "!!", ""):
        with pytest.raises(ResponseFormatError, match="routed experts"):
            answer(sample(**{**meta, "routed_experts": damaged}), return_routed_experts=True)


def test_an_aborted_sample_has_the_rows_that_exist():
    reason = {"type": "abort", "message": "Aborted", "status_code": None}
    output = answer(sample(reason=reason, **compact(routes(5))), return_routed_experts=True)
    assert output.finish_reason.type == "abort"
    assert len(output.routed_experts) == 5
    assert answer(sample(reason=reason), return_routed_experts=True).routed_experts is None


# --- streams and errors ------------------------------------------------------------------------------------------


def test_events_survive_any_chunking_and_any_text():
    texts = ["a\u2028b\x85c\x1ed", "", "x\\n\\ny"]
    stream = "".join(f": comment\nid: 1\ndata: {text}\r\n\r\n" for text in texts).encode() + b"data: a\ndata: b\n\n"
    for size in range(1, len(stream) + 1):
        decoder = SseDecoder()
        events = [e for i in range(0, len(stream), size) for e in decoder.feed(stream[i : i + size])]
        assert events == [*(text.encode() for text in texts), b"a\nb"]


def test_an_unfinished_event_owes_nothing_yet():
    content = sample()
    content["meta_info"]["finish_reason"] = None
    output = parse_event(json_response(content).body, {"return_routed_experts": True, "return_logprob": True}, None)
    assert output.finish_reason is None


def test_an_error_event_is_a_server_error():
    event = b'{"error": {"message": "too long", "code": 400}}'
    with pytest.raises(ServerError, match="too long") as caught:
        parse_event(event, {}, None)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"type": "BadRequest", "message": "no"}}', "no"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"success": false, "message": "no", "error": {"type": "Conflict", "message": "inner"}}', "inner"),
        (b'{"success": false, "message": "no"}', "no"),
        (b'{"object": "error", "message": "no", "type": "x"}', "no"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"Flush cache failed.\n", "Flush cache failed."),
        (b"", "no reason given"),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_the_reason_is_found_in_every_error_shape(body, message):
    assert error_message(body) == message
    with pytest.raises(ServerError) as caught:
        generate("a", {}, None).parse(Reply(409, body))
    assert (caught.value.status, caught.value.status_code, caught.value.message) == (409, 409, message)
