"""`Engine`: a real scheduler whose script decides everything that is left to chance elsewhere.

The caller turns the loop, and the clock stands still between turns.  Weight I/O runs in the caller's thread, and KV
events are read as they are sent.  So a schedule always runs the same way.  After every turn each KV slot must be in one
place, and each request is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch

from rollout.core.messages.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    ControlReqOutput,
    TokenizedGenerateReqInput,
)
from rollout.core.messages.message import ControlReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.engine import build_graphs
from rollout.scheduler import scheduler as scheduler_module
from rollout.scheduler.channel import LocalChannel
from rollout.scheduler.req import Req
from rollout.tokenizer_manager.replay import check_replay
from tests.graph_loop import captured_engines
from tests.mixed.listener import tapped
from tests.mixed.schedule import Ask, Settings
from tests.mixed.violation import Violation
from tests.mixed.watch import InForce, Turn, Watch
from tests.mixed.zoo import Model, in_turn, request_fields
from tests.scheduler_harness import Harness, Result

REFUSALS = (400, 409, 503)
"""Statuses with which a verb that comes at the wrong time may be answered."""
_MAX_TURNS = 4000
_TURN_S = 0.001
_EVENTS = '{"endpoint": "ipc:///nowhere", "weight_versions": true}'


class ScriptedChannel(LocalChannel):
    """A channel whose clock goes on by a millisecond a turn, and by what the script adds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 1000.0

    @property
    def now(self) -> float:
        return self.clock


