"""An engine without a model, and a server in front of it: what the front costs by itself.

`python -m benchmarks.front_engine serve FLAGS` is `lockstep serve FLAGS` with this engine in the place of the ranks.
The engine speaks the scheduler's side of the messages.  Each step every request gets a token, and one message holds
all that the step has to send.  Tokens, log-probabilities and routes are made beforehand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import serve_parser, server_args_from_namespace
from rollout.core.args.sources import parse_words
from rollout.core.messages.io_struct import (
    AbortReqInput,
    BatchTokenOutput,
    ControlReqOutput,
    GetStateReqInput,
    SchedulerReady,
    ShutdownReqInput,
    TokenizedGenerateReqInput,
    decode_input,
    encode,
)
from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.req_output import (
    FinishedRecord,
    FinishReason,
    LogprobDelta,
    ReqOutput,
    RoutedExpertsPayload,
    VersionSpan,
)
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.core.messages.update_state import UpdateStateReply
from rollout.core.specs.model_config import ModelConfig
from rollout.families.registry import served_model_config
from rollout.server.launch import run_server

CONTEXT = 4096
STEP_S = 0.001
STEP_VARIABLE = "NULL_ENGINE_STEP_S"
"""Environment variable with the seconds of a step."""
VERSION = "v0"


@dataclass(slots=True)
class _Running:
    source: TokenizedGenerateReqInput
    first_step: int
    last_step: int


class NullEngine:
    """Answers requests step by step, with values that are made beforehand."""

    def __init__(self, config: ModelConfig, input_addr: str, output_addr: str, step_s: float) -> None:
        self._context = zmq.Context()
        self._pull, self._push = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket, address in ((self._pull, input_addr), (self._push, output_addr)):
            socket.setsockopt(zmq.RCVHWM if socket is self._pull else zmq.SNDHWM, 0)
            socket.connect(address)
        self._step_s = step_s
        self._step = 0
        self._num_tokens = 0
        self._streams: dict[str, _Running] = {}
        self._ends: dict[int, list[_Running]] = {}
        self._is_over = False
        rng = random.Random(0)
        self._token_ids = [rng.randrange(256, config.vocab_size) for _ in range(CONTEXT)]
        self._logprobs = [float(np.float32(-rng.expovariate(1.0))) for _ in range(CONTEXT)]
        layers, top_k = len(config.moe_layer_ids), config.num_experts_per_tok
        self._row_bytes = layers * top_k
        chosen = [rng.sample(range(config.num_experts), top_k) for _ in range(CONTEXT * layers)]
        self._routes = bytes(expert for experts in chosen for expert in experts)

    def run(self) -> None:
        """Serve until a shutdown."""
        self._send(
            SchedulerReady(
                max_total_num_tokens=1 << 26,
                max_running_requests=1 << 14,
                context_length=CONTEXT,
                capture_routed_experts=True,
                num_threads=1,
                num_parameters=1,
                model_bytes=1,
                weight_version=VERSION,
            )
        )
        gc.freeze()
        due = time.monotonic()
        while not self._is_over:
            left_ms = max(0.0, (due - time.monotonic()) * 1e3)
            if self._pull.poll(left_ms):
                for data in self._pull.recv_multipart():
                    self._handle(decode_input(data))
                if time.monotonic() < due:
                    continue
            self._advance()
            due = max(due + self._step_s, time.monotonic())
        self._context.destroy(linger=1000)

    def _send(self, message: Any) -> None:
        self._push.send(encode(message))

    def _handle(self, message: Any) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            for source in message.samples():
                running = _Running(source, self._step, self._step + source.sampling_params.max_new_tokens)
                self._ends.setdefault(running.last_step, []).append(running)
                if source.stream:
                    self._streams[source.rid] = running
        elif isinstance(message, AbortReqInput):
            self._abort(set(message.rids), message.abort_all)
        elif isinstance(message, ControlReqInput):
            self._is_over = isinstance(message, ShutdownReqInput)
            data = self._state() if isinstance(message, GetStateReqInput) else None
            self._send(ControlReqOutput(request_id=message.request_id, success=True, data=data))

    def _advance(self) -> None:
        """Do one step, and send what it has to send."""
        self._step += 1
        ended = self._ends.pop(self._step, [])
        outputs = [self._last(running, FinishReason(type="length")) for running in ended]
        outputs += [self._next(running) for running in self._streams.values()]
        if outputs:
            self._send(BatchTokenOutput(outputs=outputs))

    def _abort(self, rids: set[str], is_all: bool) -> None:
        for step, running in list(self._ends.items()):
            gone = [each for each in running if is_all or each.source.rid in rids]
            if gone:
                self._ends[step] = [each for each in running if each not in gone]
                reason = FinishReason(type="abort", message="Aborted")
                self._send(BatchTokenOutput(outputs=[self._last(each, reason) for each in gone]))

    def _next(self, running: _Running) -> ReqOutput:
        """Return the token of this step of a stream."""
        count = self._step - running.first_step
        return ReqOutput(
            rid=running.source.rid,
            token_ids=self._token_ids[count - 1 : count],
            num_output_tokens=count,
            weight_version=VERSION,
            logprobs=self._logprob_delta(running.source, count - 1, count),
        )

    def _last(self, running: _Running, reason: FinishReason) -> ReqOutput:
        """Return all tokens of a sample, or the last one of a stream."""
        source, count = running.source, self._step - running.first_step
        prompt_len = len(source.input_ids)
        self._num_tokens += count
        is_stream = self._streams.pop(source.rid, None) is not None
        sent = count - 1 if is_stream and reason.type == "length" else count if is_stream else 0
        if reason.type == "length":
            reason.length = count
        record = FinishedRecord(
            reason=reason,
            since_first_token_s=0.001,
            queue_s=0.001,
            weight_versions=[VersionSpan(VERSION, 0, count)],
            prefill_weight_versions=[VersionSpan(VERSION, 0, prompt_len)],
            kv_weight_version_oldest=VERSION,
            kv_weight_epoch_oldest=0,
            routed_experts=self._routes_of(source, prompt_len + count - 1),
        )
        return ReqOutput(
            rid=source.rid,
            token_ids=self._token_ids[sent:count],
            num_output_tokens=count,
            weight_version=VERSION,
            logprobs=self._logprob_delta(source, sent, count),
            finished=record,
        )

    def _logprob_delta(self, source: TokenizedGenerateReqInput, start: int, end: int) -> LogprobDelta | None:
        return LogprobDelta(values=self._logprobs[start:end]) if source.return_logprob else None

    def _routes_of(self, source: TokenizedGenerateReqInput, num_rows: int) -> RoutedExpertsPayload | None:
        if not source.return_routed_experts:
            return None
        return RoutedExpertsPayload(
            data=self._routes[: num_rows * self._row_bytes],
            dtype="uint8",
            num_rows=num_rows,
            start=0,
            versions=[VersionSpan(VERSION, 0, num_rows)],
        )

    def _state(self) -> SchedulerState:
        numbers = {item.name: 0 for item in msgspec.structs.fields(SchedulerState) if item.required}
        nothing = ("num_kv_event_batches", "withheld", "poisoned", "weights_path", "content_digest", "held_digest")
        known: dict[str, Any] = numbers | dict.fromkeys((*nothing, "expert_distribution", "eplb", "kv_scales"))
        known |= {"step_time_ms": {}, "memory": {}, "weight_versions": [], "ended_updates": [], "device": "cpu"}
        known |= {"paused": False, "overlap_schedule": False, "batch_invariant": True, "dtype": "bfloat16"}
        known |= {"weight_version": VERSION, "cpu_isa": "", "plain_torch_reason": "", "batch_invariance_note": ""}
        known["prompt_attention"] = ""
        known |= {"plain_linears": {}}
        known |= {"weight_update": UpdateStateReply(update_id=None), "num_generated_tokens": self._num_tokens}
        known |= {"max_total_num_tokens": 1 << 26, "max_running_requests": 1 << 14, "context_length": CONTEXT}
        return SchedulerState(**known)


def _serve(words: Sequence[str]) -> int:
    namespace, _ = parse_words(serve_parser(), words, os.environ)
    return run_server(server_args_from_namespace(namespace), (sys.executable, "-m", "benchmarks.front_engine"))


def main() -> int:
    """Run a server, or, with `--config` as a server gives it to its ranks, the engine behind it."""
    if sys.argv[1] == "serve":
        return _serve(sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    config = json.loads(parser.parse_args().config)
    model = served_model_config(ServerArgs(**config["server_args"]))
    step_s = float(os.environ.get(STEP_VARIABLE, STEP_S))
    NullEngine(model, config["input_addr"], config["output_addr"], step_s).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
