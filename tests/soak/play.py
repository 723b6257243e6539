"""One layout for some time: a server, its clients, its trainer and strangers; rounds of work with rest between them."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.model_zoo import logical_tensors
from tests.server_process import ServerProcess
from tests.soak.calls import Calls, Ended
from tests.soak.gauges import Curves, Gauges
from tests.soak.in_force import InForce
from tests.soak.judge import JudgeProcess, Tally
from tests.soak.samples import Violation
from tests.soak.strangers import Strangers, resume
from tests.soak.traffic import Delivery, Traffic
from tests.soak.trainer import Refresh, Trainer

MODEL: dict[str, Any] = {"kind": "moe_dense_first", "seed": 5, "context_length": 1024, "dtype": "float32"}
SETTINGS: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "max_total_tokens": 3000,  # a few of the larger groups need ten times as many
    "chunked_prefill_size": 96,
    "num_threads": 1,
    "weight_update_timeout": 15,
    "log_level": "warning",
}
DRAIN_S = 120.0
JUDGE_S = 300.0


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    settings: dict[str, Any]
    clients: int = 6
    groups: tuple[int, ...] = (16, 16, 16, 24, 32, 32, 64, 128, 256, 512)
    strangers_every_s: float = 3.0


LAYOUTS = {
    "1": Layout("one rank", 1, {}),
    "2x2": Layout(
        "2 x 2 ranks",
        4,
        {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4, "moe_a2a_backend": "all_to_all"},
        clients=4,
    ),
}


@dataclass
class Played:
    """The result of one layout.  `wrong`: failures that neither the judge nor the calls have noted."""

    layout: Layout
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list)
    calls: Calls | None = None
    requests: Counter[str] = field(default_factory=Counter)
    strangers: Counter[str] = field(default_factory=Counter)
    refreshes: list[Refresh] = field(default_factory=list)
    commits: int = 0
    generated: int = 0
    started: float = 0.0
    curves: Curves = field(default_factory=Curves)
    left_files: list[str] = field(default_factory=list)
    log_bytes: int = 0
    tracebacks: int = 0
    exit_status: int | None = None


class Soak:
    """The clients, strangers, trainer and judge around one server, and their rounds."""

    def __init__(
        self, server: ServerProcess, layout: Layout, model: Path, scratch: Path, seed: int, judge: JudgeProcess
    ) -> None:
        self._server = server
        self.calls = Calls(server.url)
        self.judge = judge
        self._waiting: deque[Delivery] = deque()
        self.traffic = Traffic(
            self.calls,
            self._waiting.append,
            lambda: self.judge.behind,
            num_clients=layout.clients,
            groups=layout.groups,
            seed=seed,
        )
        self.strangers = Strangers(self.calls, self.traffic, layout.strangers_every_s, seed)
        tensors = logical_tensors(model)
        self.in_force = InForce(self.calls, scratch, tensors, self.judge.tell, self._release)
        self.trainer = Trainer(
            self.calls,
            self.in_force,
            self.traffic,
            self.strangers,
            model=model,
            scratch=scratch,
            ranks=layout.ranks,
            seed=seed,
        )
        self.gauges = Gauges(server.process.pid, self.state, every_s=1.0)

    def round(self, seconds: float, say: Callable[[str], None]) -> None:
        """Run one round of work and rest.  Raises `Violation`, or `Ended` when the server is gone."""
        until = time.monotonic() + seconds
        self.traffic.go()
        self.strangers.go()
        while time.monotonic() < until:
            if self._server.process.poll() is not None:
                raise Ended("the server ended")
            self.trainer.episode()
            say(f"{len(self.trainer.refreshes)} refreshes, {self.in_force.num_commits} came into force")
        self.strangers.hold()
        resume(self.calls)
        if not self.traffic.hold(DRAIN_S):
            raise Violation(f"requests were not over {DRAIN_S:g} s after the last of them came")
        self.trainer.rest()
        self._rest()
        self.in_force.forget()
        self.traffic.forget()

    def stop(self) -> None:
        """Stop everything that asks the server: gauges, strangers, traffic."""
        for one in (self.gauges, self.strangers, self.traffic):
            one.stop()

    def _release(self, before: float) -> None:
        """Send the answers that came before this time to the judge, as all weights that explain them are known now."""
        while self._waiting and self._waiting[0].came < before:
            delivery = self._waiting.popleft()
            self.judge.tell("answer", delivery.body, delivery.answer, self.traffic.may_abort(delivery))

    def _rest(self) -> None:
        """Require that nothing is in use.  Raises `Violation`."""
        if self._waiting:
            raise Violation(f"{len(self._waiting)} answers use weights of which nothing is known")
        deadline = time.monotonic() + 10.0  # the server notices clients that went away a little later
        while True:
            flushed = self.calls.post("/flush_cache")
            loads = self.calls.get("/v1/loads").json()["loads"]
            used = [(load["num_reqs"], load["num_used_tokens"]) for load in loads]
            if flushed.status_code == 200 and not any(map(any, used)):
                break
            if time.monotonic() > deadline:
                raise Violation(f"at rest there are (requests, KV slots in use) {used}: {flushed.text.strip()}")
            time.sleep(0.05)
        with self.gauges.quiet():
            self.calls.new_connections()
            time.sleep(0.3)  # until the server has closed its ends
            self.gauges.rest()

    def state(self) -> dict[str, Any] | None:
        try:
            answer = self.calls.get("/server_info")
        except Ended:
            return None
        return answer.json()["internal_states"][0] if answer.status_code == 200 else None


def play(
    layout: Layout,
    model: Path,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
    new_judge: Callable[[Path], JudgeProcess] = JudgeProcess,
    first: Callable[[Soak], None] = lambda _: None,
) -> Played:
    """Play one layout for some time.  `first` is called before any other client starts."""
    played = Played(layout, started=time.monotonic())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, (Path(folder) / "log").open("w+") as log:
        with _server(model, layout, log) as server:
            soak = Soak(server, layout, model, Path(folder), seed, new_judge(model))
            played.calls, played.started = soak.calls, time.monotonic()
            try:
                first(soak)
                _rounds(soak, played, seconds, say)
            except (Violation, Ended) as error:
                played.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                _take_down(soak, played, server)
        said = Path(log.name).read_text(errors="replace")
        played.log_bytes, played.tracebacks = len(said.encode()), said.count("Traceback (most recent call last)")
        if played.exit_status != 0 or played.tracebacks:
            played.wrong.append(f"the server's last words: {said[-1500:]}")
    return played


def _rounds(soak: Soak, played: Played, seconds: float, say: Callable[[str], None]) -> None:
    start, length, number = time.monotonic(), min(60.0, max(10.0, seconds / 8)), 0
    told: set[str] = set()

    def progress(what: str) -> None:
        tally = soak.judge.look()
        for wrong in [*tally.complaints, *soak.calls.complaints]:
            if wrong not in told:
                print(f"WRONG {played.layout.name}: {wrong}", file=sys.stderr, flush=True)
                told.add(wrong)
        spent = f"{played.layout.name}: {time.monotonic() - start:.0f} of {seconds:.0f} s, round {number}"
        say(f"{spent}, {tally.samples} samples explained, {what}, {tally.wrong + soak.calls.num_wrong} wrong")

    while (left := start + seconds - time.monotonic()) > min(5.0, length / 2) or not number:
        number += 1
        soak.round(min(length, left), progress)


def _take_down(soak: Soak, played: Played, server: ServerProcess) -> None:
    state = soak.state() if server.process.poll() is None else None
    played.generated = 0 if state is None else state["num_generated_tokens"]
    soak.stop()
    played.seconds = time.monotonic() - played.started
    try:
        played.tally = soak.judge.finish(JUDGE_S)
    except RuntimeError as error:
        played.tally = soak.judge.look()
        played.wrong.append(str(error))
    soak.judge.close()
    played.requests, played.strangers = soak.traffic.counts, soak.strangers.counts
    played.refreshes, played.commits = soak.trainer.refreshes, soak.in_force.num_commits
    played.curves = soak.gauges.curves
    if server.process.poll() is None:
        server.process.terminate()
    played.exit_status = server.wait_exit(60)
    played.left_files = server.leftovers()


@contextmanager
def _server(model: Path, layout: Layout, log: Any) -> Iterator[ServerProcess]:
    with ExitStack() as stack:
        server = ServerProcess(model, **SETTINGS, **layout.settings, stderr=log)
        stack.callback(server.close)
        server.wait_ready()
        yield server
