"""A stand-in for the scheduler: speaks the messages of `rollout.core.messages` over real sockets, without a model.

It answers with the prompt, repeated: output token i is `prompt[i % len(prompt)]`, so that a test chooses the output.
Log-probabilities and routes are functions of token and position.  `extra_key` "hold" keeps a request from producing
anything until it is aborted; "slow" gives it one token in 20 ms.  Run as a program it takes the worker's command line.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import zmq
from tokenizers import Tokenizer

from rollout.core.messages.io_struct import (
    AbortReqInput,
    BatchTokenOutput,
    ContinueGenerationReqInput,
    ControlReqOutput,
    GetStateReqInput,
    PauseGenerationReqInput,
    SchedulerFailed,
    SchedulerReady,
    ShutdownReqInput,
    TokenizedGenerateReqInput,
    decode_input,
    encode,
)
from rollout.core.messages.message import ControlReqInput, reply_type
from rollout.core.messages.req_output import (
    Alternatives,
    FinishedRecord,
    FinishReason,
    LogprobDelta,
    PromptLogprobs,
    ReqOutput,
    RoutedExpertsPayload,
    StreamedRows,
    VersionSpan,
)
from tests.alternatives import alternatives

SLOW_STEP_S = 0.02
NUM_MOE_LAYERS, TOP_K, NUM_EXPERTS, VOCAB_SIZE = 1, 2, 8, 300


def logprob_of(token_id: int) -> float:
    return -(token_id % 7 + 1) / 8


def route_rows(start: int, end: int) -> bytes:
    """Return rows [end - start, 1, 2] of uint8: position p goes to experts p mod 8 and p + 1 mod 8."""
    return bytes((p + k) % NUM_EXPERTS for p in range(start, end) for k in range(TOP_K))


@dataclass
class _Running:
    source: TokenizedGenerateReqInput
    token_ids: list[int] = field(default_factory=list)
    num_sent: int = 0
    next_at: float = 0.0


class StandInScheduler:
    """`answers[verb type]` makes the reply to a control verb, None for no reply; `received` keeps every message."""

    def __init__(self, input_addr: str, output_addr: str, tokenizer_file: str | None = None, eos: int = -1) -> None:
        self.received: list[Any] = []
        self.answers: dict[type, Callable[[Any], ControlReqOutput | None]] = {}
        self.refusal: FinishReason | None = None
        self.misreport = False
        self.version = "v0"
        self.context_length = 160
        self.max_total_num_tokens = 200
        self.captures = True
        self.num_generated = 0
        self.paused = False
        self.stopped = threading.Event()
        self._eos = eos
        self._tokenizer = Tokenizer.from_file(tokenizer_file) if tokenizer_file else None
        self._addresses = input_addr, output_addr
        self._running: dict[str, _Running] = {}

    def run(self) -> None:
        """Serve until stopped."""
        context = zmq.Context()
        self._pull, self._push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._pull.connect(self._addresses[0])
        self._push.connect(self._addresses[1])
        self._send(
            SchedulerReady(
                max_total_num_tokens=self.max_total_num_tokens,
                max_running_requests=8,
                context_length=self.context_length,
                capture_routed_experts=self.captures,
                num_threads=1,
                num_parameters=1,
                model_bytes=1,
                weight_version=self.version,
            )
        )
        while not self.stopped.is_set():
            if self._pull.poll(1 if self._running else 20):
                for message in map(decode_input, self._pull.recv_multipart()):
                    for part in message.samples() if isinstance(message, TokenizedGenerateReqInput) else [message]:
                        self._handle(part)
            elif not self.paused:
                self._step()
        context.destroy(linger=200)

    def _send(self, message: Any) -> None:
        self._push.send(encode(message))

    def _handle(self, message: Any) -> None:
        self.received.append(message)
        if isinstance(message, TokenizedGenerateReqInput):
            self._running[message.rid] = _Running(message)
            if self.refusal is not None:
                self._finish(message.rid, self.refusal)
        elif isinstance(message, AbortReqInput):
            for rid in list(self._running) if message.abort_all else message.rids:
                if rid in self._running:
                    self._finish(rid, FinishReason(type="abort", message="Aborted"))
        else:
            self._control(message)

    def _control(self, verb: ControlReqInput) -> None:
        answer = self.answers.get(type(verb), self._default_answer)(verb)
        if answer is not None:
            if answer.success:
                answer.data = _blank(verb) | (answer.data or {})
            self._send(answer)

    def _default_answer(self, verb: ControlReqInput) -> ControlReqOutput:
        data: dict[str, Any] = {}
        if isinstance(verb, PauseGenerationReqInput):
            self.paused = True
            data = {"paused": True, "num_running": len(self._running)}
        elif isinstance(verb, ContinueGenerationReqInput):
            self.paused = False
            data = {"paused": False}
        elif isinstance(verb, GetStateReqInput):
            data = self._state()
        elif isinstance(verb, ShutdownReqInput):
            until = time.monotonic() + verb.drain_s
            while self._running and time.monotonic() < until:
                self._step()
                time.sleep(0.001)
            for rid in list(self._running):
                self._finish(rid, FinishReason(type="abort", message="Aborted"))
            self.stopped.set()
        return ControlReqOutput(request_id=verb.request_id, success=True, message="done", data=data)

    def _state(self) -> dict[str, Any]:
        return {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": 0,
            "num_used_tokens": 5,
            "num_total_tokens": 7,
            "max_total_num_tokens": self.max_total_num_tokens,
            "max_running_requests": 8,
            "token_usage": 0.05,
            "num_used_state_rows": 0,
            "num_state_rows": 0,
            "gen_throughput": 12.5,
            "cache_hit_rate": 0.25,
            "num_retracted_reqs": 0,
            "num_generated_tokens": self.num_generated,
            "paused": self.paused,
            "weight_version": self.version,
            "weight_epoch": 0,
            "weight_update": {"update_id": None, "state": "idle"},
            "dtype": "float32",
            "device": "cpu",
            "model_bytes": 2**30,
            "kv_bytes": 2**29,
            "kv_scales": None,
            "overlap_schedule": False,
            "num_threads": 1,
            "step_time_ms": {},
            "cpu_isa": "",
            "plain_torch_reason": "no compiled operators",
            "plain_linears": {},
            "prompt_attention": "",
            "batch_invariant": True,
            "batch_invariance_note": "",
        }

    def _step(self) -> None:
        now = time.monotonic()
        for running in list(self._running.values()):
            source = running.source
            salt = (source.extra_key or "").rstrip("\x1f")  # the key is the same where it came as `cache_salt`
            if salt == "hold" or now < running.next_at:
                continue
            if salt == "slow":
                running.next_at = now + SLOW_STEP_S
            reason = self._advance(running)
            if reason is not None:
                self._finish(source.rid, reason)
            elif source.stream:
                self._report(running, None)

    def _advance(self, running: _Running) -> FinishReason | None:
        source, params = running.source, running.source.sampling_params
        if params.max_new_tokens == 0:
            return FinishReason(type="length", length=0)
        token_id = source.input_ids[len(running.token_ids) % len(source.input_ids)]
        running.token_ids.append(token_id)
        self.num_generated += 1
        if token_id in params.stop_token_ids or (token_id == self._eos and not params.ignore_eos):
            return FinishReason(type="stop", matched=token_id)
        if params.stop and self._tokenizer is not None:
            text = self._tokenizer.decode(running.token_ids)
            for stop in params.stop:
                if stop in text:
                    return FinishReason(type="stop", matched=stop)
        if len(running.token_ids) >= params.max_new_tokens:
            return FinishReason(type="length", length=len(running.token_ids))
        return None

    def _finish(self, rid: str, reason: FinishReason) -> None:
        running = self._running.pop(rid)
        source, output_len = running.source, len(running.token_ids)
        prompt_len = len(source.input_ids)
        record = FinishedRecord(
            reason=reason,
            cached_tokens=1,
            weight_versions=[VersionSpan(self.version, 0, output_len)] if output_len else [],
            prefill_weight_versions=[VersionSpan(self.version, 0, prompt_len)],
            kv_weight_version_oldest=self.version,
            kv_weight_epoch_oldest=0,
            routed_experts=self._routes(source, prompt_len + output_len - 1),
            prompt_logprobs=self._prompt_logprobs(source),
        )
        self._report(running, record)

    def _rows(self, source: TokenizedGenerateReqInput, first: int, count: int) -> StreamedRows:
        begin = len(source.input_ids) + first - 1 if first else 0
        routes = self._routes(source, len(source.input_ids) + count - 1, begin)
        return StreamedRows(versions=[VersionSpan(self.version, first, count)], routes=routes)

    def _routes(self, source: TokenizedGenerateReqInput, end: int, begin: int = 0) -> RoutedExpertsPayload | None:
        if not source.return_routed_experts:
            return None
        start = min(max(source.routed_experts_start_len, begin), end)
        spans = [VersionSpan(self.version, 0, end - start)] if end > start else []
        return RoutedExpertsPayload(
            data=route_rows(start, end), dtype="uint8", num_rows=end - start, start=start, versions=spans
        )

    def _prompt_logprobs(self, source: TokenizedGenerateReqInput) -> PromptLogprobs | None:
        start = source.logprob_start_len
        if not source.return_logprob or start < 0:
            return None
        ids = source.input_ids[start:]
        values: list[float | None] = [None if i == 0 else logprob_of(t) for i, t in enumerate(ids)]
        return PromptLogprobs(
            start=start,
            values=values,
            alternatives=self._alternatives(source, ids[1:]),
        )

    def _alternatives(self, source: TokenizedGenerateReqInput, token_ids: list[int]) -> Alternatives:
        return alternatives([self._top(source, t) for t in token_ids], [self._chosen(source) for _ in token_ids])

    def _top(self, source: TokenizedGenerateReqInput, token_id: int) -> tuple[list[float], list[int]]:
        ids = [(token_id + rank) % VOCAB_SIZE for rank in range(source.top_logprobs_num)]
        return [logprob_of(i) for i in ids], ids

    def _chosen(self, source: TokenizedGenerateReqInput) -> list[float]:
        return [logprob_of(i) for i in source.token_ids_logprob or []]

    def _report(self, running: _Running, record: FinishedRecord | None) -> None:
        source = running.source
        first = running.num_sent
        new = running.token_ids[first:]
        running.num_sent = len(running.token_ids)
        logprobs = None
        if source.return_logprob:
            logprobs = LogprobDelta(
                values=[logprob_of(t) for t in new],
                alternatives=self._alternatives(source, new),
            )
        output = ReqOutput(
            rid=source.rid,
            token_ids=new,
            num_output_tokens=len(running.token_ids) + self.misreport,
            weight_version=self.version,
            logprobs=logprobs,
            finished=record,
            rows=self._rows(source, first, len(running.token_ids)) if source.stream_rows and record is None else None,
        )
        self._send(BatchTokenOutput(outputs=[output]))


def _blank(verb: ControlReqInput) -> dict[str, Any]:
    """Return a blank reply to the verb: the verb's own values of the same names, else nothing of the right type."""
    blank: dict[str, Any] = {}
    for item in msgspec.structs.fields(reply_type(type(verb))):
        if item.required:
            arms = get_args(item.type) if get_origin(item.type) in (Union, UnionType, Annotated) else (item.type,)
            plain = [get_origin(arm) or arm for arm in arms]
            kinds = [kind for kind in (bool, int, float, str, list, dict) if kind in plain and type(None) not in plain]
            own = getattr(verb, item.name, None)
            blank[item.name] = kinds[0]() if own is None and kinds else own
    return blank


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--behaviour", choices=("serve", "fail", "die", "garbage"), default="serve")
    parser.add_argument("--config", required=True)
    namespace = parser.parse_args()
    config = json.loads(namespace.config)
    assert "api_key" not in config["server_args"] and os.getppid() == config["parent_pid"]
    stand_in = StandInScheduler(config["input_addr"], config["output_addr"])
    if namespace.behaviour == "die":
        os._exit(7)
    if namespace.behaviour == "serve":
        stand_in.run()
        return
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(config["output_addr"])
    push.send(
        encode(SchedulerFailed(message="model.safetensors\nis truncated")) if namespace.behaviour == "fail" else b"?"
    )
    time.sleep(0.0 if namespace.behaviour == "fail" else 30.0)
    context.destroy(linger=1000)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
