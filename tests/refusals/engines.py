"""Refusals by schedulers of one rank and of several, with requests under way and a prefix in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.io_struct import ContinueGenerationReqInput, FlushCacheReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightVersionReqInput,
)
from tests.family_zoo import FAMILIES, family_checkpoint, in_dtype, with_experts
from tests.late_loop import engines_of
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.refusals.row import Fault, Row, Start
from tests.refusals.targets import (
    EngineTarget,
    Refusal,
    Tensors,
    first_refusal,
    in_two,
    raising_on,
    without,
)
from tests.scheduler_harness import Harness
from weight_sync.shadow import ShadowStaging
from weight_sync.staging import StagingMode

# --- a scheduler with requests under way ------------------------------------------------------------------------------

MODES: tuple[StagingMode, ...] = ("host", "device", "journal")
LOOPS = ("sequential", "late", "graphs")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 ep2": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4},
    "tp2, experts split": {"tp_size": 2},
    "dp2 all-to-all": {
        "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "moe_a2a_backend": "all_to_all",
        "ep_num_redundant_experts": 2,
    },
    "tp4 ep2": {"tp_size": 4, "ep_size": 2, "ep_num_redundant_experts": 2},
}  # fmt: skip
IN_THE_GATE = "dp2 all-to-all"
QWEN3 = "moe_dense_first"
EXPERT = "experts.5.down_proj.weight"
"""A tensor that only some ranks hold a part of."""


@cache
def checkpoints(folder: Path, name: str) -> tuple[Path, Path]:
    """Return checkpoints with old and new weights of a family, made once."""
    make = family_checkpoint if name in FAMILIES else lambda path, name, seed: tiny_checkpoint(path, name, seed=seed)
    old, new = (make(folder / f"{name} {seed}", name, seed) for seed in (5, 6))
    return old, new


def scheduler(loop: str, staging: StagingMode = "host", *, flushes: bool = False) -> Start:
    @contextmanager
    def start(scratch: Path) -> Iterator[EngineTarget]:
        old, new = checkpoints(scratch.parent, QWEN3)
        with engines_of(loop):
            engine = Harness(old, weight_version="v1", weight_staging=staging)
            yield EngineTarget(engine, logical_tensors(new), flushes=flushes)

    return start


def ranks(loop: str, layout: str, name: str) -> Start:
    @contextmanager
    def start(scratch: Path) -> Iterator[EngineTarget]:
        old, new = checkpoints(scratch.parent, name)
        with engines_of(loop), ParallelHarness(old, **LAYOUTS[layout], enable_memory_saver=True) as engine:
            yield EngineTarget(engine, in_dtype(logical_tensors(new), torch.float64))

    return start


def half(target: EngineTarget, _: Path) -> Refusal:
    return target.attempt(in_two(target.good)[:1])


def half_and_abort(target: EngineTarget, _: Path) -> Refusal:
    return target.attempt(in_two(target.good)[:1], aborts=True)


def expert_of(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith(EXPERT))


def in_bodies(change: Callable[[Tensors, str], Tensors], aborts: bool = False) -> Fault:
    def fault(target: EngineTarget, _: Path) -> Refusal:
        changed = change(target.good, expert_of(target.good))
        return target.attempt(in_two(changed), aborts=aborts, in_body=True)

    return fault


def one_rank_fails(victim: int, step: str) -> Fault:
    def fault(target: EngineTarget, _: Path) -> Refusal:
        weights = target.schedulers[victim].runner.state.model.weights
        with raising_on(weights, ShadowStaging, step):
            return target.attempt(in_two(target.good), in_body=True)

    return fault


RANK_FAULTS: dict[str, tuple[Fault, tuple[int, ...], str]] = {
    "nan": (in_bodies(lambda new, name: {**new, name: new[name] * float("nan")}), (400,), "not finite"),
    "missing": (in_bodies(lambda new, name: without(name)(new)), (400,), "missing"),
    "shape": (in_bodies(lambda new, name: {**new, name: new[name][:-1]}), (400,), "expects|expected|has "),
    "aborted": (in_bodies(lambda new, _: new, aborts=True), (409,), "no weight update"),
}


def slime(target: EngineTarget, tensors: Tensors) -> Iterator[Any]:
    yield target.control(PauseGenerationReqInput)
    yield target.control(FlushCacheReqInput)
    yield from [target.broadcast(part, weight_version="v2") for part in in_two(tensors)]
    yield target.control(ContinueGenerationReqInput)


def torchrl(target: EngineTarget, tensors: Tensors) -> Iterator[Any]:
    yield target.control(PauseGenerationReqInput, mode="retract")
    yield target.broadcast(tensors, weight_version="v2", abort_all_requests=False)
    yield target.control(ContinueGenerationReqInput)


def areal(target: EngineTarget, tensors: Tensors) -> Iterator[Any]:
    yield target.control(PauseGenerationReqInput)
    yield from [target.broadcast(part, abort_all_requests=True) for part in in_two(tensors)]
    yield target.control(UpdateWeightVersionReqInput, new_version="v2")
    yield target.control(ContinueGenerationReqInput)


def miles(target: EngineTarget, tensors: Tensors) -> Iterator[Any]:
    yield target.control(PauseGenerationReqInput, mode="in_place")
    yield target.control(BeginWeightUpdateReqInput)
    yield from [target.broadcast(part) for part in in_two(tensors)]
    yield target.control(UpdateWeightVersionReqInput, new_version="v2", abort_all_requests=False)
    yield target.control(EndWeightUpdateReqInput)


CLIENTS = (slime, torchrl, areal, miles)
CLIENT_FAULTS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "missing": lambda new, name: without(name)(new),
    "not finite": lambda new, name: {**new, name: torch.full_like(new[name], float("nan"))},
    "renamed": lambda new, name: {**without(name)(new), f"{name}.renamed": new[name]},
}


def client(plays: Callable[[EngineTarget, Tensors], Iterator[Any]], change: Callable[[Tensors, str], Tensors]) -> Fault:
    """Return a fault that plays all calls of a framework with changed tensors, and then ends the pause."""

    def fault(target: EngineTarget, _: Path) -> Refusal:
        target.start_requests()
        answers = list(plays(target, change(target.good, sorted(target.good)[3])))
        target.go_on()
        return first_refusal(answers)

    return fault


def engine_rows() -> Iterator[Row]:
    for loop in LOOPS:
        marks = () if loop == "sequential" else (pytest.mark.full,)
        for staging in MODES:
            start = scheduler(loop, staging)
            yield Row(f"scheduler-broadcast-half-{staging}, {loop}", start, half, (400,), "missing", marks)
            name = f"scheduler-broadcast-half and an abort-{staging}, {loop}"
            yield Row(name, start, half_and_abort, (409,), "no weight update", marks)
        for plays in CLIENTS:
            for name, change in CLIENT_FAULTS.items():
                title = f"scheduler-{plays.__name__}-{name}-host, {loop}"
                reason = {"missing": "missing", "not finite": "not finite", "renamed": "renamed"}[name]
                start = scheduler(loop, flushes=plays is slime)
                yield Row(title, start, client(plays, change), (400,), reason, marks)


def rank_rows() -> Iterator[Row]:
    for loop in LOOPS[:2]:
        for layout in LAYOUTS:
            usual = (loop, layout) == ("sequential", IN_THE_GATE)
            for name in (QWEN3, *with_experts(layers=2, experts=8)):
                marks = () if usual and name == QWEN3 else (pytest.mark.full,)
                for title, (fault, status, reason) in RANK_FAULTS.items():
                    start = ranks(loop, layout, name)
                    yield Row(f"ranks-body-{title}-{layout}, {loop}, {name}", start, fault, status, reason, marks)
            for victim in (0, 1):
                for step in ("write", "prepare", "commit"):
                    title = f"ranks-body-{step} raises on rank {victim}-{layout}, {loop}"
                    marks = () if usual else (pytest.mark.full,)
                    fault = one_rank_fails(victim, step)
                    yield Row(
                        title, ranks(loop, layout, QWEN3), fault, (500, 409), "a fault of one rank|another rank", marks
                    )
