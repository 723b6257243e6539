"""More connections than the server may have descriptors."""

from __future__ import annotations

import time

from tests.abuse.registry import KEYED, OPEN, attack
from tests.abuse.server import Victim
from tests.abuse.wire import connections, request, send, status_of

FEW = {"input_ids": [8] * 10, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


@attack(KEYED, seconds=120.0, log_kb=256)
def idle_connections_beyond_the_limit(victim: Victim) -> str:
    """Open two thousand silent connections at a hard limit of 512 descriptors."""
    with connections(victim, 2000):
        time.sleep(5.0)
        answered = victim.call("GET", "/get_load", timeout=10.0) is not None
    return f"2000 connections, a new client is {'' if answered else 'not '}answered meanwhile"


@attack(KEYED, seconds=120.0, log_kb=256)
def requests_beyond_the_limit(victim: Victim) -> str:
    """Send a thousand requests at once at a hard limit of 512 descriptors: each is answered, refused or closed."""
    with connections(victim, 1000) as sockets:
        for one in sockets:
            send(one, request(victim, "/generate", FEW))
        deadline = time.monotonic() + 60.0
        answers = [status_of(one, max(0.1, deadline - time.monotonic())) for one in sockets]
    for status in answers:
        victim.statuses[status or 0] += 1
    silent = sum(status is None for status in answers)
    if silent:
        victim.complain(f"{silent} of {len(answers)} requests got neither an answer nor an end within 60 s")
    if victim.statuses[200] == 0:
        victim.complain("none of them was served")
    return f"{len(answers)} requests"


@attack(OPEN, seconds=120.0, keeps_mb=150)
def requests_beyond_the_soft_limit(victim: Victim) -> str:
    """Send 1500 requests at once at a soft limit of 256 descriptors and a hard one of 4096: all are served."""
    with connections(victim, 1500) as sockets:
        for one in sockets:
            send(one, request(victim, "/generate", FEW))
        deadline = time.monotonic() + 60.0
        answers = [status_of(one, max(0.1, deadline - time.monotonic())) for one in sockets]
    served = answers.count(200)
    if served < len(answers):
        victim.complain(f"{served} of {len(answers)} requests were served")
    return f"{served} served"
