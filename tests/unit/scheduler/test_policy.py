"""Admission to a full pool is tried again only when it can succeed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.core.messages.io_struct import PauseGenerationReqInput
from tests.late_loop import captured_loop  # noqa: F401
from tests.scheduler_harness import Harness

SPEC = CheckpointSpec(
    hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=16, experts=4, top_k=2,
    moe_intermediate_size=8, context_length=128, vocab_size=300,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("model"), SPEC)


def count_attempts(harness: Harness, rid: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the numbers of the steps in which `rid` is matched against the prefix cache."""
    cache, steps, attempts, num_launched = harness.scheduler.cache, harness.scheduler._steps, [], 0
    attach, launch = cache.attach, steps.launch

    def counted(req, weight_epoch):
        if req.rid == rid:
            attempts.append(num_launched)
        attach(req, weight_epoch)

    def launched(*args):
        nonlocal num_launched
        num_launched += 1
        return launch(*args)

    monkeypatch.setattr(cache, "attach", counted)
    monkeypatch.setattr(steps, "launch", launched)
    return attempts


@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_a_request_that_cannot_fit_is_not_tried_in_every_step(checkpoint, monkeypatch, disable_radix_cache) -> None:
    harness = Harness(checkpoint, max_total_tokens=100, disable_radix_cache=disable_radix_cache)
    attempts = count_attempts(harness, "big", monkeypatch)
    harness.submit([1] * 10, rid="long", params={"max_new_tokens": 60})
    harness.submit([2] * 90, rid="big", params={"max_new_tokens": 2})
    harness.run()
    harness.check_idle()
    assert len(harness.results["big"].token_ids) == 2
    assert 2 <= len(attempts) <= 4, attempts  # at first, when the prompt of `long` entered the cache, at the end


def test_who_has_begun_stays_in_front(checkpoint) -> None:
    """More urgent requests do not overtake it: a pause that waits lets none of them begin, and would never end."""
    harness = Harness(checkpoint, max_running_requests=1)
    harness.submit([9] * 5, rid="begun", params={"max_new_tokens": 8})
    harness.tick()
    harness.tick()
    assert harness.control(PauseGenerationReqInput, mode="retract").success
    harness.submit([8] * 5, rid="urgent", params={"max_new_tokens": 2}, priority=-1)
    verb = harness.post(PauseGenerationReqInput, mode="wait", wait_s=30.0)
    assert harness.wait(verb).success
    assert len(harness.results["begun"].token_ids) == 8 and not harness.results["urgent"].token_ids


def test_priorities_go_first_and_equals_in_their_order(checkpoint) -> None:
    """One request runs at a time; after it comes the waiting request with the lowest `priority`."""
    harness = Harness(checkpoint, max_running_requests=1)
    harness.submit([9] * 5, rid="running", params={"max_new_tokens": 4}, priority=5)
    harness.tick()
    for rid, priority in [("a", 0), ("late", 3), ("b", 0), ("urgent", -1), ("c", 0)]:
        harness.submit([ord(rid[0]) % 7] * 5, rid=rid, params={"max_new_tokens": 2}, priority=priority)
    ended: list[str] = []
    for _ in range(100):
        harness.tick()
        ended += [rid for rid, result in harness.results.items() if result.finished and rid not in ended]
    assert ended == ["running", "urgent", "a", "b", "c", "late"]


def test_a_request_is_tried_again_when_its_prefix_enters_the_cache(checkpoint, monkeypatch) -> None:
    """With 40 of its 60 prompt tokens shared, `later` fits next to the request that computes them."""
    harness = Harness(checkpoint, max_total_tokens=95)
    attempts = count_attempts(harness, "later", monkeypatch)
    prefix = list(range(40))
    harness.submit(prefix, rid="first", params={"max_new_tokens": 30})
    harness.submit([*prefix, *range(100, 120)], rid="later", params={"max_new_tokens": 2})
    harness.run()
    harness.check_idle()
    assert harness.results["later"].finished.cached_tokens == 40
    assert attempts == [0, 1], "refused with the whole prompt to compute, admitted in the next step"