class Engine(Harness):
    """`of_epoch[e]`: the content that was committed in weight epoch e; `labels`: all labels so far, in order.

    `finished` is called with each request that has ended, once.
    """

    def __init__(self, model: Model, settings: Settings, finished: Callable[[Result, Watch], None]) -> None:
        self.settings = settings
        self.shape = model.shape
        self.of_epoch = [0]
        self.labels = ["v0"]
        self.watches: dict[str, Watch] = {}
        self._finished = finished
        self._open: dict[str, None] = {}  # requests that have not ended, in the order in which they came
        self._to_end: list[str] = []  # named by aborts that take effect in the next turn
        self._below: int | None = None
        self._launched = InForce(0, "v0")  # served at the end of the turn before
        self.clock = ScriptedChannel()
        with in_turn(), tapped() as tap, _captured() if settings.loop == "captured" else nullcontext():
            super().__init__(model.folder, channel=self.clock, **_server_args(settings, model.shape.is_moe))
        self._tap = tap if settings.events else None

    # --- what the script does -------------------------------------------------------------------------------------

    @property
    def open_rids(self) -> list[str]:
        return list(self._open)

    @property
    def longest(self) -> int:
        """The maximum number of tokens of a request, prompt and output."""
        return min(self.settings.pool, self.shape.context_length)

    def start(self, ask: Ask) -> None:
        """Send all samples of a prompt as one message."""
        self._count += 1
        fields = request_fields(ask, self.shape)
        key, replay = ask.key, fields["replay"]
        if replay is not None:
            check_replay(replay, len(ask.prompt), ask.new_tokens)
            key = f"{key or ''}\x00{ask.replay}"
        samples = []
        for number, seed in enumerate(ask.seeds):
            params = SamplingParams(**ask.params, n=len(ask.seeds), sampling_seed=seed)
            params.validate(self.shape.vocab_size)
            rid = f"r{self._count}" if number == 0 else f"r{self._count}_{number}"
            samples.append(
                TokenizedGenerateReqInput(
                    rid=rid, input_ids=ask.prompt, sampling_params=params, stream=ask.stream, extra_key=key,
                    max_kv_version_lag=ask.lag, max_mask_ids=ask.mask_ids, priority=ask.priority,
                    session_id=ask.session, **fields,
                )
            )  # fmt: skip
            self.results[rid] = Result(rid, ask.prompt, route_shape=self._route_shape)
            must_be_refused = self.scheduler.serving.withheld is not None
            self.watches[rid] = Watch(ask, seed, key, must_be_refused=must_be_refused)
            self._open[rid] = None
        self.channel.inbox.append(TokenizedGenerateReqInput.of_samples(samples))

    def abort(self, rids: list[str] | None) -> None:
        """Send an abort of the named requests, or of all."""
        self.channel.inbox.append(AbortReqInput(rids=rids or [], abort_all=rids is None))
        self.name(self.open_rids if rids is None else [rid for rid in rids if rid in self._open])

    def name(self, rids: list[str]) -> None:
        """Note that these requests must end with the next turn."""
        for rid in rids:
            self.watches[rid].may_end = True
        self._to_end += rids

    def ask_for(self, verb: type[ControlReqInput], **fields: Any) -> ControlReqOutput:
        """Send a verb and turn the loop until it is answered; one that comes at the wrong time is refused."""
        answer = self.control(verb, **fields)
        if not answer.success and answer.status_code not in REFUSALS:
            raise Violation(f"{verb.__name__}: {answer.status_code} {answer.error_type}: {answer.message}")
        return answer

    def wait(self, request_id: str, timeout_s: float = 30.0) -> ControlReqOutput:
        for _ in range(_MAX_TURNS):
            if request_id in self.answers:
                return self.answers.pop(request_id)
            self.tick()
        raise Violation("a verb is never answered")

    def resume(self, below: str | None) -> None:
        """End a pause; requests that began before the weights labelled `below` end with it, and no others."""
        limit = None if below is None else self.scheduler.runner.state.epoch_of(below)
        old = [rid for rid in self._open if limit is not None and self._began_before(rid, limit)]
        self._below = limit
        answer = self.ask_for(ContinueGenerationReqInput, abort_below_weight_version=below)
        self._below = None
        left = [rid for rid in old if rid in self._open]
        if answer.success and left:
            raise Violation(f"{left} began before {below} and go on")

    def began_too_early(self, watch: Watch) -> bool:
        """Return whether the continue that is under way aborts the request."""
        oldest = watch.oldest()
        return self._below is not None and oldest is not None and oldest < self._below

    def _began_before(self, rid: str, limit: int) -> bool:
        oldest = self.watches[rid].oldest()
        return oldest is not None and oldest < limit

    def committing(self, content: int, label: str) -> None:
        """Expect that the next answered verb commits `content`."""
        self.of_epoch.append(content)
        self.labels.append(label)

    def found_before(self, result: Result) -> int:
        """Return the longest prefix that the prompt shares with another request under the same key, in tokens."""
        key, prompt, most = self.watches[result.rid].key, np.array(result.prompt_ids), 0
        for rid, other in self.results.items():
            if rid != result.rid and self.watches[rid].key == key:
                req = self.scheduler._by_rid.get(rid)
                tokens = np.array(other.prompt_ids + (other.token_ids if req is None else req.output_ids))
                length = min(len(tokens), len(prompt))
                differs = np.flatnonzero(tokens[:length] != prompt[:length])
                most = max(most, int(differs[0]) if len(differs) else length)
        return most

    def close(self) -> None:
        events = self.scheduler.kv_events
        if events is not None:
            events.close()

    # --- what is checked in every turn ----------------------------------------------------------------------------

    def tick(self) -> bool:
        self.clock.clock += _TURN_S
        with torch.inference_mode(), _nothing_is_only_logged():  # as in a rank: forwards are played from tapes
            ran = super().tick()
        self._watch()
        self._check_slots()
        return ran

    def check_events(self) -> None:
        """Check that KV events describe the prefix tree as it is."""
        if self._tap is not None:
            self._tap.compare(self.scheduler.cache.prefix_cache, self.scheduler.runner.state.epoch.weight_epoch)

    def _watch(self) -> None:
        serving = self.scheduler.runner.state.epoch
        now = InForce(serving.weight_epoch, serving.weight_version)
        late = self.settings.loop != "sequential"
        turn = Turn(late, self._launched if late else now, now)
        self._launched = now
        for req in self.scheduler.queues.all():
            self.watches[req.rid].advance(req.num_retractions, req.device_len, len(req.output_ids), turn)
        for rid in self.open_rids:
            result = self.results[rid]
            if result.finished is not None:
                del self._open[rid]
                self.watches[rid].end(result, turn)
                self._finished(result, self.watches[rid])
        left = [rid for rid in self._to_end if rid in self._open]
        if left:
            raise Violation(f"{left} had to be aborted")
        self._to_end = []

    def _check_slots(self) -> None:
        scheduler = self.scheduler
        scheduler.cache.check()
        epoch = scheduler.runner.state.epoch.weight_epoch
        for req in scheduler.queues.all():
            req.check()
        for req in scheduler.queues.holding_kv():
            self._check_age(req, epoch)

    def _check_age(self, req: Req, epoch: int) -> None:
        lag = self.settings.lag if req.source.max_kv_version_lag is None else req.source.max_kv_version_lag
        life = self.watches[req.rid].lives[-1]
        if lag >= 0 and life and epoch - min(life) > lag:
            raise Violation(f"{req.rid} runs on KV that is {epoch - min(life)} commits behind; {lag} are allowed")

    def _append(self, output: Any) -> None:
        super()._append(output)
        message = len(output.token_ids), output.num_output_tokens, output.weight_version
        self.watches[output.rid].streamed.append(message)


def _server_args(settings: Settings, is_moe: bool) -> dict[str, Any]:
    return {
        "dtype": settings.dtype,
        "weight_version": "v0",
        "enable_return_routed_experts": is_moe,
        "disable_overlap_schedule": settings.loop == "sequential",
        "max_total_tokens": settings.pool,
        "chunked_prefill_size": settings.chunk,
        "max_running_requests": settings.running,
        "disable_radix_cache": not settings.radix,
        "max_kv_version_lag": settings.lag,
        "sampling_mask_max_tokens": settings.mask_limit,
        "session_pin_fraction": settings.pins,
        "kv_events_config": _EVENTS if settings.events else None,
        "enable_memory_saver": settings.memory != "kept",
        "enable_weights_cpu_backup": settings.memory == "copied",
        "state_snapshot_interval": settings.snapshots,
        "weight_staging": settings.staging,
        **settings.form.settings,
    }


@contextmanager
def _captured() -> Iterator[None]:
    """Make engines that are built inside replay their decode steps, without a line in the log."""
    with captured_engines(), mock.patch.object(build_graphs, "say", lambda *_, **__: None):
        yield


@contextmanager
def _nothing_is_only_logged() -> Iterator[None]:
    """Raise `Violation` for a failed abort, which is only a line in the log elsewhere."""

    def fail(text: str, **_: Any) -> None:
        raise Violation(text)

    with mock.patch.object(scheduler_module, "say", fail):
        yield
