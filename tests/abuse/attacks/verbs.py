"""Right calls at wrong times: every control verb twice, and every two of them in either order."""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.abuse.good import good_bodies, good_body
from tests.abuse.registry import OPEN, RANKS, attack
from tests.abuse.server import AT_REST, Victim

# These verbs wait for their deadline.
SLOW = {"/init_weights_update_group", "/init_weight_transfer_engine", "/areal_init_weights_update_group"}
PAIRS_S = 30.0


@attack(OPEN, RANKS, seconds=150.0, keeps_mb=96, peak_mb=900, log_kb=512, restores=True)
def verbs_twice_and_out_of_order(victim: Victim) -> str:
    """Call two control verbs in a row, in either order or one twice, while requests come and go.

    Each run plays other pairs, as many as there is time for.
    """
    bodies = good_bodies(victim)
    verbs = [one for one in victim.operations if one.is_control and one.path not in SLOW]
    stop = threading.Event()
    crowd = [threading.Thread(target=_generate, args=(victim, stop), daemon=True) for _ in range(2)]
    for thread in crowd:
        thread.start()
    deadline = time.monotonic() + PAIRS_S
    seed, pairs = time.time_ns() % 100_000, 0
    shuffled = random.Random(seed).sample(list(itertools.product(verbs, verbs)), len(verbs) ** 2)
    try:
        for first, second in shuffled:
            if time.monotonic() > deadline or not victim.running:
                break
            for one in (first, second):
                victim.call(one.method, one.path, good_body(bodies, one))
            pairs += 1
            if pairs % 10 == 0:
                victim.post("/continue_generation")
    finally:
        stop.set()
        for path in AT_REST:
            victim.post(path)
        for thread in crowd:
            thread.join(20.0)
    return f"{pairs} of {len(verbs) ** 2} pairs, seed {seed}"


@attack(OPEN, RANKS, seconds=100.0, keeps_mb=96, peak_mb=900, log_kb=512, restores=True)
def verbs_all_at_once(victim: Victim) -> str:
    """Call every control verb but the slow ones, several times over, from sixteen clients at once."""
    bodies = good_bodies(victim)
    verbs = [one for one in victim.operations if one.is_control and one.path not in SLOW]
    with ThreadPoolExecutor(16) as pool:
        calls = [
            pool.submit(victim.call, one.method, one.path, good_body(bodies, one), timeout=45.0) for one in verbs * 12
        ]
        for call in calls:
            call.result()
    return f"{len(calls)} calls"


def _generate(victim: Victim, stop: threading.Event) -> None:
    """Send requests as a rollout does, which has to expect 503 and aborts."""
    body = {"input_ids": [4] * 50, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    while not stop.is_set() and victim.running:
        response = victim.call("POST", "/generate", body, timeout=60.0)
        if response is not None and response.status_code not in (200, 503):
            victim.complain(f"/generate: {response.status_code} {response.text[:120]}")
        time.sleep(0.02)
