"""Sends mutated bodies over several connections and judges each answer, and the server between slices of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.abuse import aftermath
from tests.abuse.registry import BASE, OPEN
from tests.abuse.schema import Body, Operation, encode
from tests.abuse.server import AT_REST, SERVE, Harmed, Setup, Victim, shown
from tests.abuse.usage import MB
from tests.bodies.mutate import mutated
from tests.bodies.seeds import EXCLUDED, SELDOM, seeds, structured

SETTINGS = OPEN.settings | BASE | {"context_length": 256, "max_running_requests": 8, "max_total_tokens": 8192}
SETUP = Setup("bodies", SETTINGS)
SLICE = 2000
"""Bodies between two looks at the server."""
WORKERS = 6
PAUSING = {
    "/sleep",
    "/pause",
    "/pause_generation",
    "/release_memory_occupation",
    "/areal_pause_generation",
    "/collective_rpc",
}
"""Endpoints after which a server need not answer requests."""
CALL_S = 20.0
GENERATE_S = 5.0
"""Seconds until the client of a request for tokens goes away: a body may rightly ask for thousands of tokens."""
MAX_LEFT = 0.02
"""Share of bodies whose client may go away."""
WARM_SLICES = 3
"""Slices until the memory of a server counts as settled."""
GROWTH_MB = 48
"""Megabytes by which all processes together may grow after that, however many bodies follow."""


@dataclass
class Found:
    """The results of a run: answers by status, memory after each slice in MB, and all that was wrong.

    Status 0 counts requests for tokens whose client went away.
    """

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    memory_mb: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Bodies:
    """The sequence of mutated bodies of a seed, for the endpoints of one server."""

    def __init__(self, victim: Victim, seed: int) -> None:
        self._seed = seed
        self._seeds = seeds(victim)
        self._operations = sorted(
            (one for one in victim.operations if one.path in self._seeds), key=lambda one: (one.path, one.method)
        )
        rich = [one for one in self._operations if structured(one) and one.path not in EXCLUDED]
        self._weighted = [*self._operations, *rich, *rich, *rich]

    def make(self, number: int) -> tuple[Operation, bytes]:
        """Return the endpoint and the body of a number: the same in every run of the seed."""
        rng = random.Random(f"{self._seed} {number}")
        one = rng.choice(self._weighted)
        while one.path in EXCLUDED and rng.randrange(SELDOM):
            one = rng.choice(self._weighted)
        body: Body = rng.choice(self._seeds[one.path])
        return one, encode(mutated(rng, body, structured(one)))


def play(
    model: Path,
    seed: int,
    numbers: range,
    said: Callable[[Found], None] = lambda found: None,
    *,
    slice_len: int = SLICE,
    module: tuple[str, ...] = SERVE,
    prepare: Callable[[Victim], object] = lambda victim: None,
) -> Found:
    """Send the bodies of `numbers`, and report to the callback after each slice.  Ends when the server has ended.

    `module` and `prepare` break servers on purpose.
    """
    found = Found()
    victim = Victim(SETUP, model, module)
    try:
        _rest(victim)
        bodies, before = Bodies(victim, seed), aftermath.answer(victim)
        prepare(victim)
        with ThreadPoolExecutor(WORKERS) as pool:
            for part in _slices(numbers, slice_len):
                sent = dict(pool.map(lambda number: _send(victim, bodies, number), part))
                found.sent += len(part)
                _look(victim, found, before, sent)
                said(found)
                if not victim.running:
                    break
        _judge_memory(found)
        if found.statuses[0] > MAX_LEFT * found.sent + 5:
            found.wrong.append(f"{found.statuses[0]} of {found.sent} requests for tokens had no answer in time")
        if victim.running:
            found.wrong += victim.stop()
    finally:
        victim.close()
    return found


def _send(victim: Victim, bodies: Bodies, number: int) -> tuple[str, int]:
    """Send one body; return how a complaint of it begins, and its number."""
    one, content = bodies.make(number)
    if victim.running:
        timeout = CALL_S if one.is_control else GENERATE_S
        response = victim.call(one.method, one.path, content=content, timeout=timeout)
        if one.path in PAUSING and response is not None and response.status_code == 200:
            for path in ("/resume_memory_occupation", "/continue_generation"):
                victim.post(path)  # at once, so that other bodies do not wait for the end of the slice
    return f"{one.method} {one.path} {shown(content)}", number


def _look(victim: Victim, found: Found, before: object, sent: dict[str, int]) -> None:
    """Bring the server to rest, and judge it there."""
    found.statuses += victim.statuses
    control = {f"{one.method} {one.path} " for one in victim.operations if one.is_control}
    for complaint in victim.complaints:
        if complaint.endswith("ReadTimeout") and not any(map(complaint.startswith, control)):
            found.statuses[0] += 1
        else:
            found.wrong.append(f"{complaint} (body {_number(complaint, sent)})")
    if victim.running:
        try:
            _rest(victim)
            if aftermath.answer(victim) != before:
                found.wrong.append("the fixed request has another answer than before")
        except Harmed as error:
            found.wrong.append(str(error))
        found.memory_mb.append(victim.usage().rss / MB)
    if victim.ends_within(1.0):
        found.wrong.append(f"the server ended: {victim.last_words()}")
    victim.complaints.clear()
    victim.statuses.clear()


def _number(complaint: str, sent: dict[str, int]) -> int | None:
    return next((number for beginning, number in sent.items() if complaint.startswith(beginning)), None)


def _rest(victim: Victim) -> None:
    """End what bodies began, and load the first weights again.  Raises `Harmed`."""
    victim.new_connection()
    victim.post("/abort_request", abort_all=True)
    for path in (*AT_REST, "/stop_expert_distribution_record", "/destroy_weights_update_group"):
        victim.post(path)
    for _attempt in range(3):
        victim.post("/continue_generation")
    aftermath.restore(victim)
    deadline = time.monotonic() + aftermath.SETTLE_S
    while victim.right("GET", "/server_info").json()["internal_states"][0]["num_running_reqs"]:
        if time.monotonic() > deadline:
            raise Harmed("requests run on after all were aborted")
        time.sleep(0.05)


def _judge_memory(found: Found) -> None:
    settled = found.memory_mb[WARM_SLICES:]
    if settled and settled[-1] - settled[0] > GROWTH_MB:
        found.wrong.append(f"memory grew from {settled[0]:.0f} to {settled[-1]:.0f} MB")


def _slices(numbers: range, slice_len: int) -> Iterator[range]:
    for first in range(0, len(numbers), slice_len):
        yield numbers[first : first + slice_len]
