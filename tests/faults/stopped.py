"""Ranks that stop and go on (SIGSTOP, SIGCONT) and ranks that die (SIGKILL), at each point of each weight verb.

Each rank is the worker process of a server, with its deadlines shortened; this process is the main process of it.  A
rank stops itself at the point for which it is armed, and goes on before the deadline of the others or after it, or it
kills itself.  Then there are two ways to be right: all ranks serve one version, in force by the answer to the verb, and
take a good refresh; or the engine has ended with a reason.  Nothing takes longer than `LIMIT_S`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import zmq
from safetensors.torch import save

from rollout.control.rank_consensus import RankConsensus
from rollout.control.weight_queue import WeightQueue
from rollout.core.io_struct import (
    BatchTokenOutput,
    ContinueGenerationReqInput,
    ControlReqOutput,
    PauseGenerationReqInput,
    SchedulerFailed,
    SchedulerReady,
    TokenizedGenerateReqInput,
    decode_output,
    encode,
)
from rollout.core.message import ControlReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.core.server_args import ServerArgs
from rollout.core.weight_io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from rollout.distributed.layout import layout_of
from rollout.engine import worker
from rollout.model_executor.model_state import ModelState
from rollout.scheduler.scheduler import Scheduler
from tests.faults.contents import NEW_TOKENS, PROMPT, Version, Zoo, harness_settings
from tests.faults.engines import Outcome, Wrong
from tests.faults.injections import hook
from tests.faults.killed import forkserver
from tests.faults.matrix import Played
from tests.faults.wrong_engines import wrong_engines

How = Literal["stops for a moment", "stops for long", "dies"]
HOWS: tuple[How, ...] = ("stops for a moment", "stops for long", "dies")
DEADLINE_S = 4.0
"""Of every collective; 120 s in a server."""
_MOMENT_S, _LONG_S = 0.5, DEADLINE_S + 1.5
LIMIT_S = 60.0  # of anything; the machine may be busy
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 ranks": {"tp_size": 2},
    "3 replicas": {"dp_size": 3},
    "2 replicas of 2": {"tp_size": 2, "dp_size": 2},
    "4 ranks": {"tp_size": 4, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
}
_POINTS: dict[str, tuple[str, ...]] = {
    "begin": ("exchange",),
    "bucket": ("taken", "at work", "exchange", "exchanged"),
    "verify": ("exchange", "exchanged"),
    "commit": ("taken", "exchanged", "vote", "voted", "published", "answered"),
    "continue": ("exchange", "vote", "voted"),
    "abort": ("exchange",),
    "relabel": ("exchange", "answered"),
}


@dataclass(frozen=True)
class StopCell:
    """The rank `victim`, counted from the first, `how`, at a point of a verb."""

    layout: str
    verb: str
    point: str
    how: How
    victim: int

    @property
    def title(self) -> str:
        return f"{self.verb}: a rank {self.how}"

    def __str__(self) -> str:
        return f"rank {self.victim} of {self.layout} {self.how} | {self.verb}: {self.point}"


def cells(layout: str) -> Iterator[StopCell]:
    """All points; the victim by turns."""
    ranks = layout_of(ServerArgs(model_path="", **LAYOUTS[layout])).world_size
    for turn, (verb, point) in enumerate((verb, point) for verb, points in _POINTS.items() for point in points):
        for number, how in enumerate(HOWS):
            yield StopCell(layout, verb, point, how, (turn + number) % ranks)


class Ended(Exception):
    """The engine has ended; the message is the reason."""


# --- the main process ------------------------------------------------------------------------------------------------


class LiveRanks:
    """The ranks of one server.  `in_force` is what the caller has last found to serve."""

    def __init__(self, zoo: Zoo, layout: str, wrong: str | None = None) -> None:
        self.zoo, self.in_force = zoo, Version("v0", 0)
        self.reasons: list[str] = []
        settings = harness_settings() | LAYOUTS[layout] | {"num_threads": 1, "random_seed": 1}
        args = ServerArgs(model_path=str(zoo.checkpoints[0]), weight_version="v0", **settings)
        args.validate()
        self._layout, self._num_answers = layout_of(args), args.dp_size
        self._folder = tempfile.TemporaryDirectory(prefix="ls-")
        self._context = zmq.Context()
        self._pull = self._socket(zmq.PULL, "output")
        self._pushes = [self._socket(zmq.PUSH, f"input{n}") for n in range(self._layout.num_replicas)]
        self._armed, self._processes = [], []
        for rank in range(self._layout.world_size):
            armed = forkserver().Array("c", 64)
            config = json.dumps(self._config(args, rank))
            process = forkserver().Process(target=_rank_main, args=(config, armed, wrong), daemon=True)
            process.start()
            self._armed.append(armed)
            self._processes.append(process)
        self._partial: dict[str, list[ControlReqOutput]] = {}
        self._answers: dict[str, ControlReqOutput] = {}
        self._outputs: dict[str, list[Any]] = {}
        self._num_ready, self._numbers = 0, itertools.count(1)
        self.wait(lambda: self._num_ready == self._num_answers)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(LIMIT_S)
        for socket in (self._pull, *self._pushes):
            socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def arm(self, cell: StopCell) -> None:
        self._armed[cell.victim].value = f"{cell.point}|{cell.how}".encode()

    def go_on_when_stopped(self, cell: StopCell) -> None:
        """Wait until the victim stands still, and let it go on in time, or late."""
        pid = self._processes[cell.victim].pid
        self.wait(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        time.sleep(_MOMENT_S if cell.how == "stops for a moment" else _LONG_S)
        os.kill(pid, signal.SIGCONT)

    def post(self, verb: type[ControlReqInput], **fields: Any) -> str:
        request_id = f"c{next(self._numbers)}"
        self._send(verb(request_id=request_id, deadline=time.monotonic() + LIMIT_S, **fields))
        return request_id

    def answer(self, request_id: str) -> ControlReqOutput:
        """Raises `Ended`, and `Wrong` where neither comes."""
        self.wait(lambda: request_id in self._answers)
        return self._answers[request_id]

    def call(self, verb: type[ControlReqInput], **fields: Any) -> ControlReqOutput:
        return self.answer(self.post(verb, **fields))

    def good(self, verb: type[ControlReqInput], **fields: Any) -> None:
        answer = self.call(verb, **fields)
        if not answer.success:
            raise Wrong(f"a good {verb.__name__} is refused: {answer.message}")

    def ask(self) -> list[tuple[str, tuple[int, ...], tuple[float, ...]]]:
        """What every data-parallel rank says: its label, tokens and log-probabilities."""
        rids = [f"r{next(self._numbers)}" for _ in range(self._num_answers)]
        for dp_rank, rid in enumerate(rids):
            params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
            self._send(
                TokenizedGenerateReqInput(
                    rid=rid,
                    input_ids=list(PROMPT),
                    sampling_params=params,
                    return_logprob=True,
                    extra_key=rid,
                    dp_rank=dp_rank,
                )
            )
        self.wait(lambda: all(self._outputs.get(rid, [None])[-1] is not None for rid in rids))
        return [self._said(rid) for rid in rids]

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Take messages until it is.  Raises `Ended`, `Wrong` after `LIMIT_S`."""
        until = time.monotonic() + LIMIT_S
        while not is_there():
            while self._pull.poll(20):
                self._take(decode_output(self._pull.recv()))
            if any(process.exitcode is not None for process in self._processes) and not is_there():
                self._end()
            if time.monotonic() > until:
                raise Wrong(f"{LIMIT_S:g} s went by with neither an answer nor an end")

    def _end(self) -> None:
        """One rank is gone: the others are killed, as by a server."""
        time.sleep(0.3)
        while self._pull.poll(100):
            self._take(decode_output(self._pull.recv()))
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode is not None}
        killed = [rank for rank, code in codes.items() if code == -signal.SIGKILL]
        reasons = [*self.reasons, *(f"rank {rank} was killed" for rank in killed)]
        if not reasons:
            raise Wrong(f"the engine ended without a reason: exit statuses {codes}")
        raise Ended(reasons[0])

    def _take(self, message: Any) -> None:
        if isinstance(message, SchedulerFailed):
            self.reasons.append(message.message)
        elif isinstance(message, SchedulerReady):
            self._num_ready += 1
        elif isinstance(message, BatchTokenOutput):
            for output in message.outputs:
                self._outputs.setdefault(output.rid, []).append(output)
                if output.finished is None:
                    self._outputs[output.rid].append(None)
        else:
            answers = self._partial.setdefault(message.request_id, [])
            answers.append(message)
            if len(answers) == self._num_answers:
                self._answers[message.request_id] = next((one for one in answers if not one.success), answers[0])

    def _said(self, rid: str) -> tuple[str, tuple[int, ...], tuple[float, ...]]:
        outputs = [output for output in self._outputs.pop(rid) if output is not None]
        reason = outputs[-1].finished.reason
        if reason.type != "length":
            raise Wrong(f"a request ended with {reason.type}: {reason.message}")
        tokens = tuple(token for output in outputs for token in output.token_ids)
        logprobs = tuple(value for output in outputs for value in output.logprobs.values)
        return outputs[-1].weight_version, tokens, logprobs

    def _send(self, message: Any) -> None:
        pushes = self._pushes
        if len(pushes) > 1 and isinstance(message, TokenizedGenerateReqInput):
            pushes = [pushes[message.dp_rank]]
        for push in pushes:
            try:
                push.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:  # nobody is there to take it
                self.wait(lambda: False)

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.bind(f"ipc://{self._folder.name}/{name}")
        return socket

    def _config(self, args: ServerArgs, rank: int) -> dict[str, Any]:
        place = self._layout.position(rank)
        return {
            "server_args": args.public_dict(),
            "rank": rank,
            "rendezvous": f"{self._folder.name}/ranks",
            "input_addr": f"ipc://{self._folder.name}/input{place.replica}" if place.is_inbox_owner else None,
            "output_addr": f"ipc://{self._folder.name}/output",
            "remote_output_addr": None,
        }


