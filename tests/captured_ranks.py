"""Engines of several ranks whose decode steps are captured: the real runner over stand-ins for captures and for NCCL.

    captured_ranks      threads, for `ParallelHarness`
    run_processes       a process a rank, over gloo: ranks that do not replay together hang, or end with an error

`CapturedGloo` is the device transport.  Within a capture it records its calls, as NCCL's are recorded, and a replay
makes them again, on the memory of the capture.  Words of the host go over the host transport, and never in a capture.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.hidden import HiddenStatesParams
from rollout.core.messages.io_struct import BatchTokenOutput, TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.distributed import communicator
from rollout.distributed.layout import layout_of
from rollout.distributed.parallel import join
from rollout.distributed.transport import GlooTransport, gloo_transport
from rollout.engine import build
from rollout.engine.build import build_scheduler
from rollout.kernels.operators.fused_experts import weighted_sum
from rollout.kernels.ops import Ops, select_ops
from rollout.scheduler.channel import LocalChannel
from tests.graph_loop import captured_engines
from tests.graph_stand_in import StandInGraphPool, launch

_TURNS = 80
_DEADLINE_S = 20.0


class CapturedGloo(GlooTransport):
    """Gloo, whose exchanges of tensors are recorded by a capture."""

    def all_gather(self, *arguments: Any) -> None:
        launch(lambda: GlooTransport.all_gather(self, *arguments), "all_gather over ranks")

    def all_gather_several(self, *arguments: Any) -> None:
        launch(lambda: self._gathered(*arguments), "all_gather over ranks")

    def _gathered(self, outs: Sequence[torch.Tensor], mine: Sequence[torch.Tensor], timeout_s: float) -> None:
        for out, one in zip(outs, mine, strict=True):
            GlooTransport.all_gather(self, out, one, timeout_s)

    def all_to_all(self, *arguments: Any) -> None:
        launch(lambda: GlooTransport.all_to_all(self, *arguments), "all_to_all over ranks")


def captured_gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> CapturedGloo:
    return CapturedGloo(gloo_transport(store, rank, size, timeout_s, loopback=True).backend)


def _is_of_a_layer(tensor: torch.Tensor) -> bool:
    """Tell whether layers exchange the tensor: rows.  Words of the host are integers, and bytes in one dimension."""
    return tensor.is_floating_point() or (tensor.dtype == torch.uint8 and tensor.dim() > 1)


def _select_ops(*arguments: Any, **named: Any) -> Ops:
    """Return the usual operators, with experts that take empty slots, as the ones of CUDA devices do."""
    ops = select_ops(*arguments, **named)
    if not ops.graph_safe:
        return ops

    def fused_experts(
        hidden_RD: torch.Tensor,
        ids_RS: torch.Tensor,
        weights_RS: torch.Tensor | None,
        *rest: Any,
        expected: int | None = None,
    ) -> torch.Tensor:
        most = rest[0].shape[0] - 1
        filled_RS = (ids_RS >= 0) & (ids_RS <= most)
        out_RSD = ops.fused_experts(hidden_RD, ids_RS.clamp(0, most), None, *rest)
        out_RSD = out_RSD.masked_fill(~filled_RS.unsqueeze(2), 0.0)
        return out_RSD if weights_RS is None else weighted_sum(out_RSD, weights_RS.masked_fill(~filled_RS, 0.0))

    return ops.replace(fused_experts=fused_experts, takes_empty_slots=True)


@contextmanager
def captured_ranks(pieces: list[int] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Let engines that are built inside over `captured_gloo` replay their decode steps; `pieces`: see there."""
    with captured_engines(pieces=pieces) as patch:
        patch.setattr(build, "select_ops", _select_ops)
        patch.setattr(communicator, "is_on_device", _is_of_a_layer)
        StandInGraphPool.reset_counts()
        yield patch


