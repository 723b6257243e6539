"""Slots that are entered for the steps to come: right places, never lost, given up when another request needs them."""

from __future__ import annotations

import pytest
import torch

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.memory.cache_manager import MAX_STEPS_AHEAD, CacheManager
from rollout.scheduler.req import Req

CONTEXT = 40


class Rows:
    """Requests with prompts of 1, 2, .. tokens, whose KV is computed; they decode together as one generation."""

    def __init__(self, num_slots: int, count: int) -> None:
        self.cache = CacheManager(
            num_slots=num_slots, max_requests=count + 1, max_context=CONTEXT, device="cpu", disable_radix_cache=False
        )
        self.generation = 0
        self.reqs = [self.prefilled(length + 1) for length in range(count)]

    def prefilled(self, length: int) -> Req:
        params = SamplingParams(max_new_tokens=CONTEXT - length)
        tokens = [length] * length
        req = Req(
            TokenizedGenerateReqInput(rid=str(length), input_ids=tokens, sampling_params=params),
            arrival=length, seed=0, end_ids=frozenset(),
        )  # fmt: skip
        self.cache.attach(req, (None, 0))
        self.cache.extend(req, length)
        req.device_len = length
        req.output_ids.append(0)
        return req

    def step(self) -> None:
        pool_indices = torch.tensor([req.pool_index for req in self.reqs])
        positions = torch.tensor([req.device_len for req in self.reqs])
        slots = self.cache.extend_each(self.generation, pool_indices, positions)
        assert torch.equal(self.cache.pool.table[pool_indices, positions], slots)
        for req in self.reqs:
            req.device_len += 1
            req.output_ids.append(0)
        self.check()

    def check(self) -> None:
        """Check that no slot belongs to two requests, or to a request and to anything else."""
        self.cache.check()
        held = torch.cat([self.cache.slots(req, 0, req.device_len) for req in self.reqs])
        assert held.unique().shape == held.shape
        assert not set(held.tolist()) & set(self.cache.allocator.free_slots().tolist())

    def end(self) -> None:
        for req in self.reqs:
            self.cache.detach(req, 0)
        self.reqs = []
        self.cache.check()
        assert self.cache.num_private == 0


def test_a_request_uses_its_context_to_the_last_token() -> None:
    rows = Rows(num_slots=2000, count=3)
    available = rows.cache.num_available
    for step in range(CONTEXT - 3):
        rows.step()
        assert rows.cache.num_available == available - 3 * (step + 1), "what is ahead counts as available"
    assert rows.cache._steps_ahead == MAX_STEPS_AHEAD
    rows.end()


def test_slots_ahead_are_given_up_before_anything_is_evicted() -> None:
    rows = Rows(num_slots=80, count=3)
    cached = rows.prefilled(30)
    rows.cache.detach(cached, 0)
    for _ in range(4):
        rows.step()
    assert rows.cache._num_ahead > 0
    newcomer = rows.prefilled(29)  # more than the free list holds, and different tokens
    rows.check()
    assert rows.cache._num_ahead == 0
    assert rows.cache.prefix_cache.num_cached == 30
    rows.reqs.append(newcomer)
    rows.generation += 1
    rows.step()
    rows.end()


def test_a_pool_of_just_enough_slots_is_used_up() -> None:
    rows = Rows(num_slots=30, count=3)
    for _ in range(8):  # 6 prompt tokens and 8 steps of 3
        rows.step()
    assert rows.cache.num_available == 0
    rows.end()


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_row_that_leaves_takes_nothing_with_it(leaver: int) -> None:
    rows = Rows(num_slots=300, count=3)
    for _ in range(6):
        rows.step()
    rows.cache.detach(rows.reqs.pop(leaver), 0)
    rows.generation += 1
    for _ in range(6):
        rows.step()
    rows.end()


def test_check_notices_a_lost_slot() -> None:
    rows = Rows(num_slots=300, count=3)
    for _ in range(4):
        rows.step()
    rows.cache._ahead.pop()
    with pytest.raises(AssertionError):
        rows.cache.check()


def test_the_checker_notices_slots_of_another_generation() -> None:
    rows = Rows(num_slots=300, count=3)
    for _ in range(4):
        rows.step()
    rows.reqs.reverse()
    with pytest.raises(AssertionError):
        rows.step()  # the same generation, other rows
