"""Grammars that are huge, deep, or cost hours to compile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.abuse.attacks.long_texts import time_another_user
from tests.abuse.registry import OPEN, attack
from tests.abuse.server import Victim

REFUSAL_S = 15.0
"""A refusal takes a second of the processor, which others may use as well."""
FRIEND_S = 2.0


@attack(OPEN, seconds=180.0, keeps_mb=250, peak_mb=4500, quick=False)
def grammars_that_cost_hours(victim: Victim) -> str:
    """Send hostile grammars on each wire: they are refused soon, and another user's prompt does not wait."""
    stop, slowest = threading.Event(), [0.0]
    friend = threading.Thread(target=time_another_user, args=(victim, stop, slowest), daemon=True)
    friend.start()
    longest, calls = 0.0, 0
    for name, params in _hostile():
        for path, body in (
            ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2} | params}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 2} | params),
        ):
            started = time.monotonic()
            response = victim.call("POST", path, body, timeout=60.0)
            longest = max(longest, time.monotonic() - started)
            calls += 1
            if response is not None and response.status_code not in (200, 400, 413, 503):
                victim.complain(f"{path} with {name}: {response.status_code}")
    stop.set()
    friend.join(30.0)
    if longest > REFUSAL_S:
        victim.complain(f"a grammar was answered after {longest:.1f} s")
    if slowest[0] > FRIEND_S:
        victim.complain(f"a short prompt of another user took {slowest[0]:.1f} s")
    return f"{calls} grammars, {longest:.1f} s at most; another's prompt {slowest[0]:.2f} s"


def _hostile() -> Iterator[tuple[str, dict[str, Any]]]:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(3000)}}
    either = {"anyOf": [{"type": "object", "properties": {f"k{index}": deep}} for index in range(20)]}
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield "a deep schema", {"json_schema": json.dumps(deep)}
    yield "a wide schema", {"json_schema": json.dumps(wide)}
    yield "alternatives of deep schemas", {"json_schema": json.dumps(either)}
    yield "a schema that is itself", {"json_schema": json.dumps(loop)}
    yield "a deep text", {"json_schema": '{"not":' * 5000 + "true" + "}" * 5000}
    yield "counts in counts", {"regex": "((a{1,1000}){1,1000}){1,1000}"}
    yield "optional letters", {"regex": "(a?){60}a{60}"}
    yield "letters far from the end", {"regex": "(a|b)*a(a|b){40}"}
    yield "classes of all letters", {"regex": r"(\p{L}{1,500}\p{N}{1,500}){1,50}"}
    yield "both and neither", {"ebnf": "start: /" + "&".join(f"(.*{letter}.*)" for letter in "abcdefghij") + "/"}
    yield "rules without an end", {"ebnf": "start: a\na: a a | a a a | \n"}
    yield "many rules", {"ebnf": "start: " + " | ".join(f'"{index}" start' for index in range(3000))}
    yield "a huge text", {"regex": "a" * 70_000}
    yield "thousands of choices", {"guided_choice": ["x" * 60 + str(index) for index in range(900)]}
