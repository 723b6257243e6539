"""Plays attacks against servers, each watched and judged; a server that an attack ended is started anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.abuse import aftermath
from tests.abuse.prober import Prober, Sample, percentile
from tests.abuse.registry import Attack
from tests.abuse.server import SERVE, Harmed, Setup, Victim
from tests.abuse.usage import MB

HEALTH_P99_S = 1.0


@dataclass(frozen=True)
class Played:
    """The result of one attack on one server; `wrong` is empty if all is as it must be."""

    attack: str
    server: str
    said: str
    wrong: list[str]
    seconds: float
    health: list[Sample]
    peak_mb: float
    kept_mb: float


class Siege:
    """The server of a setup; with `renew`, it is started anew after each attack that did harm."""

    def __init__(self, setup: Setup, model: Path, module: tuple[str, ...] = SERVE, renew: bool = True) -> None:
        self._renew = renew
        self._start = lambda: Victim(setup, model, module)
        self.victim: Victim | None = None
        self.prober: Prober | None = None

    def __enter__(self) -> Siege:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def play(self, attack: Attack) -> Played:
        """Play one attack and return its result."""
        victim, prober = self.server()
        started = time.monotonic()
        try:
            before = aftermath.look(victim)
        except Harmed as error:
            said = f"before the attack: {error}"
            self._close()
            return Played(attack.name, victim.setup.name, "", [said], time.monotonic() - started, [], 0.0, 0.0)
        victim.complaints.clear()
        victim.statuses.clear()
        said, wrong = self._attack(victim, attack)
        counted = " ".join(f"{status}:{number}" for status, number in sorted(victim.statuses.items()))
        wrong += aftermath.check(victim, attack, before)
        health = prober.since(started)
        late = percentile(health, 0.99)
        if victim.running and late >= HEALTH_P99_S:
            wrong.append(f"prober: /health p99 {late:.2f} s, at most {percentile(health, 1.0):.2f} s")
        after = victim.usage()
        peak, kept = ((bytes_ - before.usage.rss) / MB for bytes_ in (after.peak_rss, after.rss))
        wrong = [*_shortened(victim.complaints), *wrong]
        if wrong and (self._renew or not victim.running):
            self._close()
        note = ", ".join(part for part in (said, counted) if part)
        return Played(
            attack.name, victim.setup.name, note, wrong, time.monotonic() - started, health, max(0.0, peak), kept
        )

    def end(self) -> list[str]:
        """Stop the server as its owner does; return what is wrong with how it ended."""
        wrong = self.victim.stop() if self.victim is not None else []
        self._close()
        return wrong

    def _attack(self, victim: Victim, attack: Attack) -> tuple[str, list[str]]:
        """Play the attack; return its note and every fault found.  If it does not end in time, the server is killed."""
        overdue = threading.Event()

        def end() -> None:
            overdue.set()
            victim.kill()

        watchdog = threading.Timer(attack.seconds, end)
        watchdog.daemon = True
        watchdog.start()
        try:
            said, wrong = attack.play(victim), []
        except Harmed as error:
            said, wrong = "", [str(error)]
        finally:
            watchdog.cancel()
        if overdue.is_set():
            wrong = [f"not over within {attack.seconds:g} s", *wrong]
        return said, wrong

    def server(self) -> tuple[Victim, Prober]:
        """Return the server that runs and its prober, or new ones."""
        if self.victim is None or self.prober is None or not self.victim.running:
            self._close()
            self.victim = self._start()
            self.prober = Prober(self.victim.port)
            warm_up(self.victim)
        return self.victim, self.prober

    def _close(self) -> None:
        if self.prober is not None:
            self.prober.close()
        if self.victim is not None:
            self.victim.close()
        self.victim = self.prober = None


def warm_up(victim: Victim) -> None:
    """Touch what is allocated once: staging memory, thread pools, code that is loaded late."""
    aftermath.restore(victim)
    for body in ({"text": "warm " * 100}, {"input_ids": [5] * 2000, "return_logprob": True, "logprob_start_len": 0}):
        victim.right("POST", "/generate", body | {"sampling_params": {"max_new_tokens": 64, "ignore_eos": True}})
    aftermath.checksum(victim)
    victim.right("POST", "/flush_cache")


def play_all(
    setups: Sequence[Setup],
    attacks: Sequence[Attack],
    model: Path,
    say: Callable[[Played], None] = lambda played: None,
) -> list[Played]:
    """Play every attack on every server that it is for."""
    results = []
    for setup in setups:
        chosen = [attack for attack in attacks if setup.name in attack.on]
        if not chosen:
            continue
        with Siege(setup, model) as siege:
            for attack in chosen:
                results.append(siege.play(attack))
                say(results[-1])
            started = time.monotonic()
            wrong = siege.end()
            results.append(Played("SIGTERM at the end", setup.name, "", wrong, time.monotonic() - started, [], 0, 0))
            say(results[-1])
    return results


def _shortened(complaints: Sequence[str], most: int = 6) -> list[str]:
    """Return the first complaints, and the number of the others."""
    more = len(complaints) - most
    return [*complaints[:most], *([f"and {more} further complaints"] if more > 0 else [])]