# --- playing ---------------------------------------------------------------------------------------------------------


class Player:
    """Plays the cells of one layout, on one server as long as it lives.

    What the versions say is asked of a server of this layout to which nothing has happened.
    """

    def __init__(self, zoo: Zoo, layout: str, wrong: str | None = None) -> None:
        self._zoo, self._layout, self._wrong = zoo, layout, wrong
        self._ranks: LiveRanks | None = None
        self._numbers = itertools.count(1)
        self._expected: dict[int, Any] = {}
        ranks = self._server()
        for content in (0, 1):
            if content:
                self._refresh(ranks, Version("v1", content))
            self._expected[content] = [said[1:] for said in ranks.ask()]
        assert self._expected[0] != self._expected[1]

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def play(self, cell: StopCell) -> Played:
        start = time.perf_counter()
        outcome, wrong = None, None
        try:
            outcome = self._play(cell)
        except Wrong as error:
            wrong = f"rank {cell.victim}: {error}"
        if outcome in (None, "ENDED"):
            self.close()
        seconds = time.perf_counter() - start
        return Played(cell.title, cell.point, cell.layout, "host", outcome, wrong, seconds)

    def _server(self) -> LiveRanks:
        if self._ranks is None:
            self._ranks = LiveRanks(self._zoo, self._layout, self._wrong)
        return self._ranks

    def _play(self, cell: StopCell) -> Outcome:
        ranks = self._server()
        old = ranks.in_force
        new = Version(f"n{next(self._numbers)}", 1 - old.content)
        try:
            answer = self._fault(ranks, cell, new)
            outcome = self._outcome(ranks, old, new)
            if cell.verb in ("commit", "continue", "relabel") and answer.success != (outcome == "new"):
                raise Wrong(f"{outcome} serves, and the answer was: {answer.message or answer.success}")
            with suppress(Wrong):
                ranks.good(AbortWeightUpdateReqInput)
            self._refresh(ranks, Version(f"g{next(self._numbers)}", 1 - ranks.in_force.content))
            self._outcome(ranks, ranks.in_force, ranks.in_force)
        except Ended as error:
            if cell.how == "stops for a moment":
                raise Wrong(f"a moment ended the engine: {error}") from None
            return "ENDED"
        return outcome

    def _fault(self, ranks: LiveRanks, cell: StopCell, new: Version) -> ControlReqOutput:
        """The verb, with what must come before it."""
        verb, fields = self._lead_up(ranks, cell.verb, new)
        ranks.arm(cell)
        request_id = ranks.post(verb, **fields)
        if cell.how != "dies":
            ranks.go_on_when_stopped(cell)
        return ranks.answer(request_id)

    def _lead_up(self, ranks: LiveRanks, verb: str, new: Version) -> tuple[type[ControlReqInput], dict[str, Any]]:
        bucket = {"payload": self._payload(new), "format": "safetensors"}
        if verb == "relabel":
            return UpdateWeightVersionReqInput, {"new_version": new.label}
        if verb == "continue":
            ranks.good(PauseGenerationReqInput, mode="in_place")
            ranks.good(UpdateWeightsFromTensorReqInput, **bucket, weight_version=new.label)
            return ContinueGenerationReqInput, {}
        if verb == "begin":
            return BeginWeightUpdateReqInput, {"weight_version": new.label}
        ranks.good(BeginWeightUpdateReqInput, weight_version=new.label)
        if verb == "bucket":
            return UpdateWeightsFromTensorReqInput, bucket
        ranks.good(UpdateWeightsFromTensorReqInput, **bucket)
        if verb == "abort":
            return AbortWeightUpdateReqInput, {}
        if verb == "commit":
            ranks.good(EndWeightUpdateReqInput, phase="verify")
        return EndWeightUpdateReqInput, {"phase": verb}

    def _outcome(self, ranks: LiveRanks, old: Version, new: Version) -> Outcome:
        """Which of the two all ranks serve, by label and by content.  Raises `Wrong` for anything else."""
        said = ranks.ask()
        for outcome, label, contents in (("old", old.label, {old.content}), ("new", new.label, {0, 1})):
            for content in contents:
                if said == [(label, *words) for words in self._expected[content]]:
                    ranks.in_force = Version(label, content)
                    return outcome  # type: ignore[return-value]
        raise Wrong(f"neither {old} nor {new} serves on all ranks, but labels {[label for label, _, _ in said]}")

    def _refresh(self, ranks: LiveRanks, version: Version) -> None:
        ranks.good(BeginWeightUpdateReqInput, weight_version=version.label)
        ranks.good(UpdateWeightsFromTensorReqInput, payload=self._payload(version), format="safetensors")
        ranks.good(EndWeightUpdateReqInput)
        ranks.in_force = version

    def _payload(self, version: Version) -> bytearray:
        return bytearray(save(self._zoo.contents[version.content]))


