"""A refresh from a trainer's process on the same device: staging next to a copy, and the stall at the commit.

The trainer holds a GiB of tensors at a time and sends them by CUDA handles, as slime and verl do.  Staged in device
memory a refresh takes the weights twice; `layers` of the rows is the number that fits.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.gpu.ceilings import measure_ceilings
from benchmarks.gpu.model import Driver, driver, num_parameters, shape
from benchmarks.gpu.settings import Settings
from examples.make_checkpoint.run import CheckpointSpec, random_weights
from rollout.core.messages.message import ControlReqInput, ControlReqOutput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0
BUCKET_BYTES = 1 << 30
_FRACTION = 0.95
ROUNDS = 3


class Trainer:
    """Makes the buckets of a refresh in a process of its own, one at a time."""

    def __init__(self, spec: CheckpointSpec, device: torch.device) -> None:
        words = json.dumps(asdict(spec))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.refresh", words, device.type],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def buckets(self) -> Iterator[bytearray]:
        """Yield pickled (name, tensor) lists; the memory of one is free again when the next one is asked for."""
        while (line := self._ask("next")) != "end":
            yield bytearray(base64.b64decode(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline().strip()
        assert line, "the trainer ended"
        return line


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each refresh by each way of staging."""
    whole = shape(settings)
    ceilings = measure_ceilings(settings.device)
    for staging in ("device", "host", "in_place"):
        spec = _that_fits(whole, 2 if staging == "device" else 1, settings)
        if spec is None:
            yield {"staging": staging, "not run": "not one layer fits into the device's memory"}
            continue
        kept = {"max_total_tokens": 8192, "max_running_requests": 8, "dtype": settings.dtype}
        kept |= {"mem_fraction_static": _FRACTION}
        with driver(spec, settings.device, weight_staging=staging, **kept) as engine:
            yield from _measured(engine, spec, settings, staging, ceilings.copy_bytes_per_s)


def _measured(
    engine: Driver, spec: CheckpointSpec, settings: Settings, staging: str, copy_bytes_per_s: float
) -> Iterator[dict[str, Any]]:
    trainer = Trainer(spec, settings.device)
    try:
        for turn in range(ROUNDS):
            _control(engine, BeginWeightUpdateReqInput, weight_version=f"v{turn}")
            staged, nbytes = 0.0, 0
            for payload in trainer.buckets():
                started = time.perf_counter()
                _control(engine, UpdateWeightsFromTensorReqInput, payload=payload)
                staged += time.perf_counter() - started
            started = time.perf_counter()
            ended = _control(engine, EndWeightUpdateReqInput)
            end = time.perf_counter() - started
            nbytes = ended.reply.num_bytes
            yield {
                "staging": staging,
                "layers": spec.layers,
                "turn": turn,
                "GB": nbytes / 1e9,
                "buckets, s": staged,
                "GB/s": nbytes / staged / 1e9,
                "share of a copy": 2 * nbytes / staged / copy_bytes_per_s,  # read and written
                "end, s": end,
                "stall, ms": 1e3 * ended.reply.stall_seconds,
                "stall of 60 GB, ms": 1e3 * ended.reply.stall_seconds * 60e9 / nbytes,
            }
    finally:
        trainer.close()


def _that_fits(whole: CheckpointSpec, copies: int, settings: Settings) -> CheckpointSpec | None:
    """Return the model with as many layers as fit into memory with a bucket and 6 GiB; None if none does.

    With `copies` of 2 the next weights, too, fit into the engine's share of the memory that the weights leave.
    """
    if settings.device.type != "cuda":
        return whole
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] - BUCKET_BYTES - (6 << 30)
    for layers in range(whole.layers, 0, -1):
        spec = replace(whole, layers=layers)
        nbytes = 2 * num_parameters(spec)
        if (copies - 1) * nbytes <= _FRACTION * (free - nbytes):
            return spec
    return None


def _control(engine: Driver, verb: type[ControlReqInput[Any]], **fields: Any) -> ControlReqOutput[Any]:
    return engine.control(verb, TIMEOUT_S, **fields)


# --- the trainer's process ------------------------------------------------------------------------------------------


def _trainer(words: str, device: str) -> None:
    spec = CheckpointSpec(**json.loads(words))
    torch.multiprocessing.set_sharing_strategy("file_system")
    for turn in range(ROUNDS):
        buckets = _buckets(replace(spec, seed=turn + 1), torch.device(device))
        while sys.stdin.readline() and (bucket := next(buckets, None)) is not None:  # made while nothing is timed
            content = io.BytesIO()
            ForkingPickler(content).dump(bucket)
            if device == "cuda":
                torch.cuda.synchronize()
            print(base64.b64encode(content.getvalue()).decode(), flush=True)
        print("end", flush=True)


def _buckets(spec: CheckpointSpec, device: torch.device) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield buckets of about `BUCKET_BYTES`, each in one allocation, as in a trainer."""
    bucket: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in random_weights(spec, device):
        bucket.append((name, tensor))
        nbytes += tensor.nbytes
        if nbytes >= BUCKET_BYTES:
            yield _in_one(bucket)
            bucket, nbytes = [], 0
    if bucket:
        yield _in_one(bucket)


def _in_one(bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    flat = torch.cat([tensor.flatten() for _, tensor in bucket])
    parts = flat.split([tensor.numel() for _, tensor in bucket])
    return [(name, part.view(tensor.shape)) for (name, tensor), part in zip(bucket, parts, strict=True)]


if __name__ == "__main__":
    _trainer(*sys.argv[1:])
