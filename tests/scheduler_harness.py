"""A real scheduler driven step by step in the test's own thread, over the in-process channel.

Real model, cache, policy, sampler and weight updater; only the sockets and the HTTP process are left out.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import BatchTokenOutput, ControlReqOutput, TokenizedGenerateReqInput
from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.req_output import FinishedRecord
from rollout.core.sampling_params import SamplingParams
from rollout.engine.build import build_scheduler
from rollout.scheduler.channel import LocalChannel
from rollout.scheduler.scheduler import Scheduler
from rollout.tokenizer_manager.sample import MaskRecord
from tests.alternatives import chosen_rows, top_rows


def plain(answer: ControlReqOutput) -> ControlReqOutput:
    """Return the answer with the reply as it travels; an answer without one has an empty reply."""
    answer.data = {} if answer.data is None else msgspec.to_builtins(answer.data, builtin_types=(bytes,))
    return answer


@dataclass
class Result:
    """Everything that left the scheduler about one request."""

    rid: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list = field(default_factory=list)
    chosen: list = field(default_factory=list)
    mask: MaskRecord = field(default_factory=MaskRecord)
    num_messages: int = 0
    finished: FinishedRecord | None = None
    route_shape: tuple[int, int] = (0, 0)

    @property
    def routes(self) -> np.ndarray:
        """Rows [n, L, K] of logical ids."""
        assert self.finished is not None and self.finished.routed_experts is not None
        payload = self.finished.routed_experts
        return np.frombuffer(payload.data, dtype=payload.dtype).reshape(payload.num_rows, *self.route_shape)

    @property
    def versions(self) -> list[tuple[str, int, int]]:
        assert self.finished is not None
        return [(span.version, span.start, span.end) for span in self.finished.weight_versions]


def check_decodes(scheduler: Scheduler) -> None:
    """Compare the arrays of the decode batch with its requests, between turns."""
    in_flight = scheduler._in_flight
    scheduler.queues.running.check(in_flight.sampling if in_flight is not None else ())


class Harness:
    """`submit` requests, `run` until all have ended; `control` sends a verb and waits for its answer.

    After every turn of the loop the arrays of the decode batch are compared with its requests.
    """

    def __init__(self, model_path: Path | str, *, channel: LocalChannel | None = None, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_total_tokens": 4096,
            "random_seed": 1,
            "enable_return_routed_experts": True,
        }
        self.args = ServerArgs(model_path=str(model_path), **defaults | settings)
        self.channel = channel or LocalChannel()
        self.scheduler, self.ready = build_scheduler(self.args, self.channel)
        config = self.scheduler.runner.state.model.config
        self._route_shape = (len(config.moe_layer_ids), config.num_experts_per_tok)
        self.results: dict[str, Result] = {}
        self.answers: dict[str, ControlReqOutput] = {}
        self._count = 0

    def submit(self, input_ids: list[int], rid: str | None = None, params: dict | None = None, **fields: Any) -> str:
        self._count += 1
        rid = rid or f"r{self._count}"
        defaults = {"return_logprob": True, "return_routed_experts": self.args.captures_routes}
        message = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=list(input_ids),
            sampling_params=SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | (params or {})),
            **defaults | fields,
        )
        self.results.setdefault(rid, Result(rid, list(input_ids), route_shape=self._route_shape))
        self.channel.inbox.append(message)
        return rid

    def generate(self, prompts: list[list[int]], params: dict | None = None, **fields: Any) -> list[Result]:
        rids = [self.submit(prompt, params=params, **fields) for prompt in prompts]
        self.run()
        return [self.results[rid] for rid in rids]

    def tick(self) -> bool:
        ran = self.scheduler.tick(0)
        check_decodes(self.scheduler)
        self._collect()
        return ran

    def run(self, max_ticks: int = 100_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(max_ticks):
            self.tick()
            if not self.scheduler.has_work and not self.channel.inbox:
                return
        raise AssertionError(f"still working after {max_ticks} steps")

    def post(self, verb: type[ControlReqInput], **fields: Any) -> str:
        self._count += 1
        request_id = f"c{self._count}"
        self.channel.inbox.append(verb(request_id=request_id, **fields))
        return request_id

    def wait(self, request_id: str, timeout_s: float = 30.0) -> ControlReqOutput:
        """Turn the loop until the verb is answered, slowly, so that requests do not end meanwhile.

        Most verbs take a few turns.  On a busy machine a verb's own thread may wait for seconds, and turns then wait
        with it.
        """
        deadline = time.monotonic() + timeout_s
        for turn in itertools.count():
            if request_id in self.answers:
                break
            self.tick()
            if request_id not in self.answers:
                time.sleep(0.005 if turn < 20 else 0.1)
            assert time.monotonic() < deadline, f"no answer to {request_id}"
        return self.answers[request_id]

    def control(self, verb: type[ControlReqInput], **fields: Any) -> ControlReqOutput:
        return self.wait(self.post(verb, **fields))

    def check_idle(self) -> None:
        """Require that nothing is in flight, and every KV slot is in exactly one place."""
        scheduler = self.scheduler
        assert not scheduler.queues.all() and not scheduler._by_rid
        assert scheduler.cache.num_private == 0
        assert scheduler.cache.pool.num_free == self.args.max_running_requests
        assert scheduler.cache.prefix_cache.num_locked == 0
        scheduler.cache.check()

    def _collect(self) -> None:
        while self.channel.outbox:
            message = self.channel.outbox.popleft()
            if isinstance(message, BatchTokenOutput):
                for output in message.outputs:
                    self._append(output)
            elif isinstance(message, ControlReqOutput):
                self.answers[message.request_id] = plain(message)

    def _append(self, output: Any) -> None:
        result = self.results[output.rid]
        assert result.finished is None, f"{output.rid} finished twice"
        result.num_messages += 1
        result.token_ids += output.token_ids
        if output.logprobs is not None:
            result.logprobs += output.logprobs.values
            result.top += top_rows(output.logprobs.alternatives, len(output.token_ids))
            result.chosen += chosen_rows(output.logprobs.alternatives, len(output.token_ids))
        if output.mask is not None:
            result.mask.append(output.mask)
        assert len(result.token_ids) == output.num_output_tokens
        result.finished = output.finished