def play_all(zoo: Zoo, layout: str, chosen: Callable[[StopCell], bool], wrong: str | None = None) -> Iterator[Played]:
    """The chosen cells of a layout.  `wrong`: with ranks that break this rule."""
    player = Player(zoo, layout, wrong)
    try:
        yield from (player.play(cell) for cell in cells(layout) if chosen(cell))
    finally:
        player.close()


# --- a rank ----------------------------------------------------------------------------------------------------------


def _rank_main(config: str, armed: Any, wrong: str | None) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it has to say is a message
    kept = ExitStack()  # for the life of the process
    if wrong is not None:
        kept.enter_context(wrong_engines("stopped")[wrong]())
    _set_traps(armed)
    worker.CONSEQUENCE_WAIT_S = 0.1
    build = worker.build_scheduler

    def build_with_short_deadlines(args: Any, channel: Any, progress: Any, parallel: Any) -> Any:
        built = build(args, channel, progress, parallel)
        for communicator in parallel.communicators:
            communicator.timeout_s = DEADLINE_S
        return built

    worker.build_scheduler = build_with_short_deadlines
    sys.argv = ["worker", "--config", json.dumps(json.loads(config) | {"parent_pid": os.getppid()})]
    os._exit(worker.main())


def _set_traps(armed: Any) -> None:
    def at(point: str) -> None:
        name, _, how = armed.value.decode().partition("|")
        if point and name == point:
            armed.value = b""
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    def trap(owner: Any, name: str, before: str | None, after: str | None) -> None:
        hook(owner, name, lambda _: at(before or ""), lambda: at(after or "")).start()

    trap(WeightQueue, "_start", "taken", None)
    trap(RankConsensus, "run", "at work", None)
    trap(RankConsensus, "_share", "exchange", "exchanged")
    trap(RankConsensus, "commit_vote", "vote", "voted")
    trap(ModelState, "publish_weights", None, "published")
    trap(Scheduler, "reply", None, "answered")
