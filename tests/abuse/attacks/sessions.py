"""Sessions without end, ids that are not names, and chats whose text looks like calls that never close."""

from __future__ import annotations

import uuid

from tests.abuse.registry import OPEN, attack
from tests.abuse.server import Victim

PARAMS = {"max_new_tokens": 2, "ignore_eos": True}
HEADERS = ("X-Session-ID", "X-SMG-Routing-Key", "X-data-parallel-rank")


@attack(OPEN, seconds=90.0, peak_mb=150, quick=True)
def sessions_without_end(victim: Victim) -> str:
    """Send each request under another session: more of them than may be pinned, known, or have metrics."""
    for index in range(200):
        prompt = [index % 50, *range(index % 7, 60)]
        body = {"input_ids": prompt, "sampling_params": PARAMS, "session_id": uuid.uuid4().hex}
        victim.right("POST", "/generate", body)
    pinned = victim.right("GET", "/sessions?limit=4096").json()["num_pinned_tokens"]
    most = victim.right("GET", "/server_info").json()["internal_states"][0]["max_total_num_tokens"] // 2
    if not 0 < pinned <= most:
        victim.complain(f"{pinned} tokens are pinned, {most} may be")
    lines = victim.right("GET", "/metrics").text.count("lockstep:session_requests_total{")
    if not 0 < lines <= 65:
        victim.complain(f"{lines} sessions have metrics of their own")
    return "200 sessions"


@attack(OPEN, seconds=60.0, log_kb=128)
def session_headers_of_junk(victim: Victim) -> str:
    """Send junk in every session header: the server refuses it, or takes it as the odd name of a session."""
    values = ["", "x" * 512, "x" * 513, "x" * 30_000, "-1", "1e9", "9" * 400, "../..", "%00", "é", '"}\\', "²"]
    body = {"input_ids": [1, 2, 3], "sampling_params": PARAMS}
    for name in HEADERS:
        for value in values:
            victim.call("POST", "/generate", body, headers={name: value.encode("latin-1")})  # type: ignore[dict-item]
    for path in ("/sessions/", "/sessions/%2e%2e%2f", "/sessions/%ff", "/sessions/" + "x" * 8000, "/sessions?limit=-1"):
        victim.call("GET", path)
    for path in ("/finish_session", "/finish_session?session_id=", "/finish_session?session_id=" + "%ff" * 2000):
        victim.call("POST", path)
    return f"{len(HEADERS) * len(values)} headers"


@attack(OPEN, seconds=90.0, peak_mb=200)
def tools_of_every_shape(victim: Victim) -> str:
    """Send tools, choices and messages with calls in shapes that templates and parsers do not expect."""
    deep: object = {"type": "string"}
    for _ in range(80):
        deep = {"anyOf": [deep]}
    odd = [None, 1, "x", [], {}, {"function": None}, {"function": {"name": 5}}, {"function": {"parameters": deep}}]
    calls = [{"tool_calls": odd}, {"tool_calls": "x"}, {"tool_calls": [{"function": {"arguments": "[" * 5000}}]}]
    for stream in (False, True):
        for tool in odd:
            victim.post("/v1/chat/completions", input_ids=[5], tools=[tool], max_tokens=3, stream=stream)
            victim.post("/v1/chat/completions", input_ids=[5], tool_choice=tool, max_tokens=3, stream=stream)
        for call in calls:
            messages = [{"role": "assistant", "content": None} | call]
            victim.post("/v1/chat/completions", messages=messages, max_tokens=3, stream=stream)
            victim.post("/v1/chat/completions", messages=messages, continue_final_message=True, max_tokens=3)
    return f"{2 * (2 * len(odd) + 2 * len(calls))} chats"
