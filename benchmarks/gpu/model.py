"""A model of the size of Qwen3-30B-A3B with random weights, made where it is used: no file of 61 GB is written.

The engine is the one that serves, its reader of checkpoints apart: the tensors come from a generator on the device,
through the same path.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.settings import Settings
from eplb.placement import ExpertPlacement
from examples.make_checkpoint.run import CheckpointSpec, hf_config, random_weights
from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import AbortReqInput, TokenizedGenerateReqInput, encode
from rollout.core.messages.message import ControlReqInput, ControlReqOutput, Message
from rollout.core.sampling_params import SamplingParams
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.engine import build
from rollout.kernels.ops import Ops
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.memory.kv_pool import KVScale
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.kv_scales import KVScales
from rollout.scheduler.channel import LocalChannel
from weight_sync.intake import load_weights
from weight_sync.ledger import WeightLedger
from weight_sync.staging import DirectSink

MEANWHILE = 64
"""Tokens of a request beyond the measured steps: the first requests decode while later prompts are computed."""

GREEDY: dict[str, Any] = {"temperature": 0.0}

# huggingface.co/Qwen/Qwen3-30B-A3B, config.json
QWEN3_30B_A3B = CheckpointSpec(
    hidden_size=2048, intermediate_size=6144, layers=48, dense_first=0, heads=32, kv_heads=4, head_dim=128, experts=128,
    top_k=8, moe_intermediate_size=768, vocab_size=151936, context_length=40960, rope_theta=1e6, dtype="bfloat16",
)  # fmt: skip
_TINY = CheckpointSpec(
    hidden_size=64, layers=2, dense_first=0, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2,
    moe_intermediate_size=32, vocab_size=320, context_length=512, dtype="float32",
)  # fmt: skip


def shape(settings: Settings) -> CheckpointSpec:
    """Return the shape of the measured model: `--num-layers` layers, or in a dry run next to nothing."""
    if settings.dry_run:
        return _TINY
    return dataclasses.replace(QWEN3_30B_A3B, layers=settings.num_layers)


def num_parameters(spec: CheckpointSpec) -> int:
    """Return the number of parameters in all tensors but norms."""
    attention = spec.hidden_size * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    experts = spec.experts * (3 * spec.hidden_size * spec.moe_intermediate_size + spec.hidden_size)
    return spec.layers * (attention + experts) + 2 * spec.vocab_size * spec.hidden_size


def kv_token_bytes(spec: CheckpointSpec) -> int:
    """Return the bytes of KV that a token takes in all layers, in bfloat16."""
    return spec.layers * 2 * spec.kv_heads * spec.head_dim * 2


@contextmanager
def config_folder(spec: CheckpointSpec) -> Iterator[Path]:
    """Yield a checkpoint folder without weights."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        (Path(name) / "config.json").write_text(json.dumps(hf_config(spec, [0, 1])))
        yield Path(name)


