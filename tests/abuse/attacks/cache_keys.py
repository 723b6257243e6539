"""Keys of the prefix cache, each another, and as long as a body may be."""

from __future__ import annotations

import uuid

from tests.abuse.registry import OPEN, attack
from tests.abuse.server import Victim

PARAMS = {"max_new_tokens": 1, "ignore_eos": True}
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": PARAMS}


@attack(OPEN, seconds=90.0, peak_mb=200)
def cache_keys_of_megabytes(victim: Victim) -> str:
    """Keys of two megabytes, each another: they are refused, or nothing of them is kept, also before any flush."""
    for name in ("extra_key", "cache_salt", "rid"):
        for _ in range(120):
            victim.post("/generate", **PROMPT, **{name: uuid.uuid4().hex * (1 << 16)})
    return "360 keys"


@attack(OPEN, seconds=90.0, peak_mb=100)
def cache_keys_without_end(victim: Victim) -> str:
    """Thousands of short keys, each another."""
    for _ in range(3000):
        key = uuid.uuid4().hex
        victim.post("/generate", **PROMPT, extra_key=key, cache_salt=key)
    return "3000 keys"
