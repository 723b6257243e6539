"""Aborts by every form of a name, in every phase of a request's life."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.abuse.registry import KEYED, OPEN, RANKS, attack
from tests.abuse.server import Victim

ANSWER_S = 20.0
LONG = 3000
"""Prompt tokens of a request that is prefilled in about a hundred chunks."""
PAUSES = (None, "in_place", "retract", "abort")
DELAYS_S = (0.0, 0.01, 0.03, 0.1)

Forms = dict[str, Callable[[str], Any]]
HITTING: Forms = {
    "repeated": lambda rid: [rid, rid, rid],
    "samples": lambda rid: [f"{rid}_0", f"{rid}_1"],
    "group and samples": lambda rid: [rid, f"{rid}_0", f"{rid}_1", f"{rid}_0"],
    "among unknown": lambda rid: ["no-such", rid, "", f"{rid}_9", rid],
    "thousands": lambda rid: [rid, f"{rid}_0"] * 2000,
}
MISSING: Forms = {
    "unknown": lambda rid: [f"{rid}_7", f"{rid}_00", f"{rid}_", rid[:-1], rid.upper(), "", "\x00"],
}
REQUESTS: dict[str, dict[str, Any]] = {
    "decode": {"input_ids": [7] * 20},
    "prefill": {"input_ids": list(range(2, 302)) * (LONG // 300)},
    "prompt log-probabilities": {
        "input_ids": list(range(300, 0, -1)) * (LONG // 300), "return_logprob": True, "logprob_start_len": 0,
    },
    "streaming": {"input_ids": [9] * 40, "stream": True, "return_logprob": True},
}  # fmt: skip


@attack(OPEN, KEYED, RANKS, seconds=100.0, quick=True)
def aborts_in_every_phase(victim: Victim) -> str:
    """Abort requests by every form of name in every phase, running and paused: each is answered in time."""
    phases: Counter[str] = Counter()
    number = 0
    forms = HITTING | MISSING
    for kind, pause, form in itertools.product(REQUESTS, PAUSES, forms):
        delay = DELAYS_S[number % len(DELAYS_S)]
        number += 1
        _one(victim, kind, pause, form, forms[form], delay, phases)
        if not victim.running:
            break
    for phase in ("no token yet", "part of the prompt", "tokens"):
        if victim.running and not phases[phase]:
            victim.complain(f"no request was aborted in the phase: {phase}")
    return f"{number} aborts; phases {dict(phases)}"


@attack(OPEN, seconds=60.0, quick=True)
def aborts_of_waiting_requests(victim: Victim) -> str:
    """Abort waiting requests by repeated and mixed names, and then all requests."""
    answers: list[Any] = []
    rids = [f"wait-{uuid.uuid4().hex[:8]}" for _ in range(40)]
    threads = [_started(victim, REQUESTS["decode"] | {"rid": rid}, 2, answers) for rid in rids]
    time.sleep(0.3)
    _abort(victim, [name for rid in rids[10:] for name in (rid, f"{rid}_0", rid)])
    victim.post("/abort_request", rid=rids[0], abort_all=True)
    for thread in threads:
        thread.join(ANSWER_S)
    if len(answers) != len(rids):
        victim.complain(f"{len(answers)} of {len(rids)} requests were answered")
    for sample in (sample for answer in answers for sample in answer or ()):
        _judged(victim, "waiting", sample, len(REQUESTS["decode"]["input_ids"]), "decode", "repeated", None)
    return f"{len(rids)} requests"


def _one(
    victim: Victim, kind: str, pause: str | None, form: str, names: Callable[[str], Any], delay: float, phases: Counter
) -> None:
    rid = f"r-{uuid.uuid4().hex[:12]}"
    answers: list[Any] = []
    num_tokens = 40 if form in MISSING else 900
    thread = _started(victim, REQUESTS[kind] | {"rid": rid}, 2, answers, num_tokens)
    time.sleep(delay)
    if pause is not None:
        victim.post("/pause_generation", mode=pause)
    _abort(victim, names(rid))
    if pause is not None:
        victim.post("/continue_generation")
    started = time.monotonic()
    thread.join(ANSWER_S)
    where = f"{kind}, paused {pause}, {form}, after {delay:g} s"
    if thread.is_alive() or not answers:
        victim.complain(f"{where}: no answer within {time.monotonic() - started:.0f} s")
        return
    for sample in answers[0] or ():
        phases[_judged(victim, where, sample, len(REQUESTS[kind]["input_ids"]), kind, form, pause)] += 1


def _judged(
    victim: Victim, where: str, sample: dict[str, Any], prompt_len: int, kind: str, form: str, pause: str | None
) -> str:
    """Complain of counters that do not fit, and return the phase in which the sample was ended."""
    meta = sample["meta_info"]
    reason = meta["finish_reason"]["type"]
    tokens = len(sample["output_ids"])
    rows = len(meta.get("input_token_logprobs") or ())
    if meta["completion_tokens"] != tokens or meta["prompt_tokens"] != prompt_len:
        victim.complain(f"{where}: {meta['completion_tokens']} completion tokens said, {tokens} given")
    if "logprob" in kind and len(meta["output_token_logprobs"]) != tokens:
        victim.complain(f"{where}: {len(meta['output_token_logprobs'])} log-probabilities of {tokens} tokens")
    if "logprob" in kind and (rows > prompt_len or (tokens and rows != prompt_len)):
        victim.complain(f"{where}: log-probabilities of {rows} prompt tokens of {prompt_len}, {tokens} tokens")
    if form in MISSING and pause != "abort" and reason == "abort":
        victim.complain(f"{where}: ended by names that are not its own")
    if reason != "abort":
        return "over already"
    if tokens:
        return "tokens"
    return "part of the prompt" if rows else "no token yet"


def _started(
    victim: Victim, body: dict[str, Any], n: int, answers: list[Any], num_tokens: int = 900
) -> threading.Thread:
    params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "n": n}
    thread = threading.Thread(target=_ask, args=(victim, body | {"sampling_params": params}, answers), daemon=True)
    thread.start()
    return thread


def _ask(victim: Victim, body: dict[str, Any], answers: list[Any]) -> None:
    """Append the samples of a request to `answers`, from its answer or from the last events of its stream."""
    response = victim.call("POST", "/generate", body)
    if response is None or response.status_code != 200:
        if response is not None and response.status_code != 503:
            victim.complain(f"/generate: {response.status_code} {response.text[:120]}")
        answers.append(None)
    elif body.get("stream"):
        answers.append(_last_events(victim, response.text))
    else:
        answers.append(response.json())


def _last_events(victim: Victim, text: str) -> list[dict[str, Any]]:
    import json

    samples: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                victim.complain(f"a stream failed: {event['error']}")
            else:
                samples[event.get("index", 0)] = event
    if "data: [DONE]" not in text:
        victim.complain("a stream without its end")
    return list(samples.values())


def _abort(victim: Victim, names: Any) -> None:
    response = victim.post("/abort_request", rid=names)
    if response is not None and response.status_code != 200:
        victim.complain(f"abort: {response.status_code} {response.text[:120]}")
