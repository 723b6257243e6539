"""Texts far beyond the context."""

from __future__ import annotations

import threading
import time

from tests.abuse.registry import OPEN, attack
from tests.abuse.server import Victim

SIZE = 8 << 20
LARGEST = 60 << 20
FRIEND_S = 2.0


@attack(OPEN, seconds=120.0, keeps_mb=200, peak_mb=800, quick=False)
def texts_beyond_the_context(victim: Victim) -> str:
    """Send megabytes of text to every endpoint for texts: they are refused, and another user's prompt does not wait."""
    stop = threading.Event()
    slowest = [0.0]
    friend = threading.Thread(target=time_another_user, args=(victim, stop, slowest), daemon=True)
    friend.start()
    texts = [kind * (SIZE // len(kind.encode())) for kind in ("a", "é\u2003", "\U0001f600", "word ", "\x00")]
    texts.append(" " * LARGEST)
    params = {"max_new_tokens": 1}
    calls = 0
    for text in texts:
        for path, body in (
            ("/generate", {"text": text, "sampling_params": params}),
            ("/generate", {"text": ["short", text], "sampling_params": params}),
            ("/v1/completions", {"model": "default", "prompt": text, "max_tokens": 1}),
            ("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": text}]}),
        ):  # fmt: skip
            if len(text) > SIZE and path.startswith("/v1"):
                continue
            response = victim.call("POST", path, body, timeout=60.0)
            calls += 1
            if response is not None and response.status_code not in (400, 413):
                victim.complain(f"{path} with {len(text)} characters: {response.status_code}")
        victim.call("POST", "/tokenize", {"prompt": text}, timeout=60.0)
    stop.set()
    friend.join(30.0)
    if slowest[0] > FRIEND_S:
        victim.complain(f"a short prompt of another user took {slowest[0]:.1f} s")
    return f"{calls} texts; another's prompt {slowest[0]:.2f} s at most"


def time_another_user(victim: Victim, stop: threading.Event, slowest: list[float]) -> None:
    """Send short prompts until `stop` is set, and keep the seconds of the slowest."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
    while not stop.is_set() and victim.running:
        started = time.monotonic()
        victim.call("POST", "/generate", body, timeout=60.0)
        slowest[0] = max(slowest[0], time.monotonic() - started)
        time.sleep(0.1)
