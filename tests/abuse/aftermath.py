"""The checks after an attack.  Each is a function of its own that returns what is wrong, or None.

rest        the server can be brought back to rest: nothing open, nothing paused, nothing released
idle        no request is left, every KV slot is free, the cache can be flushed
health      new connections get a 200 from /health and /liveness within a second
answer      a fixed greedy request has the same tokens, log-probabilities and routes as before
weights     every tensor has the fingerprint that it had
memory      all processes together use no more than before, except for the growth that the attack is granted
descriptors all processes together hold about as many descriptors as before
log         no more was written than granted, and no traceback
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.abuse.registry import Attack
from tests.abuse.server import AT_REST, Harmed, Victim
from tests.abuse.usage import MB, Usage, forget_peaks

HEALTH_S = 1.0
END_S = 5.0
"""Seconds in which a server that does not answer may still come to its end."""
SETTLE_S = 15.0
POLL_S = 0.1
SPARE_DESCRIPTORS = 12
QUESTION = {
    "input_ids": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3],
    "sampling_params": {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
}


@dataclass
class Before:
    """The state that an attack finds."""

    answer: Any
    checksum: str
    usage: Usage
    log_bytes: int


def look(victim: Victim) -> Before:
    """Record the state of a server at rest.  Raises `Harmed`."""
    forget_peaks(victim.pids)
    return Before(answer(victim), checksum(victim), victim.usage(), victim.log.stat().st_size)


def answer(victim: Victim) -> Any:
    """Return the tokens of the fixed request, and the log-probabilities of its prompt and output.  Raises `Harmed`."""
    reply = victim.right("POST", "/generate", QUESTION).json()
    meta = reply["meta_info"]
    return reply["output_ids"], [
        meta[name] for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs")
    ]


def checksum(victim: Victim) -> str:
    """Return one digest over all tensors in memory.  Raises `Harmed`."""
    return str(victim.right("POST", "/weights_checker", {"action": "checksum"}).json()["per_engine_checksum"])


def restore(victim: Victim) -> None:
    """Load the first weights again.  Raises `Harmed`."""
    body = {"model_path": str(victim.model), "weight_version": "default", "abort_all_requests": True}
    victim.right("POST", "/update_weights_from_disk", body, timeout=30.0)


def check(victim: Victim, attack: Attack, before: Before) -> list[str]:
    """Return everything that is wrong after the attack."""
    if health(victim) is not None and victim.ends_within(END_S):
        return [f"the server ended: {victim.last_words()}"]
    wrong = []
    for name, one in CHECKS.items():
        try:
            said = one(victim, attack, before)
        except Harmed as error:
            said = str(error)
        if said is not None:
            wrong.append(f"{name}: {said}")
        if not victim.running:
            return [*wrong, f"the server ended: {victim.last_words()}"]
    return wrong


# --- the checks --------------------------------------------------------------------------------------------------


def rest(victim: Victim, attack: Attack, _: Before) -> str | None:
    victim.new_connection()
    victim.post("/abort_request", abort_all=True)
    for path in (*AT_REST, "/stop_expert_distribution_record", "/destroy_weights_update_group"):
        victim.post(path)  # refused where there is nothing to end, resume, stop or leave
    for _attempt in range(3):  # an update that was lost is reported once
        response = victim.post("/continue_generation")
        if response is not None and response.status_code == 200:
            break
    else:
        return f"cannot be continued: {response.text[:200] if response is not None else 'no answer'}"
    if attack.restores:
        restore(victim)
    victim.right("POST", "/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    return None


def idle(victim: Victim, *_: Any) -> str | None:
    deadline = time.monotonic() + SETTLE_S
    while True:
        state = victim.state()
        used = {name: state[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
        flushed = victim.call("POST", "/flush_cache")
        if not any(used.values()) and flushed is not None and flushed.status_code == 200:
            return None
        if time.monotonic() > deadline:
            return f"{used}, flush: {flushed.text.strip() if flushed is not None else 'no answer'}"
        time.sleep(POLL_S)


def health(victim: Victim, *_: Any) -> str | None:
    return _lives(victim, "/health") or _lives(victim, "/liveness")


def _lives(victim: Victim, path: str) -> str | None:
    started = time.monotonic()
    try:
        status = httpx.get(f"{victim.url}{path}", timeout=10.0, trust_env=False).status_code
    except httpx.HTTPError as error:
        return f"{path}: {type(error).__name__} after {time.monotonic() - started:.1f} s"
    seconds = time.monotonic() - started
    return None if status == 200 and seconds < HEALTH_S else f"{path}: {status} after {seconds:.2f} s"


def same_answer(victim: Victim, _: Attack, before: Before) -> str | None:
    now = answer(victim)
    return None if now == before.answer else f"{now[0]} where {before.answer[0]} was, or other log-probabilities"


def weights(victim: Victim, _: Attack, before: Before) -> str | None:
    now = checksum(victim)
    return None if now == before.checksum else f"digest {now[:12]} where {before.checksum[:12]} was"


def memory(victim: Victim, attack: Attack, before: Before) -> str | None:
    peak = (victim.usage().peak_rss - before.usage.rss) / MB
    if peak > attack.peak_mb:
        return f"{peak:.0f} MB more at the peak; {attack.peak_mb} are granted"
    grown = _settled(lambda: (victim.usage().rss - before.usage.rss) / MB, attack.keeps_mb)
    return None if grown <= attack.keeps_mb else f"{grown:.0f} MB more than before; {attack.keeps_mb} are granted"


def descriptors(victim: Victim, _: Attack, before: Before) -> str | None:
    more = _settled(lambda: victim.usage().descriptors - before.usage.descriptors, SPARE_DESCRIPTORS)
    return None if more <= SPARE_DESCRIPTORS else f"{more:.0f} more than before"


def log(victim: Victim, attack: Attack, before: Before) -> str | None:
    with victim.log.open("rb") as file:
        file.seek(before.log_bytes)
        written = file.read(64 * MB)
    tracebacks = re.findall(rb"^Traceback.*\n(?:(?: .*)?\n)*(.*)", written, re.MULTILINE)
    if tracebacks:
        return f"{len(tracebacks)} tracebacks, the first: {tracebacks[0][:200].decode(errors='replace')}"
    limit = attack.log_kb << 10
    return None if len(written) <= limit else f"{len(written) >> 10} kB written; {attack.log_kb} are granted"


def _settled(measure: Callable[[], float], limit: float) -> float:
    """Return the measure as soon as it is within the limit or has been watched for long enough."""
    deadline = time.monotonic() + SETTLE_S
    found = measure()
    while found > limit and time.monotonic() < deadline:
        time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            found = measure()
    return found


CHECKS: dict[str, Callable[[Victim, Attack, Before], str | None]] = {
    "rest": rest,
    "idle": idle,
    "health": health,
    "answer": same_answer,
    "weights": weights,
    "memory": memory,
    "descriptors": descriptors,
    "log": log,
}
