"""Engines of one or several ranks that run the work of a benchmark, a process a rank.

    parent   one `Work` to every rank  ->  ranks   turns of the scheduler's loop until nothing is left
             <-  every rank: its `StepTaken`s

Scheduler, model, groups and thread counts are a server's; HTTP and tokenizer are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import torch
import torch.distributed as dist

from capture.capturer import RoutedExpertsCapturer
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.forward_batch import ForwardBatch
from rollout.core.messages.io_struct import BatchTokenOutput, TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.distributed.communicator import share_sizes
from rollout.distributed.layout import ParallelLayout, layout_of
from rollout.distributed.parallel import Parallel, join
from rollout.engine.build import build_scheduler
from rollout.executor.model_runner import ModelRunner, StepRoutes
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.scheduler.channel import LocalChannel
from rollout.server.scheduler_process import SPIN_ENVIRONMENT

START_S = 300.0
WORK_S = 600.0
END_S = 10.0
BARE_BYTES = 4096


# per_layer: recorded, and where ranks have slices of the tokens, gathered in every MoE layer
Routes = Literal["off", "recorded", "returned", "per_layer"]


class Work(msgspec.Struct):
    """Requests that all start in the same turn; prompt i goes to data-parallel rank i modulo their number."""

    prompts: list[list[int]]
    new_tokens: int
    routes: Routes = "off"
    counts: bool = False  # count collectives; a step is a little slower
    bare_gathers: int = 0  # instead: as many all-gathers of `BARE_BYTES`, with a little work before each


class StepTaken(msgspec.Struct):
    """One step as a rank saw it."""

    seconds: float
    num_tokens: int
    num_extend_tokens: int
    num_logits: int
    sent: dict[str, tuple[int, int]] = {}  # "group collective" -> calls, bytes sent to others
    pairs: list[int] = []  # (token, expert) pairs dispatched to each rank


class GatherPerLayer:
    """The other way to do the work of `RoutedExpertsCapturer` and `SliceRoutes`: every layer's slices gathered at once.

    `batch()`: the step that is computed.
    """

    def __init__(
        self, capturer: RoutedExpertsCapturer, runner: ModelRunner, batch: Callable[[], ForwardBatch | None]
    ) -> None:
        self._capturer, self._batch = capturer, batch
        self._ranks = runner.state.model.parallel.attn_tp
        self._whole: list[torch.Tensor] = []

    def begin_step(self, num_rows: int) -> torch.Tensor:
        self._whole = []
        return self._capturer.begin_step(num_rows)

    def record(self, moe_layer: int, logical_ids_tK: torch.Tensor) -> None:
        self._capturer.record(moe_layer, logical_ids_tK)
        batch = self._batch()
        assert batch is not None
        counts = share_sizes(batch.num_tokens, self._ranks.size)
        self._whole.append(self._ranks.all_gather_rows(logical_ids_tK.to(self._capturer.dtype), counts))

    def finish_step(self) -> torch.Tensor:
        self._capturer.finish_step()
        return torch.stack(self._whole, dim=1)


class RankDriver:
    """One rank: its scheduler, and the turns of its loop.  All ranks of an engine `run` the same work together."""

    def __init__(self, args: ServerArgs, parallel: Parallel) -> None:
        self.parallel = parallel
        self.channel = LocalChannel()
        self.scheduler, self.ready = build_scheduler(args, self.channel, None, parallel)
        self._num_data_ranks = args.dp_size
        self._num_posted = 0
        self._batch: ForwardBatch | None = None
        self._pairs: list[int] = []
        runner = self.scheduler.runner
        self._store, self._capturer, self._forward = runner.route_store, runner._capturer, runner.forward
        runner.forward = self._noted_forward  # type: ignore[method-assign]
        self._watch_dispatcher()

    def run(self, work: Work) -> list[StepTaken]:
        """Run the work and return the steps in order."""
        if work.bare_gathers:
            return [StepTaken(self._bare_gather(), 0, 0, 0) for _ in range(work.bare_gathers)]
        self._set_recording(work.routes)
        self._post(work)
        steps = []
        with torch.inference_mode():
            while (step := self._turn(work.counts)) is not None:
                steps.append(step)
        self._check_outputs(work)
        return steps

    def _set_recording(self, routes: Routes) -> None:
        runner = self.scheduler.runner
        assert routes == "off" or self._store is not None, "start the engine with enable_return_routed_experts"
        runner.route_store, runner._capturer = None if routes == "off" else self._store, self._capturer
        runner.__dict__.pop("_new_slice_routes", None)
        if routes == "per_layer":
            runner._capturer = GatherPerLayer(self._capturer, runner, lambda: self._batch)  # type: ignore
            runner._new_slice_routes = lambda: None  # type: ignore[method-assign]

    def _bare_gather(self) -> float:
        """Return the seconds of one all-gather, as between two operators: memory and caches are in use."""
        matrix = torch.ones(256, 256)
        for _ in range(4):
            matrix = matrix @ matrix.T / 256
        mine = torch.zeros(BARE_BYTES, dtype=torch.uint8)
        start = time.perf_counter()
        self.parallel.tp.all_gather(mine)
        return time.perf_counter() - start

    def _post(self, work: Work) -> None:
        place = self.parallel.position
        if not place.is_tp_leader:
            return
        for index, prompt in enumerate(work.prompts):
            data_rank = index % self._num_data_ranks
            if self.parallel.layout.num_replicas > 1 and data_rank != place.replica:
                continue
            self._num_posted += 1
            self.channel.inbox.append(
                TokenizedGenerateReqInput(
                    rid=f"r{self._num_posted}",
                    input_ids=prompt,
                    sampling_params=SamplingParams(temperature=0.0, max_new_tokens=work.new_tokens, ignore_eos=True),
                    return_routed_experts=work.routes == "returned",
                    dp_rank=data_rank,
                )
            )

    def _turn(self, counts: bool) -> StepTaken | None:
        """Take a turn; return the step taken, None when no rank had anything to do."""
        self._batch, self._pairs = None, [0] * self.parallel.tp.size
        if counts:
            for group in self.parallel.communicators:
                group.reset_counts()
        start = time.perf_counter()
        ran = self.scheduler.tick(0)
        seconds = time.perf_counter() - start
        if not ran:
            return None
        batch = self._batch
        assert batch is not None
        step = StepTaken(seconds, batch.num_tokens, batch.num_extend_tokens, batch.logits_rows.shape[0])
        if counts:
            step.sent = self._sent()
            step.pairs = self._pairs
        return step

    def _sent(self) -> dict[str, tuple[int, int]]:
        return {
            f"{group.name} {collective}": (count.calls, count.num_bytes)
            for group in self.parallel.communicators
            for collective, count in group.counts.items()
        }

    def _noted_forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, StepRoutes | None]:
        self._batch = batch
        return self._forward(batch)

    def _watch_dispatcher(self) -> None:
        """Count the pairs that leave for each rank where ranks have experts of their own."""
        layers = [layer.mlp for layer in self.scheduler.runner.state.model.model.layers]  # type: ignore[attr-defined]
        sparse = [layer for layer in layers if hasattr(layer, "dispatcher")]
        num_ranks = self.parallel.tp.size
        if not sparse or num_ranks == 1 or self.parallel.layout.ep_size != num_ranks:
            return
        dispatcher, slots = sparse[0].dispatcher, sparse[0].gate.placement.num_local_experts
        dispatch, size = dispatcher.dispatch, self.parallel.tp.size

        def noted(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
            counts = (ids_TK.flatten() // slots).bincount(minlength=size).tolist()
            self._pairs = [before + count for before, count in zip(self._pairs, counts)]
            return dispatch(hidden_TD, ids_TK, weights_TK)

        dispatcher.dispatch = noted

    def _check_outputs(self, work: Work) -> None:
        """Check that the timed work was done: every request of this rank gave all of its tokens."""
        reasons = [
            output.finished.reason
            for message in self.channel.outbox
            if isinstance(message, BatchTokenOutput)
            for output in message.outputs
            if output.finished is not None
        ]
        self.channel.outbox.clear()
        place = self.parallel.position
        mine = max(place.attn_dp_rank, place.replica)
        expected = len(work.prompts[mine :: self._num_data_ranks]) if place.is_dp_leader else 0
        bad = [reason for reason in reasons if reason.type != "length"]
        assert not bad and len(reasons) == expected, f"rank {place.world_rank}: {len(reasons)} of {expected}, {bad[:1]}"


class RankProcesses:
    """The processes of all ranks of a server of `settings` (fields of `ServerArgs`).  Leaving the context ends them."""

    def __init__(self, **settings: Any) -> None:
        self.args = ServerArgs(**settings)
        check_settings(self.args)
        self.layout: ParallelLayout = layout_of(self.args)
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-")
        self._processes: list[subprocess.Popen] = []
        self._links: list[Connection] = []
        try:
            for rank in range(self.layout.world_size):
                self._start(rank)
            self._receive(START_S)  # an empty answer: the model is loaded
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Work) -> list[list[StepTaken]]:
        """Run the work; return the steps by rank.  Raises `RuntimeError` for a rank that has ended or is late."""
        body = msgspec.json.encode(work)
        for link in self._links:
            link.send_bytes(body)
        return self._receive(WORK_S)

    def close(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)
        self._folder.cleanup()

    def _start(self, rank: int) -> None:
        here, there = Pipe()
        self._links.append(here)
        config = {
            "server_args": self.args.public_dict(),
            "rank": rank,
            "rendezvous": str(Path(self._folder.name) / "ranks"),
            "link": there.fileno(),
        }
        command = [sys.executable, "-m", "benchmarks.parallel_ranks", msgspec.json.encode(config).decode()]
        environment = SPIN_ENVIRONMENT | os.environ
        with there:
            self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()], env=environment))

    def _receive(self, timeout_s: float) -> list[list[StepTaken]]:
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, link in enumerate(self._links):
            try:
                if not link.poll(max(deadline - time.monotonic(), 0.0)):
                    raise RuntimeError(f"rank {rank} of {_name(self.args)} did not answer within {timeout_s:.0f} s")
                answers.append(msgspec.json.decode(link.recv_bytes(), type=list[StepTaken]))
            except (EOFError, ConnectionError):
                raise RuntimeError(f"rank {rank} of {_name(self.args)} ended; its last words are above") from None
        return answers


def _name(args: ServerArgs) -> str:
    changed = [f.name for f in dataclasses.fields(args) if getattr(args, f.name) != f.default]
    return ", ".join(f"{name}={getattr(args, name)}" for name in changed)


def main(words: Sequence[str]) -> None:
    """Run one rank: do work until the parent closes the link."""
    parser = argparse.ArgumentParser(description="Internal: one rank of a benchmark's engine.")
    parser.add_argument("config", type=msgspec.json.decode)
    config = parser.parse_args(words).config
    link = Connection(config["link"])
    args = ServerArgs(**config["server_args"])
    layout, rank = layout_of(args), config["rank"]
    parallel = Parallel()
    if layout.world_size > 1:
        parallel = join(layout, rank, dist.FileStore(config["rendezvous"], layout.world_size))
    driver = RankDriver(args, parallel)
    link.send_bytes(msgspec.json.encode([]))
    while True:
        try:
            body = link.recv_bytes()
        except EOFError:
            return
        link.send_bytes(msgspec.json.encode(driver.run(msgspec.json.decode(body, type=Work))))


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # the groups' threads wait for peers that may have ended already
