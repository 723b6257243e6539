"""Bodies of /generate that fit `PlainGenerate` ask for the same as they do as a `GenerateRequest`."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from rollout.core.errors import LockstepError
from rollout.http.io import INVALID, parse_body
from rollout.http.native.generate import GenerateRequest, PlainGenerate

VALUES: dict[str, list[Any]] = {
    "text": ["a", "", None, ["a"], 1, "\u00e9\U0001f600"],
    "input_ids": [[1, 2], [], None, [[1, 2]], ["1"], [1.0], [True], [2**31], [-1], [2**70]],
    "rid": ["r", None, ["r"], 3],
    "sampling_params": [
        {}, {"max_new_tokens": 3, "n": 2}, None, [{}], {"custom_params": {"return_top_p_token_ids": True}}, "x",
        {"regex": "a"}, {"regex": None}, {"logprobs": 0}, {"prompt_logprobs": False}, {"custom_params": {"x": 1}},
    ],
    "return_logprob": [True, False, None, "true", 1, [True], "yes"],
    "logprob_start_len": [0, -1, None, "3", 2.0, 2.5, [0], 2**63 - 1, 2**63, True],
    "top_logprobs_num": [5, None, "5", 1.0, 2**80],
    "return_text_in_logprobs": [True, None, "no"],
    "return_routed_experts": [True, False, None, 0],
    "routed_experts_start_len": [2, None, "2", 1e3],
    "routed_experts_format": ["compact", "npy", None, "other"],
    "return_prompt_token_ids": [True, None],
    "logprobs_format": ["compact", "nested", None, "x"],
    "priority": [3, -(2**63), -(2**63) - 1, None, "4"],
    "stream": [True, False, None, "true"],
    "session_id": ["s", None, 7],
    "extra_key": ["k", None, "x" * 512, "x" * 513],
    "cache_salt": ["k", "", None, "x" * 513],
    "max_kv_version_lag": [1, None, "1", 2**64],
    "routed_dp_rank": [0, None, "0"],
    "data_parallel_rank": [0, None],
    "token_ids_logprob": [[1], None],
    "return_sampling_mask": [True],
    "replay_routed_experts": ["AAAA"],
    "unknown": [1, None],
    "regex": ["a", None, ""],
    "model": ["m"],
}  # fmt: skip
HEADERS = {"x-session-id": "from the header", "x-data-parallel-rank": "1"}


def some_body(rng: random.Random) -> bytes:
    names = rng.sample(list(VALUES), rng.randrange(1, 5))
    return json.dumps({name: rng.choice(VALUES[name]) for name in names}).encode()


def meaning(body: Any, headers: dict[str, str]) -> Any:
    """Return what a body asks for, or its refusal."""
    try:
        return body.to_request(headers)
    except LockstepError as error:
        return type(error), str(error)


def disagreements(decoder: Any) -> int:
    """Return how many bodies fit `decoder` and mean something else as a `GenerateRequest`."""
    rng, wrong, fitting = random.Random(0), 0, 0
    for _ in range(6000):
        data = some_body(rng)
        headers = HEADERS if rng.random() < 0.5 else {}
        try:
            plain = decoder.decode(data)
        except INVALID:
            continue
        fitting += 1
        try:
            wrong += meaning(plain, headers) != meaning(parse_body(GenerateRequest, data), headers)
        except LockstepError:
            wrong += 1
    assert 900 < fitting < 5000
    return wrong


def test_a_body_that_fits_means_the_same() -> None:
    assert disagreements(msgspec.json.Decoder(PlainGenerate)) == 0


class _Lenient(PlainGenerate, kw_only=True, forbid_unknown_fields=False):
    """A wrong variant: it takes fields that it does not know."""


@pytest.mark.parametrize(
    "decoder",
    [msgspec.json.Decoder(_Lenient), msgspec.json.Decoder(PlainGenerate, strict=False)],
    ids=["fields", "types"],
)
def test_the_comparison_finds_a_reader_that_is_less_strict(decoder: Any) -> None:
    assert disagreements(decoder) > 0


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"text": "\xff"}', b'{"text": "a", "text": 1}'])
def test_what_is_no_such_object_does_not_fit(data: bytes) -> None:
    with pytest.raises(INVALID):
        msgspec.json.decode(data, type=PlainGenerate)
