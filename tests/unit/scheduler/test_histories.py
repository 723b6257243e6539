"""Random histories of requests, steps, aborts, pauses, flushes, refreshes and memory hand-overs over a real scheduler.

After any history: every request got exactly one finish, no request is left anywhere, and
`free + cached + in use == total` with no slot in two places.  At any time: no KV is further behind than its request
allows, and no step runs without memory or content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.control.kv_age import KVAgeLimit
from rollout.core.messages.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import UpdateWeightVersionReqInput
from rollout.engine import build, build_control
from rollout.memory.cache_manager import CacheManager
from rollout.scheduler.req import Req
from tests.decode_batch_faults import ForgetsToAdvance, ForgetsWhoLeft
from tests.in_turn import InTurn
from tests.late_loop import loop  # noqa: F401
from tests.local_refresh import control_of, refresh
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness
from tests.tiers import examples

TINY = CheckpointSpec(
    hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, experts=4, top_k=2,
    moe_intermediate_size=8, context_length=64, vocab_size=300, dtype="float32",
)  # fmt: skip
POOL = 48
LABELS = ["x", "y", "z"]
TAGS = st.lists(st.sampled_from(["weights", "kv_cache", "cuda_graph"]), max_size=3)


class Histories(RuleBasedStateMachine):
    """Small pool, small chunks, few tokens: retraction, chunking and eviction happen all the time."""

    checkpoint: str
    tensors: dict[str, Any]
    server_lag = 1

    @initialize(keeps_copy=st.booleans())
    def start(self, keeps_copy: bool) -> None:
        self.harness = Harness(
            self.checkpoint, max_total_tokens=POOL, chunked_prefill_size=5, max_running_requests=4, context_length=64,
            max_kv_version_lag=self.server_lag, enable_memory_saver=True, enable_weights_cpu_backup=keeps_copy,
            weight_version="x",
        )  # fmt: skip
        self.known = {"x"}

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=24),
        new=st.integers(0, 20),
        stream=st.booleans(),
        key=st.sampled_from([None, "a"]),
        scored=st.sampled_from([-1, 0, 1]),
        lag=st.sampled_from([None, -1, 0, 2]),
    )
    def submit(self, prompt: list[int], new: int, stream: bool, key: str | None, scored: int, lag: int | None) -> None:
        self.harness.submit(
            prompt, params={"max_new_tokens": new}, stream=stream, extra_key=key, logprob_start_len=scored,
            max_kv_version_lag=lag,
        )  # fmt: skip

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.tick()

    @rule(index=st.integers(0, 50))
    def abort_one(self, index: int) -> None:
        rids = list(self.harness.results)
        self.harness.channel.inbox.append(AbortReqInput(rids=[rids[index % len(rids)] if rids else "nobody"]))

    @rule()
    def abort_all(self) -> None:
        self.harness.channel.inbox.append(AbortReqInput(abort_all=True))

    @rule(mode=st.sampled_from(["abort", "retract", "in_place", "wait"]))
    def pause(self, mode: str) -> None:
        scheduler = self.harness.scheduler
        was_paused = scheduler.serving.is_paused
        answer = self.harness.control(PauseGenerationReqInput, mode=mode, wait_s=0.1)
        if mode == "wait" and not answer.success:  # without memory no request ends
            assert answer.status_code == 409 and not scheduler.serving.is_pausing
            assert scheduler.serving.is_paused == was_paused
            return
        assert answer.success and answer.data["paused"]
        assert not self.harness.tick(), "no step runs while paused"
        if mode == "wait":
            assert not scheduler.queues.holding_kv() and not any(req.has_begun for req in scheduler.queues.waiting)

    @rule(below=st.sampled_from([None, *LABELS]))
    def go_on(self, below: str | None) -> None:
        scheduler = self.harness.scheduler
        was_paused = scheduler.serving.is_paused
        self.harness.tick()  # so that the verb finds an empty inbox
        request = self.harness.post(ContinueGenerationReqInput, abort_below_weight_version=below)
        limit = None if below is None else scheduler.runner.state.epoch_of(below)
        answer = self.harness.wait(request)
        assert answer.success == (below is None or below in self.known)
        if not answer.success:
            assert answer.status_code == 400 and scheduler.serving.is_paused == was_paused
        elif limit is not None:
            ages = [scheduler.records.oldest_epoch_used(req) for req in scheduler.queues.all()]
            assert all(age is None or age >= limit for age in ages)

    @rule()
    def flush(self) -> None:
        self.harness.control(FlushCacheReqInput)

    @rule(version=st.sampled_from(LABELS), abort=st.booleans())
    def relabel(self, version: str, abort: bool) -> None:
        assert self.harness.control(UpdateWeightVersionReqInput, new_version=version, abort_all_requests=abort).success
        self.known.add(version)

    @rule(version=st.sampled_from(LABELS), whole=st.booleans())
    def refresh(self, version: str, whole: bool) -> None:
        epoch = self.epoch
        tensors = self.tensors if whole else dict(list(self.tensors.items())[:3])
        answer = refresh(self.harness, tensors, version, coverage="full" if whole else "partial")
        assert answer.success, answer.message
        assert self.epoch == epoch + 1
        self.known.add(version)

    @property
    def epoch(self) -> int:
        return self.harness.scheduler.runner.state.epoch.weight_epoch

    @property
    def memory(self) -> dict[str, str]:
        return control_of(self.harness)._memory.status()

    @invariant()
    def slots_add_up(self) -> None:
        self.harness.scheduler.cache.check()
        for req in self.harness.scheduler.queues.all():
            req.check()

    @invariant()
    def kv_is_young_enough(self) -> None:
        scheduler = self.harness.scheduler
        for req in scheduler.queues.holding_kv():
            lag = self.server_lag if req.source.max_kv_version_lag is None else req.source.max_kv_version_lag
            oldest = scheduler.records.oldest_epoch_held(req)
            assert lag == -1 or oldest is None or self.epoch - oldest <= lag, "KV is too old"

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.control(ResumeMemoryOccupationReqInput)
        assert refresh(harness, self.tensors, "z").success
        harness.control(ContinueGenerationReqInput)
        harness.run()
        assert harness.scheduler.serving.withheld is None
        harness.check_idle()
        for result in harness.results.values():
            assert result.finished is not None, f"{result.rid} was never answered"
            if result.finished.reason.type == "length":
                rows = len(result.prompt_ids) + len(result.token_ids) - 1
                assert result.routes.shape[0] == rows
                assert (result.routes < 4).all()
                spans = result.versions
                assert [s for _, s, _ in spans] == [0, *[e for _, _, e in spans[:-1]]][: len(spans)]
                assert not spans or spans[-1][2] == len(result.token_ids)


class HandOvers(Histories):
    """Histories in which memory is released and resumed, too."""

    @rule(tags=TAGS)
    def release(self, tags: list[str]) -> None:
        scheduler = self.harness.scheduler
        self.harness.tick()  # messages in the inbox would come between
        busy = bool(scheduler.queues.holding_kv()) or scheduler.has_work
        before = self.memory
        wanted = set(tags) or {tag for tag, state in before.items() if state != "released"}
        again = [tag for tag in wanted if before[tag] == "released"]
        answer = self.harness.control(ReleaseMemoryOccupationReqInput, tags=tags or None)
        assert answer.success == (bool(wanted) and not again and not busy), answer.message
        if answer.success:
            assert all(self.memory[tag] == "released" for tag in wanted)
        else:
            assert answer.status_code == 409 and self.memory == before

    @rule(tags=TAGS)
    def take_back(self, tags: list[str]) -> None:
        before = self.memory
        answer = self.harness.control(ResumeMemoryOccupationReqInput, tags=tags or None)
        assert answer.success or answer.status_code == 409
        if answer.success:
            assert "released" not in [self.memory[tag] for tag in answer.data["resumed"]]
        else:
            assert self.memory == before

    @invariant()
    def nothing_holds_kv_without_memory(self) -> None:
        scheduler = self.harness.scheduler
        if scheduler.serving.withheld is not None:
            assert not scheduler.queues.holding_kv() and not scheduler.has_work
        needed = {state for tag, state in self.memory.items() if tag != "cuda_graph"}  # nothing is held under that one
        assert (scheduler.serving.withheld is None) == (needed == {"in_use"})


@pytest.fixture(autouse=True, scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), TINY)
    Histories.checkpoint, Histories.tensors = str(folder), logical_tensors(folder)


@pytest.mark.parametrize("machine", [Histories, HandOvers])
def test_random_histories_keep_all_invariants(machine: type) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(40, gate=8),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


class _OneCommitLate(KVAgeLimit):
    """Lets KV be one commit further behind than it may be."""

    def _is_too_old(self, req: Req, weight_epoch: int) -> bool:
        return super()._is_too_old(req, weight_epoch - 1)


class _KeepsPrefixes(CacheManager):
    """Gives the KV pool away with the prefixes that are in it."""

    def flush(self) -> None:
        self._free_ahead()
        self.prefix_cache.num_cached = 0


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("machine", "part", "wrong", "noticed"),
    [
        (Histories, "DecodeBatch", ForgetsWhoLeft, "arrays and the requests differ"),
        (Histories, "DecodeBatch", ForgetsToAdvance, "arrays and the requests differ"),
        (Histories, "KVAgeLimit", _OneCommitLate, "KV is too old"),
        (HandOvers, "CacheManager", _KeepsPrefixes, "KV slots accounted for"),
    ],
)
def test_histories_catch_wrong_parts(monkeypatch, machine: type, part: str, wrong: type, noticed: str) -> None:
    monkeypatch.setattr(build if hasattr(build, part) else build_control, part, wrong)
    monkeypatch.setattr("rollout.control.weight_queue.ThreadPoolExecutor", InTurn)
    unshrunk = settings(
        max_examples=1500, stateful_step_count=20, deadline=None, database=None, phases=[Phase.generate],
        derandomize=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises((AssertionError, IndexError)) as caught:
        run_state_machine_as_test(machine, settings=unshrunk)
    assert any(noticed in str(error) for error in _chain(caught.value))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the errors behind it: the end of a history can fail over its failure."""
    while error is not None:
        yield error
        error = error.__context__
