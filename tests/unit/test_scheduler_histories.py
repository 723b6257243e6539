"""Random histories of requests, steps, aborts, pauses and flushes over a real scheduler: the idle invariant.

After any history: every request got exactly one finish, no request is left anywhere, and
`free + cached + in use == total` with no slot in two places.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollout.core.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from rollout.core.weight_io_struct import UpdateWeightVersionReqInput
from rollout.entrypoints.make_checkpoint import CheckpointSpec, make_checkpoint
from rollout.scheduler import build
from tests.decode_batch_faults import ForgetsToAdvance, ForgetsWhoLeft
from tests.scheduler_harness import Harness

TINY = CheckpointSpec(
    hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, experts=4, top_k=2,
    moe_intermediate_size=8, context_length=64, vocab_size=300,
)  # fmt: skip
POOL = 48


class Histories(RuleBasedStateMachine):
    """Small pool, small chunks, few tokens: retraction, chunking and eviction happen all the time."""

    checkpoint: str

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(
            self.checkpoint, max_total_tokens=POOL, chunked_prefill_size=5, max_running_requests=4, context_length=64
        )

    @rule(
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=24),
        new=st.integers(0, 20),
        stream=st.booleans(),
        key=st.sampled_from([None, "a"]),
        scored=st.sampled_from([-1, 0, 1]),
    )
    def submit(self, prompt: list[int], new: int, stream: bool, key: str | None, scored: int) -> None:
        self.harness.submit(
            prompt, params={"max_new_tokens": new}, stream=stream, extra_key=key, logprob_start_len=scored
        )

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

    @rule(mode=st.sampled_from(["abort", "retract", "in_place"]))
    def pause(self, mode: str) -> None:
        answer = self.harness.control(PauseGenerationReqInput, mode=mode)
        assert answer.success and answer.data["paused"]
        assert not self.harness.tick(), "no step runs while paused"

    @rule()
    def resume(self) -> None:
        assert self.harness.control(ContinueGenerationReqInput).success

    @rule()
    def flush(self) -> None:
        self.harness.control(FlushCacheReqInput)

    @rule(version=st.sampled_from(["x", "y"]), abort=st.booleans())
    def relabel(self, version: str, abort: bool) -> None:
        assert self.harness.control(UpdateWeightVersionReqInput, new_version=version, abort_all_requests=abort).success

    @invariant()
    def slots_add_up(self) -> None:
        self.harness.scheduler.cache.check()
        for req in self.harness.scheduler.queues.all():
            req.check()

    def teardown(self) -> None:
        harness = self.harness
        harness.control(ContinueGenerationReqInput)
        harness.run()
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


def test_histories(tmp_path_factory) -> None:
    Histories.checkpoint = str(make_checkpoint(tmp_path_factory.mktemp("model"), TINY))
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("wrong", [ForgetsWhoLeft, ForgetsToAdvance])
def test_histories_catch_a_batch_whose_arrays_go_astray(tmp_path_factory, monkeypatch, wrong: type) -> None:
    Histories.checkpoint = str(make_checkpoint(tmp_path_factory.mktemp("model"), TINY))
    monkeypatch.setattr(build, "DecodeBatch", wrong)
    unshrunk = settings(
        max_examples=20, stateful_step_count=20, deadline=None, database=None, phases=[Phase.generate],
        derandomize=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="arrays and the requests differ"):
        run_state_machine_as_test(Histories, settings=unshrunk)
