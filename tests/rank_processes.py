"""Several ranks as processes of one machine, each with one thread: `tests.ranks` with processes in place of threads.

They are forked from one process that has loaded torch, so that sixteen of them take seconds and little memory.
"""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import join

TIMEOUT_S = 150.0  # 64 ranks on two busy cores take a minute
_LOADED = ("tests.parallel_engine",)  # by the process that the ranks are forked from


def run_rank_processes(
    layout: ParallelLayout, work: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Run `work(parallel, *arguments)` in a process of every rank, and return the results by world rank.

    `work` is a function of a module.  Raises `AssertionError` with the error of the first rank that failed, or
    where a rank has not answered after `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_LOADED))
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank in range(layout.world_size):
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, Path(folder) / "ranks", layout, rank, timeout_s, work, arguments)
                ranks.append((context.Process(target=_rank, args=given, daemon=True), ours))
                ranks[-1][0].start()
                theirs.close()
            deadline = time.monotonic() + timeout_s
            return [_answer(rank, ours, deadline) for rank, (_, ours) in enumerate(ranks)]
        finally:
            for process, ours in ranks:
                process.kill()
                process.join()
                ours.close()


def _answer(rank: int, ours: Connection, deadline: float) -> Any:
    assert ours.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} did not answer in time"
    try:
        failed, data = ours.recv()
    except EOFError:
        raise AssertionError(f"the process of rank {rank} ended without an answer") from None
    assert not failed, f"rank {rank}: {failed}"
    return torch.load(io.BytesIO(data), weights_only=False)


def _rank(
    theirs: Connection,
    rendezvous: Path,
    layout: ParallelLayout,
    rank: int,
    timeout_s: float,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    failed, data = "", io.BytesIO()
    try:
        store = dist.FileStore(str(rendezvous), layout.world_size)
        parallel = join(layout, rank, store, timeout_s=timeout_s, weight_timeout_s=timeout_s)
        with torch.inference_mode():
            torch.save(work(parallel, *arguments), data)
        parallel.world.all_agree(True)  # none leaves the groups before all are done
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    theirs.send((failed, data.getvalue()))
