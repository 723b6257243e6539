"""Refreshes from a trainer's process on the same device, with no request running and with some.

    handles                1 GiB buckets by CUDA handles, in a plain loop, as slime and verl send them
    a handle a tensor      the same, in a call a tensor; of some layers
    WeightSender           1 GiB buckets over gloo, through the host; of some layers
    a broadcast a tensor   over gloo, in a plain loop, as AReaL and OpenRLHF send them; of some layers

The engine's loop waits as a server's does.  "GB/s" counts from the answer of begin to the call of end.  "kept": tokens
a second while buckets come, by those before.  "peak": device memory of the engine beyond what it held before.
"weights": of the model, which has all of `--num-layers` layers where the device's memory holds all of its copies.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.ceilings import measure_ceilings
from benchmarks.gpu.model import Driver, driver, num_parameters, shape
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.trainer import WAYS
from examples.make_checkpoint.run import CheckpointSpec
from rollout.core.messages.message import ControlReqInput, ControlReqOutput
from rollout.core.messages.tensor_lists import ManifestLists
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 130.0
"""Seconds after which no further refresh is measured on a device."""
_OUT_OF_TIME = f"{RUN_S:g} s are over"
REFRESH_S = 240.0
BUCKET_BYTES = 1 << 30
MAX_LAYERS = 12
"""16 GB of Qwen3-30B-A3B in bfloat16: the most layers where the device's memory does not hold the whole."""
SOME_LAYERS = 2
"""They are sent where a tensor, or a byte through the host, is dear."""
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 1024
BEFORE_S = 0.5
_FRACTION = 0.95
_RESERVE = 12 << 30  # contexts of two processes, a bucket, captured steps
_VERBS: dict[str, type[ControlReqInput[Any]]] = {
    "init_weights_update_group": InitWeightsUpdateGroupReqInput,
    "destroy_weights_update_group": DestroyWeightsUpdateGroupReqInput,
    "begin_weight_update": BeginWeightUpdateReqInput,
    "update_weights_from_tensor": UpdateWeightsFromTensorReqInput,
    "update_weights_from_distributed": UpdateWeightsFromDistributedReqInput,
    "end_weight_update": EndWeightUpdateReqInput,
    "abort_weight_update": AbortWeightUpdateReqInput,
    "weight_update": GetWeightUpdateReqInput,
}


@dataclass
class Refresh:
    """The times of one refresh, by this process's clock, and tokens that were computed until then."""

    begun: float = 0.0
    tokens_begun: int = 0
    ending: float = 0.0
    tokens_ending: int = 0
    ended: float = 0.0
    num_tensors: int = 0
    num_bytes: int = 0
    stall_s: float = 0.0
    asked: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The trainer's number and the verb of each call that is not answered, by request id."""

    def note(self, verb: str, answer: ControlReqOutput[Any], tokens: int) -> None:
        """Note an answer that the trainer gets."""
        if verb == "begin_weight_update":
            self.begun, self.tokens_begun = time.perf_counter(), tokens
        elif verb == "end_weight_update" and isinstance(getattr(answer.data, "stall_seconds", None), float):
            self.ended, self.stall_s = time.perf_counter(), answer.reply.stall_seconds
            self.num_bytes, self.num_tensors = answer.reply.num_bytes, answer.reply.num_tensors