class Ask(NamedTuple):
    """A request: `params` of its sampling, the data-parallel rank that gets it, and hidden states that it wants."""

    prompt: list[int]
    params: dict[str, Any]
    dp_rank: int
    hidden_states: HiddenStatesParams | None = None

    def message(self, rid: str) -> TokenizedGenerateReqInput:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | self.params)
        return TokenizedGenerateReqInput(
            rid=rid,
            input_ids=self.prompt,
            sampling_params=params,
            return_logprob=True,
            return_routed_experts=True,
            dp_rank=self.dp_rank,
            hidden_states=self.hidden_states,
        )


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    routes: bytes
    hidden_states: bytes


class Ran(NamedTuple):
    """The work of one rank's process: its answers by request, its replays, and its steps in Python after the start."""

    answers: dict[str, Answer]
    num_replays: int
    num_eager: int


def run_processes(
    folder: Path,
    settings: dict[str, Any],
    asks: Sequence[Ask],
    meeting: Path,
    *,
    captures: bool,
    wrong: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> list[Ran | str]:
    """Run an engine of a process a rank, which meet by the file `meeting`.

    Returns by rank what it did, or why it did not come to its end.  `wrong` changes each rank's engine.
    """
    args = ServerArgs(model_path=str(folder), disable_cuda_graph=not captures, **settings)
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(layout_of(args).world_size):
        ours, theirs = context.Pipe(duplex=False)
        told = (theirs, args, rank, list(asks), str(meeting), wrong)
        process = context.Process(target=_rank_main, args=told, daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    found: list[Ran | str] = []
    for _, ours in started:
        try:
            found.append(ours.recv() if ours.poll(6 * _DEADLINE_S) else "no word within the deadline")
        except EOFError:
            found.append("the process died")
    for process, _ in started:
        process.join(1.0)
        process.kill()
    return found


def _rank_main(
    told: Connection,
    args: ServerArgs,
    rank: int,
    asks: Sequence[Ask],
    meeting: str,
    wrong: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    torch.set_num_threads(1)
    try:
        with captured_ranks() as patch, torch.inference_mode():
            if wrong is not None:
                wrong(patch)
            told.send(_run(args, rank, asks, meeting))
    except BaseException as error:
        told.send(f"{type(error).__name__}: {error}")
        raise


def _run(args: ServerArgs, rank: int, asks: Sequence[Ask], meeting: str) -> Ran:
    layout = layout_of(args)
    store = dist.FileStore(meeting, layout.world_size)
    parallel = join(
        layout, rank, store, timeout_s=_DEADLINE_S, weight_timeout_s=_DEADLINE_S, device_transport=captured_gloo
    )
    channel = LocalChannel()
    scheduler, _ = build_scheduler(args, channel, None, parallel)
    counted = [0]
    compute = scheduler.runner._computed

    def computed(*arguments: Any) -> Any:
        counted[0] += 1
        return compute(*arguments)

    scheduler.runner._computed = computed  # type: ignore[method-assign]
    StandInGraphPool.num_replays = 0
    if rank == 0:
        channel.inbox.extend(ask.message(str(number)) for number, ask in enumerate(asks))
    for _ in range(_TURNS):
        scheduler.tick(0)
    answers: dict[str, Answer] = {}
    for message in channel.outbox:
        if isinstance(message, BatchTokenOutput):
            for output in message.outputs:
                known = answers.get(output.rid, Answer([], [], b"", b""))
                ended = output.finished
                routes = None if ended is None else ended.routed_experts
                states = None if ended is None else ended.hidden_states
                answers[output.rid] = Answer(
                    known.token_ids + output.token_ids,
                    known.logprobs + list(output.logprobs.values if output.logprobs else []),
                    known.routes + (bytes(routes.data) if routes is not None else b""),
                    known.hidden_states + (bytes(states.data) if states is not None else b""),
                )
    assert not scheduler.has_work, "more turns are needed"
    return Ran(answers, StandInGraphPool.num_replays, counted[0])
