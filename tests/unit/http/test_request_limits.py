"""Limits of one body: the worst ones are refused in bounded memory and time, and the first error is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.http import protocol
from rollout.http.openai import protocol as openai_protocol
from tests.http_harness import Live

ONE_TOKEN: dict[str, Any] = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


WORST_BODIES = """
import resource, sys, time
from rollout.core.errors import BadRequest, TooLarge
from rollout.http import io as http_io, protocol
from rollout.http.native import generate
from rollout.http.openai import protocol as openai_protocol

SIZE = 64 << 20
size_now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size_now + (1700 << 20),) * 2)
for model, name, element in (
    (generate.GenerateRequest, b"input_ids", b'""'),
    (generate.GenerateRequest, b"input_ids", b"[]"),
    (generate.GenerateRequest, b"input_ids", b"257.5"),
    (openai_protocol.ChatCompletionRequest, b"messages", b"{}"),
    (protocol.AbortRequest, b"rid", b"1000"),
):
    body = b'{"' + name + b'":[' + (element + b",") * ((SIZE - 40) // (len(element) + 1)) + element + b"]}"
    started = time.monotonic()
    try:
        http_io.parse_body(model, body)
        raise SystemExit(f"{name} {element} was taken")
    except (BadRequest, TooLarge) as error:
        assert len(str(error)) < 300, len(str(error))
    assert time.monotonic() - started < 20, (name, element)
print("done")
"""


@pytest.mark.full
def test_engine_05_the_worst_bodies_are_refused_in_bounded_memory_and_time() -> None:
    done = subprocess.run([sys.executable, "-c", WORST_BODIES], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr[-2000:]


def all_bodies(model: type[protocol.Body] = protocol.Body) -> list[type[protocol.Body]]:
    return [model, *(found for child in model.__subclasses__() for found in all_bodies(child))]


def collections_in(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("type") in ("list", "dict"):
            yield node
        node = list(node.values())
    if isinstance(node, list | tuple):
        for part in node:
            yield from collections_in(part)


def test_engine_05_no_list_of_any_body_keeps_an_error_for_each_element() -> None:
    assert openai_protocol.CompletionRequest in all_bodies()
    found = [(body, node) for body in all_bodies() for node in collections_in(body.__pydantic_core_schema__)]
    assert len(found) > 30
    assert not [body for body, node in found if not node.get("fail_fast")]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [None] * 50_000}, "input_ids.0"),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 50_000}, "stop"),
        ("/v1/chat/completions", {"messages": [1] * 50_000}, "messages.0"),
        ("/abort_request", {"rid": [1] * 50_000}, "rid"),
        ("/update_weights_from_distributed", {"names": [1] * 50_000, "dtypes": [], "shapes": []}, "names.0"),
    ],
)
def test_engine_05_a_refusal_names_the_first_error_only(live: Live, path: str, body: Any, field: str) -> None:
    status, message = live.refused(path, **body)
    assert status == 400 and message.startswith(field) and len(message) < 200


def test_engine_05_a_long_text_full_of_quotes_and_brackets_is_no_crowd_of_objects(live: Live) -> None:
    text = '[{"\\' * (1 << 19)
    status, message = live.refused(text=text)
    assert status == 400 and "context length" in message


def test_engine_05_many_objects_are_413(live: Live) -> None:
    assert live.refused(sampling_params={"junk": [{}] * ((1 << 20) + 1)}, input_ids=[1])[0] == 413


LONG_TEXTS = """
import asyncio, resource, sys, time
from rollout.core.errors import BadRequest, TooLarge
from rollout.text import tokenizer as module

module.MAX_TOKENS = 500_000
tokenizer = module.Tokenizer.load(sys.argv[1])
tokenizer.context_length = 200_000
size_now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size_now + (700 << 20),) * 2)

async def main():
    for texts in (["hello wor" * (7 << 20)], ["x" * (1 << 20)], ["y" * 16000] * 4096):
        started = time.monotonic()
        try:
            await tokenizer.encode(texts)
            raise SystemExit("taken")
        except (BadRequest, TooLarge) as error:
            assert len(str(error)) < 300
        assert time.monotonic() - started < 40

asyncio.run(main())
print("done")
"""


@pytest.mark.full
def test_engine_06_texts_that_cannot_fit_are_refused_before_they_are_encoded(folder: Path) -> None:
    command = [sys.executable, "-c", LONG_TEXTS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_engine_06_ids_that_cannot_fit_are_refused_before_they_are_looked_at(live: Live) -> None:
    assert "context length" in live.refused(input_ids=[-1] * 1000)[1]
    assert "token_ids_logprob" in live.refused(**ONE_TOKEN, token_ids_logprob=[1] * 5000)[1]
    for name, value in (("stop_token_ids", [1] * 5000), ("logit_bias", {str(i): 1 for i in range(5000)})):
        assert name in live.refused(input_ids=[1], sampling_params={name: value})[1]


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_engine_14_keys_that_partition_the_prefix_cache_are_capped(live: Live, name: str, path: str) -> None:
    body = ONE_TOKEN if path == "/generate" else {"prompt": [1], "max_tokens": 1}
    assert live.client.post(path, json=body | {name: "k" * 512}).status_code == 200
    status, message = live.refused(path, **body, **{name: "k" * 513})
    assert status == 400 and name in message and "512" in message