class Trainer:
    """The trainer's process, and the engine that answers its calls."""

    def __init__(self, engine: Driver, spec: CheckpointSpec, bucket_bytes: int) -> None:
        self._engine, self._stats = engine, engine.scheduler.stats
        words = [json.dumps(asdict(spec)), engine.device.type, str(bucket_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.trainer", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._said: deque[str] = deque()
        threading.Thread(target=self._listen, daemon=True).start()
        self._serve(Refresh(), busy=False)

    def refresh(self, way: str, label: str, layers: int | None, *, busy: bool) -> Refresh:
        """Have one version sent while the engine serves; `busy`: with requests running."""
        seen = Refresh()
        self._say({"way": way, "label": label, "layers": layers})
        self._serve(seen, busy=busy)
        return seen

    def tokens_per_second(self, seconds: float) -> float:
        """Run requests undisturbed for so long, after a few tokens of each."""
        warm = self._stats.num_generated + 4 * REQUESTS
        while self._stats.num_generated < warm:
            self._keep_busy()
            self._engine.tick()
        started, before = time.perf_counter(), self._stats.num_generated
        while time.perf_counter() - started < seconds:
            self._keep_busy()
            self._engine.tick()
        return (self._stats.num_generated - before) / (time.perf_counter() - started)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _serve(self, seen: Refresh, *, busy: bool) -> None:
        """Take turns of the engine and answer the trainer's calls, until it is done."""
        deadline = time.monotonic() + REFRESH_S
        while True:
            while self._said:
                message = json.loads(self._said.popleft())
                if "done" in message:
                    return
                self._ask(seen, **message)
            if busy:
                self._keep_busy()
            self._engine.tick()
            for request_id in list(seen.asked):
                if (answer := self._engine.answer(request_id)) is not None:
                    self._answer(seen, *seen.asked.pop(request_id), answer)
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the trainer ended, or was not done within {REFRESH_S:g} s")

    def _ask(self, seen: Refresh, id: int, verb: str, fields: dict[str, Any]) -> None:
        if "payload" in fields:
            fields["payload"] = bytearray(base64.b64decode(fields["payload"]))
        if fields.get("manifest") is not None:
            fields["manifest"] = ManifestLists(**fields["manifest"])
        if verb == "end_weight_update" and not seen.ending:
            seen.ending, seen.tokens_ending = time.perf_counter(), self._stats.num_generated
        seen.asked[self._engine.ask(_VERBS[verb], **fields)] = id, verb

    def _answer(self, seen: Refresh, number: int, verb: str, answer: ControlReqOutput[Any]) -> None:
        seen.note(verb, answer, self._stats.num_generated)
        reply = msgspec.to_builtins(answer.data) if answer.data is not None else {}
        self._say({"id": number, "success": answer.success, "message": answer.message, "reply": reply})

    def _keep_busy(self) -> None:
        if not self._engine.scheduler.has_work:
            most = self._engine.spec.context_length // 2  # a dry run's is short
            self._engine.submit(REQUESTS, min(PROMPT_TOKENS, most), min(NEW_TOKENS, most - 1))

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
            self._engine.wake()


def run(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a row for each refresh by each way of staging and sending."""
    deadline = time.monotonic() + (RUN_S if settings.device.type == "cuda" else float("inf"))
    copy_bytes_per_s = measure_ceilings(settings.device).copy_bytes_per_s
    pool = REQUESTS * (PROMPT_TOKENS + NEW_TOKENS + 64)
    for staging in ("device", "host", "in_place"):
        spec = that_fits(shape(settings), 3 if staging == "device" else 2, settings)
        if spec is None or time.monotonic() > deadline:
            reason = _OUT_OF_TIME if spec else "not one layer fits into the device's memory"
            yield {"staging": staging, "not run": reason}
            continue
        kept = {"max_total_tokens": pool, "max_running_requests": REQUESTS, "dtype": settings.dtype}
        kept |= {"mem_fraction_static": _FRACTION}
        with driver(spec, settings.device, weight_staging=staging, **kept) as engine:
            trainer = Trainer(engine, spec, 1 << 16 if settings.dry_run else BUCKET_BYTES)
            try:
                for row in _measured(engine, trainer, staging, deadline):
                    row |= {"layers": spec.layers, "weights, GB": num_bytes(spec, settings) / 1e9}
                    yield row | {"share of a copy": 2e9 * row["GB/s"] / copy_bytes_per_s} if "GB/s" in row else row
            finally:
                trainer.close()


def _measured(engine: Driver, trainer: Trainer, staging: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield two refreshes of each way, the second by the first one's plan, idle and busy."""
    for way in WAYS if staging == "device" else WAYS[:1]:
        layers = None if way == "handles" else SOME_LAYERS
        for busy in (False, True) if staging != "in_place" else (False,):
            for turn in range(2):
                row = {"staging": staging, "way": way, "requests": REQUESTS if busy else 0, "turn": turn}
                if time.monotonic() > deadline:
                    yield row | {"not run": _OUT_OF_TIME}
                    continue
                before = trainer.tokens_per_second(BEFORE_S) if busy else 0.0
                with _peak(engine.device) as peak:
                    seen = trainer.refresh(way, f"{way}-{busy}-{turn}", layers, busy=busy)
                yield row | _numbers(seen, before) | {"peak, GB": peak.num_bytes / 1e9}
            if busy:
                engine.abort()


def _numbers(seen: Refresh, tokens_per_s_before: float) -> dict[str, Any]:
    seconds = seen.ending - seen.begun
    tokens = (seen.tokens_ending - seen.tokens_begun) / seconds
    return {
        "GB": seen.num_bytes / 1e9,
        "tensors": seen.num_tensors,
        "GB/s": seen.num_bytes / seconds / 1e9,
        "ms a tensor": 1e3 * seconds / seen.num_tensors,
        "end, ms": 1e3 * (seen.ended - seen.ending),
        "stall, ms a GB": 1e3 * seen.stall_s / (seen.num_bytes / 1e9),
        "tokens/s kept": tokens / tokens_per_s_before if tokens_per_s_before else "",
    }


class _peak:
    """The most device memory in a block beyond what was held at its start; 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.num_bytes = device, 0

    def __enter__(self) -> _peak:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self._device) - self._before


def num_bytes(spec: CheckpointSpec, settings: Settings) -> int:
    """Return the bytes of one copy of the weights."""
    width: int = getattr(torch, settings.dtype).itemsize
    return width * num_parameters(spec)


def that_fits(whole: CheckpointSpec, copies: int, settings: Settings) -> CheckpointSpec | None:
    """Return the whole model where the free memory holds it `copies` times, else as many of `MAX_LAYERS` as it holds.

    None if not one layer fits.  The trainer has one copy, the engine has one, and one more where it stages on the
    device.
    """
    if settings.device.type != "cuda":
        return whole
    torch.cuda.empty_cache()
    free = _FRACTION * (torch.cuda.mem_get_info()[0] - _RESERVE)
    for layers in (whole.layers, *range(min(whole.layers, MAX_LAYERS), 0, -1)):
        spec = replace(whole, layers=layers)
        if copies * num_bytes(spec, settings) <= free:
            return spec
    return None
