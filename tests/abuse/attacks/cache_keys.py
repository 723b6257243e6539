"""Keys of the prefix cache that never repeat, some of them megabytes long."""

from __future__ import annotations

import uuid

from tests.abuse.registry import OPEN, attack
from tests.abuse.server import Victim

PARAMS = {"max_new_tokens": 1, "ignore_eos": True}
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": PARAMS}


@attack(OPEN, seconds=90.0, peak_mb=200)
def cache_keys_of_megabytes(victim: Victim) -> str:
    """Send keys of two megabytes that never repeat: the server refuses or forgets them, even before a flush."""
    for name in ("extra_key", "cache_salt", "rid"):
        for _ in range(120):
            victim.post("/generate", **PROMPT, **{name: uuid.uuid4().hex * (1 << 16)})
    return "360 keys"


@attack(OPEN, seconds=90.0, peak_mb=100)
def cache_keys_without_end(victim: Victim) -> str:
    """Send thousands of short keys that never repeat."""
    for _ in range(3000):
        key = uuid.uuid4().hex
        victim.post("/generate", **PROMPT, extra_key=key, cache_salt=key)
    return "3000 keys"
