"""Every field of every endpoint at its extremes, while the rest of the body is right."""

from __future__ import annotations

import random
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.abuse.good import good_bodies, good_body
from tests.abuse.registry import OPEN, RANKS, attack
from tests.abuse.schema import Operation, encode, extremes
from tests.abuse.server import AT_REST, Victim

PER_ENDPOINT_S = 1.5
BETWEEN = 25
"""Number of calls after which a paused server or an open update is put to rest."""
Call = tuple[str, bytes | None]


@attack(OPEN, RANKS, seconds=200.0, keeps_mb=96, peak_mb=900, log_kb=512, restores=True)
def control_fields_at_their_extremes(victim: Victim) -> str:
    """Call every control verb with every field at its extremes: the answer is one that the protocol names, in time."""
    return _all_of(victim, [one for one in victim.operations if one.is_control], PER_ENDPOINT_S)


@attack(OPEN, seconds=100.0, keeps_mb=96, log_kb=512)
def data_fields_at_their_extremes(victim: Victim) -> str:
    """Call /generate, OpenAI's endpoints and the other data endpoints with every field at its extremes."""
    data = [one for one in victim.operations if not one.is_control and (one.schema or one.query)]
    return _all_of(victim, data, 2 * PER_ENDPOINT_S)


@attack(OPEN, seconds=150.0, keeps_mb=96, log_kb=512)
def sampling_parameters_at_their_extremes(victim: Victim) -> str:
    """Send every sampling parameter at its extremes.  No schema lists them, so they are named here."""
    names = (
        "max_new_tokens", "min_new_tokens", "n", "sampling_seed", "seed", "stop", "stop_token_ids", "ignore_eos",
        "no_stop_trim", "skip_special_tokens", "temperature", "top_p", "top_k", "min_p",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex",
        "ebnf", "structural_tag", "structured_outputs", "guided_choice", "allowed_token_ids", "bad_words",
        "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "routed_experts_prompt_start", "custom_params",
    )  # fmt: skip
    kinds = [{"type": "number"}, {"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    calls = 0
    for name in names:
        for value in (value for kind in kinds for value in extremes(kind)):
            params = {"max_new_tokens": 3, "min_new_tokens": 1, name: value}
            body = {"input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True}
            victim.call("POST", "/generate", content=encode(body))
            params = {"max_tokens": 3, "min_tokens": 1, "logprobs": 1, name: value}
            victim.call(
                "POST", "/inference/v1/generate", content=encode({"token_ids": [1, 2, 3], "sampling_params": params})
            )
            calls += 2
    return f"{calls} calls"


def _all_of(victim: Victim, found: list[Operation], max_s: float) -> str:
    """Send all calls, in another order in every run; calls beyond the time of an endpoint are left out and counted."""
    bodies = good_bodies(victim)
    seed = time.time_ns() % 100_000
    calls = left_out = 0
    for one in found:
        todo = list(_calls(one, good_body(bodies, one)))
        random.Random(f"{seed} {one.path}").shuffle(todo)
        deadline = time.monotonic() + max_s
        for number, (path, content) in enumerate(todo):
            if time.monotonic() > deadline or not victim.running:
                left_out += len(todo) - number
                break
            victim.call(one.method, path, content=content)
            calls += 1
            if one.is_control and number % BETWEEN == BETWEEN - 1:
                _settle(victim)
        _settle(victim)
    return f"{calls} calls, {left_out} left out, {len(found)} endpoints, seed {seed}"


def _calls(one: Operation, base: Any) -> Iterator[Call]:
    """Yield the path and the body of each call; each call comes twice in a row."""
    yield one.path, None if base is None else encode(base)
    for name, schema in one.query.items():
        for value in extremes(schema):
            if len(str(value)) < 4000:
                text = urllib.parse.urlencode({name: value}, errors="replace")
                yield from 2 * [(f"{one.path}?{text}", None)]
    for name, schema in one.fields.items():
        for value in extremes(schema):
            yield from 2 * [(one.path, encode(base | {name: value}))]
        for inner, part in _inner(schema):
            for value in extremes(part):
                around = base.get(name) if isinstance(base.get(name), dict) else {}
                yield from 2 * [(one.path, encode(base | {name: around | {inner: value}}))]


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the schema of each field within a field that is an object."""
    for arm in schema.get("anyOf") or schema.get("oneOf") or [schema]:
        yield from arm.get("properties", {}).items()


def _settle(victim: Victim) -> None:
    for path in AT_REST:
        victim.post(path)