class _WaitingChannel(LocalChannel):
    """Waits for a message as a server's channel does, so that an idle engine leaves the interpreter to other threads.

    Messages may come from any thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._comes = threading.Event()

    def put(self, message: Message) -> None:
        self.inbox.append(message)
        self._comes.set()

    def receive_raw(self, timeout_ms: int) -> list[bytes]:
        if not self.inbox:
            self._comes.wait(timeout_ms / 1e3)
        self._comes.clear()
        return [encode(self.inbox.popleft()) for _ in range(len(self.inbox))]

    def wake(self) -> None:
        self._comes.set()


class Driver:
    """An engine in this thread, step by step.  `load_seconds`: of its weights; `start_seconds`: of its whole start."""

    def __init__(self, spec: CheckpointSpec, folder: Path, device: torch.device, **settings: Any) -> None:
        self.spec, self.device = spec, device
        self._channel, self._count = _WaitingChannel(), 0
        self._answers: dict[str, ControlReqOutput[Any]] = {}
        args = ServerArgs(model_path=str(folder), device=str(device), skip_tokenizer_init=True, **settings)
        started = time.perf_counter()
        with patch.object(build, "load_model", self._load), patch.object(build, "read_kv_scales", self._scales):
            self.scheduler, self.ready = build.build_scheduler(args, self._channel)
        self.synchronize()
        self.start_seconds = time.perf_counter() - started

    def _load(
        self,
        model_path: str,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        placement: ExpertPlacement,
        ops: Ops,
        progress: object = None,
        parallel: Parallel | None = None,
        moe_backend: MoeBackend | None = None,
        memory: AbstractContextManager[object] | None = None,
    ) -> DecoderForCausalLM:
        """Build the model with random weights, in the place of `load_model`."""
        started = time.perf_counter()
        with memory or nullcontext():
            model = DecoderForCausalLM(config, dtype, device, placement, ops, parallel, moe_backend)
        ledger, sink = WeightLedger(model.weights.metas()), DirectSink(model.weights)
        for named in random_weights(self.spec, device):
            load_weights(model.weights, [named], sink, ledger, cast=True)
        ledger.settle()
        model.weights.recompute_derived()
        self.synchronize()
        self.load_seconds = time.perf_counter() - started
        return model

    def _scales(
        self, model_path: str, param_path: str | None, is_fp8: bool, config: ModelConfig, parallel: Parallel
    ) -> KVScales:
        """Return scales of 1, in the place of `read_kv_scales`: the folder has no tensors."""
        return KVScales((KVScale(),) * len(config.layers))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def submit(
        self,
        count: int,
        prompt_tokens: int,
        new_tokens: int,
        sampling: dict[str, Any] = GREEDY,
        seed: int | None = None,
        **fields: Any,
    ) -> list[str]:
        """Send requests of random ids, none of which ends early; return their request ids.

        `seed`: of the prompts; default: prompts that did not come before.
        """
        generator, rids = torch.Generator().manual_seed(self._count if seed is None else -1 - seed), []
        for _ in range(count):
            self._count += 1
            ids = torch.randint(2, self.spec.vocab_size, (prompt_tokens,), generator=generator).tolist()
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **sampling)
            rid = f"r{self._count}"
            rids.append(rid)
            self._channel.put(
                TokenizedGenerateReqInput(
                    rid=rid, input_ids=ids, sampling_params=params, **{"return_logprob": True} | fields
                )
            )
        return rids

    def control(self, verb: type[ControlReqInput[Any]], timeout_s: float, **fields: Any) -> ControlReqOutput[Any]:
        """Send a control request and return the answer.

        Raises `RuntimeError` for a refusal, or where no answer comes in time.
        """
        request_id = self.ask(verb, **fields)
        deadline = time.monotonic() + timeout_s
        while (answer := self.answer(request_id)) is None:
            self.tick()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer to {verb.__name__} after {timeout_s} s")
        if not answer.success:
            raise RuntimeError(f"{verb.__name__}: {answer.message}")
        return answer

    def ask(self, verb: type[ControlReqInput[Any]], **fields: Any) -> str:
        """Send a control request; return the id by which `answer` finds its answer."""
        self._count += 1
        request_id = f"c{self._count}"
        self._channel.put(verb(request_id=request_id, **fields))
        return request_id

    def answer(self, request_id: str) -> ControlReqOutput[Any] | None:
        """Take the answer to a control request; None: it has not come."""
        return self._answers.pop(request_id, None)

    def abort(self) -> None:
        """End all requests."""
        self._channel.put(AbortReqInput(abort_all=True))
        self.run()

    def wake(self) -> None:
        """End the wait of a `tick`.  May be called from any thread."""
        self._channel.wake()

    @torch.inference_mode()
    def tick(self) -> bool:
        """Take a turn of the loop, which waits as a server's does; return whether a step ran."""
        ran = self.scheduler.tick()
        while self._channel.outbox:
            message = self._channel.outbox.popleft()
            if isinstance(message, ControlReqOutput):
                self._answers[message.request_id] = message
        return ran

    def run(self) -> None:
        while self.scheduler.has_work or self._channel.inbox:
            self.tick()

    def seconds_per_decode_step(self, batch: int, prompt_tokens: int, steps: int, **fields: Any) -> float:
        """Return the mean over `steps` steps in which `batch` requests decode and nothing else happens.

        The pool must hold `prompt_tokens + steps + MEANWHILE` tokens of each.  The prompts are the same ones each time:
        the prefix cache saves the time of long ones.
        """
        stats = self.scheduler.stats
        self.submit(batch, prompt_tokens, steps + MEANWHILE, seed=batch, **fields)
        self._decode_together(batch)
        before = stats.num_generated
        self.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.tick()
        self.synchronize()
        seconds = time.perf_counter() - started
        if stats.num_generated - before != batch * steps:
            raise RuntimeError(f"{stats.num_generated - before} tokens in {steps} steps of {batch} requests")
        self.run()
        return seconds / steps

    def _decode_together(self, batch: int) -> None:
        """Take turns until `batch` requests decode and nothing else happens."""
        stats = self.scheduler.stats
        in_a_row, since = 0, stats.num_generated
        while in_a_row < 4:
            before = stats.num_generated
            self.tick()
            in_a_row = in_a_row + 1 if stats.num_generated - before == batch else 0
            if stats.num_generated - since > MEANWHILE * batch:
                raise RuntimeError(f"{batch} requests never decode together")

    def seconds_of_mixed_step(self, batch: int, decode_tokens: int, prompt_tokens: int, **fields: Any) -> float:
        """Return the mean over the steps in which `batch` requests decode and one prompt is computed in chunks.

        The pool must hold `decode_tokens + 4 * MEANWHILE` tokens of each, and the prompt.
        """
        stats = self.scheduler.stats
        self.submit(batch, decode_tokens, 4 * MEANWHILE, **fields)
        self._decode_together(batch)
        self.synchronize()
        self.submit(1, prompt_tokens, 1, **fields)
        before, turns = stats.num_generated, 0
        started = time.perf_counter()
        while stats.num_generated - before <= turns * batch:  # the prompt's token is one more
            self.tick()
            turns += 1
        self.synchronize()
        seconds = time.perf_counter() - started
        self.abort()
        return seconds / turns

    def seconds_of_prefill(self, count: int, prompt_tokens: int, **fields: Any) -> float:
        """Return the seconds from the first step of `count` prompts to the first token of the last one."""
        self.submit(count, prompt_tokens, 1, **fields)
        self.synchronize()
        started = time.perf_counter()
        self.run()
        self.synchronize()
        return time.perf_counter() - started


@contextmanager
def driver(spec: CheckpointSpec, device: torch.device, **settings: Any) -> Iterator[Driver]:
    """Yield an engine whose memory is freed at the end."""
    with config_folder(spec) as folder:
        one = Driver(spec, folder, device, **settings)
        try:
            yield one
        finally:
            vars(one).clear()  # the caller's name may live until the next engine is made
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
