"""The ranks of a server as processes, with their deadlines shortened; this process is the main process of the server.

A rank stops itself (SIGSTOP) or dies (SIGKILL) at the point for which it is armed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import zmq

from rollout.control.rank_consensus import RankConsensus
from rollout.control.weight_queue import WeightQueue
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import (
    AdaptersChanged,
    BatchTokenOutput,
    ControlReqOutput,
    SchedulerFailed,
    SchedulerReady,
    TokenizedGenerateReqInput,
    decode_output,
    encode,
)
from rollout.core.messages.message import ControlReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.distributed.layout import layout_of
from rollout.engine import worker
from rollout.model.adapters import AdapterTable
from rollout.model.model_state import ModelState
from rollout.scheduler.scheduler import Scheduler
from tests.faults.contents import NEW_TOKENS, PROMPT, Version, Zoo
from tests.faults.engines import Wrong
from tests.faults.injections import hook
from tests.faults.killed import forkserver
from tests.faults.wrong_engines import wrong_engines

How = Literal["stops for a moment", "stops for long", "dies"]
HOWS: tuple[How, ...] = ("stops for a moment", "stops for long", "dies")
DEADLINE_S = 4.0
"""The deadline of every collective; 120 s in a server."""
_MOMENT_S, _LONG_S = 0.5, DEADLINE_S + 1.5
LIMIT_S = 60.0  # for any wait; the machine may be busy
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 ranks": {"tp_size": 2},
    "3 replicas": {"dp_size": 3},
    "2 replicas of 2": {"tp_size": 2, "dp_size": 2},
    "4 ranks": {"tp_size": 4, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
}


class Ended(Exception):
    """The engine has ended; the message is the reason."""


# --- the main process ------------------------------------------------------------------------------------------------


class LiveRanks:
    """The ranks of one server.  `in_force` is the version that the caller last found to serve."""

    def __init__(self, zoo: Zoo, layout: str, wrong: str | None = None) -> None:
        self.zoo, self.in_force = zoo, Version("v0", 0)
        self.reasons: list[str] = []
        settings = zoo.settings | LAYOUTS[layout] | {"num_threads": 1, "random_seed": 1}
        args = ServerArgs(model_path=str(zoo.checkpoints[0]), weight_version="v0", **settings)
        check_settings(args)
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

    def arm(self, victim: int, point: str, how: How) -> None:
        """Make the rank stop or die at its next arrival at the point."""
        self._armed[victim].value = f"{point}|{how}".encode()

    def go_on_when_stopped(self, victim: int, how: How) -> None:
        """Wait until the victim stands still, and resume it in time, or late."""
        pid = self._processes[victim].pid
        self.wait(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        time.sleep(_MOMENT_S if how == "stops for a moment" else _LONG_S)
        os.kill(pid, signal.SIGCONT)

    def post(self, verb: type[ControlReqInput], **fields: Any) -> str:
        request_id = f"c{next(self._numbers)}"
        self._send(verb(request_id=request_id, deadline=time.monotonic() + LIMIT_S, **fields))
        return request_id

    def answer(self, request_id: str) -> ControlReqOutput:
        """Wait for the answer to a verb.  Raises `Ended`, or `Wrong` after `LIMIT_S`."""
        self.wait(lambda: request_id in self._answers)
        return self._answers[request_id]

    def call(self, verb: type[ControlReqInput], **fields: Any) -> ControlReqOutput:
        return self.answer(self.post(verb, **fields))

    def good(self, verb: type[ControlReqInput], **fields: Any) -> None:
        answer = self.call(verb, **fields)
        if not answer.success:
            raise Wrong(f"a good {verb.__name__} is refused: {answer.message}")

    def ask(self) -> list[tuple[str, tuple[int, ...], tuple[float, ...]]]:
        """Send the fixed request to every data-parallel rank; return each label, tokens and log-probabilities."""
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
                    lora_name=self.zoo.adapter,
                )
            )
        self.wait(lambda: all(self._outputs.get(rid, [None])[-1] is not None for rid in rids))
        return [self._answer_of(rid) for rid in rids]

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Take messages until the condition holds.  Raises `Ended`, or `Wrong` after `LIMIT_S`."""
        until = time.monotonic() + LIMIT_S
        while not is_there():
            while self._pull.poll(20):
                self._take(decode_output(self._pull.recv()))
            if any(process.exitcode is not None for process in self._processes) and not is_there():
                self._end()
            if time.monotonic() > until:
                raise Wrong(f"{LIMIT_S:g} s went by with neither an answer nor an end")

    def _end(self) -> None:
        """Raise `Ended` with the reason after a rank has ended, or `Wrong` without a reason."""
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
        elif not isinstance(message, AdaptersChanged):
            answers = self._partial.setdefault(message.request_id, [])
            answers.append(message)
            if len(answers) == self._num_answers:
                self._answers[message.request_id] = next((one for one in answers if not one.success), answers[0])

    def _answer_of(self, rid: str) -> tuple[str, tuple[int, ...], tuple[float, ...]]:
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
            except zmq.Again:  # no rank is there to take it
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
            "input_addr": f"ipc://{self._folder.name}/input{place.replica}" if place.is_tp_leader else None,
            "output_addr": f"ipc://{self._folder.name}/output",
            "remote_output_addr": None,
        }


# --- a rank ----------------------------------------------------------------------------------------------------------


def _rank_main(config: str, armed: Any, wrong: str | None) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the reason of its end comes as a message
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
    trap(AdapterTable, "plan", "planning", "planned")
    trap(AdapterTable, "write", None, "written")
    trap(ModelState, "publish_weights", None, "published")
    trap(Scheduler, "reply", None, "answered")
