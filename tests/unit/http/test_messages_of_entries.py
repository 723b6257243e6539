"""Messages that libraries make, as a server answers them, have the entries that docs/troubleshooting states."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.error_messages import VALUE
from tests.http_harness import Live
from tests.troubleshooting import FOREIGN, entries_for

ANSWERS: dict[str, tuple[str, str, Any]] = {
    "Not Found": ("GET", "/nowhere", None),
    "Method Not Allowed": ("GET", "/generate", None),
    "…: Field required": ("POST", "/update_weight_version", {}),
    "…: Input should be …": ("POST", "/generate", {"input_ids": ["a"]}),
    "…: String should have …": ("POST", "/generate", {"text": "a", "extra_key": "x" * 600}),
}
ONE_WORD = frozenset({"Aborted"})
"""The reason of a sample, which tests/unit/http/test_generate.py reads from an answer."""


def test_every_foreign_pattern_is_one_that_a_server_answers() -> None:
    assert set(ANSWERS) | ONE_WORD == FOREIGN


@pytest.mark.parametrize("pattern", ANSWERS)
def test_a_message_of_a_library_has_its_entry(live: Live, pattern: str) -> None:
    method, path, body = ANSWERS[pattern]
    message = live.client.request(method, path, json=body).json()["error"]["message"]
    assert re.fullmatch(".*".join(map(re.escape, pattern.split(VALUE))), message), message
    assert any(pattern in entry.patterns for entry in entries_for(message))
