"""Clients: groups of samples, conversations, repeated questions, streams, requests that are given up or aborted.

What each client does next is drawn from its own generator.  Answers go to `deliver`; a client reads
only the part that its next request needs.  This module knows requests, and does not know weights.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from rollout.client.sse import DONE, SseDecoder
from tests.soak.calls import Calls, Ended

VOCABULARY = 320
CONTEXT = 1024
MAX_REPEATABLE = 64
ABORT_FORMS = ("the group", "samples", "group and sample", "twice", "among unknown ids", "by prefix", "unknown")


@dataclass
class Delivery:
    """An answer; `may_abort`: the samples that were aborted by name; `asked`, `came`: times of request and answer."""

    body: dict[str, Any]
    answer: bytes
    asked: float
    came: float
    may_abort: set[str] = field(default_factory=set)


class Traffic:
    """`num_clients` threads that ask until `stop`, one request after the other; they wait while it is `too_fast`.

    `hold` keeps them from asking, and returns when all requests are answered.
    """

    def __init__(
        self,
        calls: Calls,
        deliver: Callable[[Delivery], None],
        too_fast: Callable[[], bool],
        *,
        num_clients: int,
        groups: Sequence[int],
        seed: int,
    ) -> None:
        self._calls = calls
        self._deliver = deliver
        self._too_fast = too_fast
        self._groups = groups
        self._names = iter(range(1 << 62))
        self._go = threading.Event()
        self._over = threading.Event()
        self._busy = 0
        self._changed = threading.Condition()
        self._repeatable: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self._all_aborted: list[list[float]] = []  # [from, until]
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed}/{number}"),), daemon=True)
            for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    # --- control ---------------------------------------------------------------------------------------------------

    def go(self) -> None:
        self._go.set()

    def hold(self, timeout_s: float) -> bool:
        """Hold the clients, and return whether all have their answers within the time."""
        self._go.clear()
        with self._changed:
            return self._changed.wait_for(lambda: self._busy == 0, timeout_s)

    def stop(self) -> None:
        self._over.set()
        self._go.set()
        for thread in self._threads:
            thread.join(10)

    @contextmanager
    def aborting_all(self) -> Iterator[None]:
        """Let every sample that is under way meanwhile end as aborted."""
        interval = [time.monotonic(), float("inf")]
        self._all_aborted.append(interval)
        try:
            yield
        finally:
            interval[1] = time.monotonic()

    def may_abort(self, delivery: Delivery) -> set[str] | None:
        """Return the samples that may have been aborted; None: all."""
        everything = any(start <= delivery.came and delivery.asked <= end for start, end in self._all_aborted.copy())
        return None if everything else delivery.may_abort

    def forget(self) -> None:
        """Forget the aborts that are over, when no answer is under way."""
        self._all_aborted.clear()

    # --- clients ---------------------------------------------------------------------------------------------------

    def _client(self, rng: random.Random) -> None:
        kinds: list[tuple[int, str, Callable[[random.Random], None]]] = [
            (5, "groups", self._group),
            (2, "long", self._long),
            (3, "conversations", self._conversation),
            (4, "repeated", self._repeat),
            (3, "streams", self._stream),
            (3, "given up", self._give_up),
            (4, "aborted by name", self._abort),
            (2, "keys of their own", self._unique_key),
        ]
        weights = [weight for weight, _, _ in kinds]
        while not self._over.is_set():
            self._go.wait()
            if self._too_fast():
                time.sleep(0.05)
                continue
            with self._working():
                _, name, play = rng.choices(kinds, weights)[0]
                try:
                    if self._go.is_set() and not self._over.is_set():
                        play(rng)
                        self.counts[name] += 1
                except Ended:
                    time.sleep(0.5)  # the complaint is noted; wait before the next request

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _group(self, rng: random.Random) -> None:
        self.ask(self._body(rng, rng.choice(self._groups)))

    def _long(self, rng: random.Random) -> None:
        """Ask for samples so long that they outlive refreshes."""
        body = self._body(rng, rng.choice((1, 4, 8)))
        body["sampling_params"]["max_new_tokens"] = rng.randint(150, 400)
        self.ask(body)

    def _conversation(self, rng: random.Random) -> None:
        """Ask in turns that continue the answer before, with prefixes in the cache or computed under older weights."""
        body = self._body(rng, 1)
        for _ in range(rng.randint(2, 5)):
            answer = self.ask(body)
            if answer is None or not self._go.is_set():
                return
            said = msgspec.json.decode(answer)["output_ids"]
            prompt = body["input_ids"] + said + _tokens(rng, rng.randint(1, 12))
            body = self._body(rng, 1) | {"input_ids": prompt[: CONTEXT - 100]}

    def _repeat(self, rng: random.Random) -> None:
        """Ask a question that a client asked before, some times in a row."""
        if self._repeatable:
            body = rng.choice(self._repeatable)
            for _ in range(rng.randint(1, 4)):
                self.ask(body | {"rid": self._name()})

    def _unique_key(self, rng: random.Random) -> None:
        self.ask(self._body(rng, rng.choice((1, 4))) | {"extra_key": f"{self._name()}-{rng.random()}" * 8})

    def _stream(self, rng: random.Random) -> None:
        """Read a stream to the end.  Each event must continue the one before."""
        body = self._body(rng, 1) | {"stream": True}
        asked, said, last = time.monotonic(), [], b""
        for event in self._events(body):
            ids = msgspec.json.decode(event).get("output_ids", [])
            if ids[: len(said)] != said:
                self._calls.complain(f"the stream of {body['rid']} took tokens back")
            said, last = ids, event
        if last:
            self._deliver(Delivery(body, last, asked, time.monotonic()))

    def _give_up(self, rng: random.Random) -> None:
        """Go away as a client: in the middle of a stream, or before the answer."""
        if rng.random() < 0.5:
            events = self._events(self._body(rng, 1, max_new=200) | {"stream": True})
            for _ in range(rng.randint(0, 5)):
                next(events, None)
            events.close()
            return
        with httpx.Client(base_url=self._calls.url, trust_env=False) as impatient:
            try:
                impatient.post(
                    "/generate", json=self._body(rng, rng.choice((1, 16, 64))), timeout=rng.uniform(0.02, 0.5)
                )
            except httpx.TimeoutException:
                pass
            except httpx.HTTPError as error:
                self._calls.complain(f"/generate, soon given up: {type(error).__name__}: {error}")

    def _abort(self, rng: random.Random) -> None:
        body = self._body(rng, rng.choice((1, 2, 16, 32, 64)), max_new=120)
        form = rng.choice(ABORT_FORMS)
        ids, hit = _abort_ids(form, body["rid"], body["sampling_params"]["n"], rng)
        timer = threading.Timer(rng.choice((0.0, 0.01, 0.05, 0.2, 0.6)), self._abort_now, (ids,))
        timer.start()
        self.ask(body, hit)
        timer.join()
        self.counts[f"abort: {form}"] += 1

    def _abort_now(self, ids: str | list[str]) -> None:
        try:
            said = self._calls.post("/abort_request", {"rid": ids})
        except Ended:
            return
        if said.status_code != 200:
            self._calls.complain(f"/abort_request: {said.status_code} {said.text[:200]}")

    # --- requests --------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"r{next(self._names)}-s"  # no name is a prefix of another one

    def _body(self, rng: random.Random, samples: int, max_new: int = 64) -> dict[str, Any]:
        """Make a request with settings of all kinds.  Its prompt is of one of a few families that share prefixes."""
        family = random.Random(rng.randrange(12))
        prompt = _tokens(family, 300)[: rng.choice((3, 17, 40, 40, 90, 200, 300))] + _tokens(rng, rng.randint(0, 6))
        params: dict[str, Any] = {
            "n": samples,
            "max_new_tokens": rng.randint(1, 12 if samples > 64 else max_new),
            "temperature": rng.choice((0.0, 0.7, 1.0, 1.0)),
            "seed": rng.randrange(1 << 40),
            "ignore_eos": rng.random() < 0.8,
        }
        if samples == 1 and rng.random() < 0.3:
            params |= rng.choice(({"top_k": 20}, {"top_p": 0.9}))
        body: dict[str, Any] = {
            "rid": self._name(),
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": True,
            "routed_experts_format": "compact",
        }
        if samples <= 16 and rng.random() < 0.25:
            body["logprob_start_len"] = 0
        if rng.random() < 0.25:
            body["max_kv_version_lag"] = rng.choice((0, 0, 1, 2))
        if samples <= 64 and rng.random() < 0.5:
            self._repeatable.append(body)
            del self._repeatable[:-MAX_REPEATABLE]
        return body

    def ask(self, body: dict[str, Any], may_abort: set[str] | None = None) -> bytes | None:
        """Ask, deliver the answer and return it; None if the request was refused."""
        asked = time.monotonic()
        response = self._calls.post("/generate", body)
        if response.status_code != 200:
            if response.status_code < 500:
                self._calls.complain(f"/generate: {response.status_code} {response.text[:300]}")
            return None
        self._deliver(Delivery(body, response.content, asked, time.monotonic(), may_abort or set()))
        return response.content

    def _events(self, body: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events of a stream.  Closing the iterator breaks the connection."""
        decoder = SseDecoder()
        try:
            with self._calls.client.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    self._calls.complain(f"/generate, stream: {response.status_code} {response.read()[:300]!r}")
                    return
                for chunk in response.iter_bytes():
                    for event in decoder.feed(chunk):
                        if event == DONE:
                            return
                        yield event
        except httpx.HTTPError as error:
            self._calls.complain(f"/generate, stream: {type(error).__name__}: {error}")
            raise Ended("/generate") from error
        self._calls.complain(f"the stream of {body['rid']} ended before it was done")


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _abort_ids(form: str, rid: str, samples: int, rng: random.Random) -> tuple[str | list[str], set[str]]:
    """Return the ids that an abort names, and the samples that it may hit."""
    everyone = [f"{rid}_{number}" for number in range(samples)] if samples > 1 else [rid]
    some = rng.sample(everyone, (len(everyone) + 1) // 2)
    unknown = [f"{rid}x", "", "r", f"{rid}_{samples}", f"{rid}_0_0"]
    forms: dict[str, tuple[str | list[str], set[str]]] = {
        "the group": (rid, set(everyone)),
        "samples": (some, set(some)),
        "group and sample": ([rid, some[0], rid], set(everyone)),
        "twice": (some * 2, set(some)),
        "among unknown ids": ([*unknown, some[0], *unknown], set(some[:1])),
        "by prefix": (rid[:-1], set()),
        "unknown": (unknown, set()),
    }
    return forms[form]
