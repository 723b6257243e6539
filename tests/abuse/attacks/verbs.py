"""Right calls at wrong times: every control verb twice, and every two of them in either order."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tests.abuse.good import good_bodies, good_body
from tests.abuse.registry import OPEN, RANKS, attack
from tests.abuse.server import Victim

SLOW = {"/init_weights_update_group"}  # waits for its deadline


@attack(OPEN, RANKS, seconds=150.0, keeps_mb=96, log_kb=512, restores=True)
def verbs_twice_and_out_of_order(victim: Victim) -> str:
    """Every two control verbs, one after the other in both orders and at once, while requests come and go."""
    bodies = good_bodies(victim)
    verbs = [one for one in victim.operations if one.is_control and one.path not in SLOW]
    stop = threading.Event()
    crowd = [threading.Thread(target=_generate, args=(victim, stop), daemon=True) for _ in range(2)]
    for thread in crowd:
        thread.start()
    deadline = time.monotonic() + 60.0
    pairs = 0
    try:
        for first, second in itertools.product(verbs, verbs):
            if time.monotonic() > deadline or not victim.running:
                break
            for one in (first, second):
                victim.call(one.method, one.path, good_body(bodies, one))
            pairs += 1
            if pairs % 10 == 0:
                victim.post("/continue_generation")
    finally:
        stop.set()
        victim.post("/abort_weight_update")
        for path in ("/resume_memory_occupation", "/continue_generation", "/continue_generation"):
            victim.post(path)
        for thread in crowd:
            thread.join(20.0)
    return f"{pairs} of {len(verbs) ** 2} pairs"


@attack(OPEN, RANKS, seconds=100.0, keeps_mb=96, log_kb=512, restores=True)
def verbs_all_at_once(victim: Victim) -> str:
    """All control verbs from sixteen clients at once, several times over."""
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
    """Requests as a rollout sends them; 503 and aborts are what it has to expect."""
    body = {"input_ids": [4] * 50, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    while not stop.is_set() and victim.running:
        response = victim.call("POST", "/generate", body, timeout=60.0)
        if response is not None and response.status_code not in (200, 503):
            victim.complain(f"/generate: {response.status_code} {response.text[:120]}")
        time.sleep(0.02)
