"""Clients whose resumable streams are cut, and that ask for them again in every wrong way."""

from __future__ import annotations

import random
import time

from tests.abuse.registry import OPEN, attack
from tests.abuse.server import Victim
from tests.abuse.wire import connect, request, send

PARAMS = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
BODY = {
    "input_ids": [6] * 1000,
    "sampling_params": PARAMS,
    "return_logprob": True,
    "top_logprobs_num": 20,
    "stream": True,
    "resumable": True,
}
OPENAIS_BODY = {
    "prompt": [6] * 1000,
    "max_tokens": 400,
    "temperature": 0.0,
    "ignore_eos": True,
    "logprobs": 20,
    "stream": True,
    "resumable": True,
}
NUM_CUT = 200
FORGOTTEN_S = 100.0
"""Seconds after which no stream of the clients that left may be kept."""


@attack(OPEN, seconds=200.0, keeps_mb=150, peak_mb=700)
def clients_whose_streams_are_cut(victim: Victim) -> str:
    """Cut two hundred resumable streams, and ask for them again: each is bounded, and is forgotten in the end."""
    rng = random.Random(0)
    names = [f"cut-{index}" for index in range(NUM_CUT)]
    for name in names:
        one = connect(victim, receive_bytes=4096)
        if rng.random() < 0.5:
            send(one, request(victim, "/generate", BODY | {"rid": name, "stream_format": rng.choice(_FORMS)}))
        else:
            send(one, request(victim, "/v1/completions", OPENAIS_BODY | {"rid": name}))
        time.sleep(rng.choice((0.0, 0.005, 0.03)))
        one.close()
    for _ in range(3 * NUM_CUT):  # readers that take one another's streams, or ask for tokens that are not there
        one = connect(victim, receive_bytes=4096)
        place = rng.choice(
            [
                {"from_token": 0},
                {"from_token": rng.choice((3, 10**6, [0, 0]))},
                {"from_event": 0},
                {"from_event": rng.choice((3, 10**6))},
                {"from_event": 0, "from_token": 0},
            ]
        )
        send(one, request(victim, "/generate/resume", {"rid": rng.choice([*names, "nobody"])} | place))
        if rng.random() < 0.5:
            time.sleep(0.01)
        one.close()
    for name in names[::2]:
        victim.post("/abort_request", rid=name)
    deadline = time.monotonic() + FORGOTTEN_S
    while (left := _num_kept(victim, names)) and time.monotonic() < deadline:
        time.sleep(2.0)
    if left:
        victim.complain(f"{left} streams are still kept {FORGOTTEN_S:g} s after their clients went away")
    return f"{NUM_CUT} clients"


_FORMS = ("cumulative", "incremental")


def _num_kept(victim: Victim, names: list[str]) -> int:
    """Return how many of the streams are known: a token beyond the end is a 400 for them, and a 404 for others.

    So is any token of a stream of events.
    """
    answers = [victim.post("/generate/resume", rid=name, from_token=10**6) for name in names]
    return sum(answer is not None and answer.status_code == 400 for answer in answers)
