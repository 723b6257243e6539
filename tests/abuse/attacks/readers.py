"""Clients that ask for much and never read it, and clients that go away."""

from __future__ import annotations

import random
import time

from tests.abuse.registry import KEYED, OPEN, attack
from tests.abuse.server import Victim
from tests.abuse.wire import connect, connections, request, send

PARAMS = {"max_new_tokens": 600, "temperature": 0.0, "ignore_eos": True}
BODY = {"input_ids": [6] * 30, "sampling_params": PARAMS, "return_logprob": True, "top_logprobs_num": 20}
HELD_S = 10.0
NUM_LEAVING = 300
GONE_S = 5.0
"""Seconds after which no request of the clients that left may run."""


@attack(OPEN, KEYED, seconds=120.0, keeps_mb=150, peak_mb=900)
def clients_that_never_read(victim: Victim) -> str:
    """Ask for forty streams and forty whole answers and read none: others are served, and memory stays bounded."""
    number = 80
    with connections(victim, number, receive_bytes=4096) as sockets:
        for index, one in enumerate(sockets):
            send(one, request(victim, "/generate", BODY | {"stream": index % 2 == 0}))
        deadline = time.monotonic() + HELD_S
        while time.monotonic() < deadline and victim.running:
            victim.call("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}, timeout=60.0)
            time.sleep(0.2)
    return f"{number} clients"


@attack(OPEN, seconds=60.0, keeps_mb=96, quick=True)
def clients_that_go_away(victim: Victim) -> str:
    """Cut the connections of three hundred requests after a moment, by FIN or reset: none of the requests runs on."""
    rng = random.Random(0)
    for index in range(NUM_LEAVING):
        one = connect(victim, receive_bytes=4096)
        send(one, request(victim, "/generate", BODY | {"stream": index % 2 == 0}))
        time.sleep(rng.choice((0.0, 0.0, 0.005, 0.03)))
        if index % 3 == 0:  # reset
            one.setsockopt(1, 13, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # SO_LINGER: on, 0 s
        one.close()
    deadline = time.monotonic() + GONE_S
    while (left := _num_requests(victim)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        victim.complain(f"{left} requests are still there {GONE_S:g} s after their clients went away")
    return f"{NUM_LEAVING} clients"


def _num_requests(victim: Victim) -> int:
    state = victim.state()
    return int(state["num_running_reqs"] + state["num_waiting_reqs"])
