"""Pins of sessions: they keep prefixes from eviction, give way in a fixed order, and never stop a request."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.core.messages.io_struct import AbortReqInput, FlushCacheReqInput
from rollout.core.messages.sessions import FinishSessionReqInput, GetSessionsReqInput
from rollout.memory.kv_pool import SlotAllocator
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from rollout.memory.session_pins import MAX_BRANCHES, SessionPins
from tests.late_loop import loop  # noqa: F401
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness

POOL = 128


class Pinned:
    """A cache with pins and a bound."""

    def __init__(self, max_tokens: int, num_slots: int = 400) -> None:
        self.allocator = SlotAllocator(num_slots)
        self.cache = RadixCache(self.allocator)
        self.now = 0.0
        self.pins = SessionPins(self.cache, max_tokens, keep_s=10.0, clock=lambda: self.now)

    def keep(self, session_id: str, tokens: list[int]) -> RadixNode:
        short = len(tokens) - self.allocator.num_free
        if short > 0:
            self.cache.evict(short)
        slots = self.allocator.alloc(len(tokens))
        node, known = self.cache.insert((None, 0), np.array(tokens), slots)
        self.allocator.free(slots[:known])
        self.pins.keep(session_id, node)
        return node

    def pinned(self) -> set[RadixNode]:
        return {node for ends in self.pins.nodes().values() for end in ends for node in self.cache.path(end)}

    def check(self) -> None:
        assert self.cache.num_pinned == self.cache.num_locked == sum(map(len, self.pinned()))
        assert all(0 < len(ends) <= MAX_BRANCHES for ends in self.pins.nodes().values())


@pytest.mark.parametrize("max_tokens", [0, 5, 40, 200])
def test_the_bound_holds_whatever_comes(max_tokens: int) -> None:
    rng = random.Random(max_tokens)
    made = Pinned(max_tokens)
    most = 0
    for step in range(1500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        made.keep(f"s{rng.randrange(6)}", tokens)
        if rng.random() < 0.05:
            made.pins.drop(f"s{rng.randrange(6)}")
        if rng.random() < 0.05:
            made.now = step / 10
            made.pins.expire()
        made.check()
        most = max(most, made.cache.num_pinned)
    assert 0.7 * max_tokens <= most <= max_tokens
    made.pins.clear()
    made.check()
    made.cache.flush()
    assert made.allocator.num_free == made.allocator.num_slots


def test_a_longer_prefix_takes_the_place_of_the_shorter() -> None:
    made = Pinned(100)
    made.keep("a", [1, 2, 3])
    made.keep("b", [1, 2])
    end = made.keep("a", [1, 2, 3, 4, 5])
    assert made.pins.nodes()["a"] == [end] and made.cache.num_pinned == 5
    made.keep("a", [1, 9, 9])  # a subagent's
    assert made.cache.num_pinned == 7
    for branch in range(20, 20 + MAX_BRANCHES):
        made.keep("a", [1, branch])
    made.check()
    assert end not in made.pins.nodes()["a"]


def test_who_was_quiet_longest_gives_way() -> None:
    made = Pinned(10)
    for session_id in ("a", "b"):
        made.keep(session_id, [ord(session_id)] * 4)
    made.keep("a", [ord("a")] * 5)
    made.keep("c", [7] * 4)
    assert list(made.pins.nodes()) == ["a", "c"]
    made.keep("d", [8] * 11)  # over the bound by itself
    assert list(made.pins.nodes()) == ["a", "c"]


def test_pins_expire_and_die_with_their_weights() -> None:
    made = Pinned(100)
    made.keep("a", [1, 2])
    made.now = 5.0
    assert made.pins.expire() == 10.0
    made.keep("b", [1, 3])
    assert made.pins.expires_in("a") == 5.0 and made.pins.expires_in("b") == 10.0
    made.now = 10.0
    assert made.pins.expire() == 15.0
    assert list(made.pins.nodes()) == ["b"] and made.pins.expires_in("a") is None
    made.pins.retire()
    assert not made.pins.nodes() and made.cache.num_locked == 0


# --- in a scheduler ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


def engine(folder: Path, **settings: Any) -> Harness:
    defaults = {"max_total_tokens": POOL, "session_pin_fraction": 0.5, "enable_return_routed_experts": False}
    return Harness(folder, **defaults | settings)


def turn(harness: Harness, prompt: list[int], session_id: str | None = None, new_tokens: int = 4) -> int:
    """Run one request alone, and return how many of its tokens were cached."""
    (result,) = harness.generate([prompt], {"max_new_tokens": new_tokens}, session_id=session_id)
    assert result.finished is not None and result.finished.reason.type == "length"
    harness.scheduler.cache.check()
    return result.finished.cached_tokens


def flood(harness: Harness) -> None:
    """Run more prompts of other clients than the pool can hold."""
    for first in range(3, 3 + 2 * POOL // 20):
        turn(harness, [first] * 20)


def prompt_of(first: int) -> list[int]:
    return [first, *range(2, 31)]


def test_a_session_finds_its_prefix_again(folders) -> None:
    harness = engine(folders[0])
    assert turn(harness, prompt_of(1), "mine") == turn(harness, prompt_of(2)) == 0
    flood(harness)
    assert turn(harness, prompt_of(1), "mine") == 29
    assert turn(harness, prompt_of(2)) == 0


@pytest.mark.parametrize("ends", ["finished", "aborted"])
def test_late_request_pins_nothing_for_an_ended_session(folders, ends: str) -> None:
    harness = engine(folders[0])
    rid = harness.submit(prompt_of(1), params={"max_new_tokens": 6}, session_id="mine")
    harness.tick()
    harness.tick()
    if ends == "finished":
        assert harness.control(FinishSessionReqInput, session_id="mine").success
    else:
        harness.channel.inbox.append(AbortReqInput(rids=[rid]))
    harness.run()
    assert harness.results[rid].finished is not None
    assert not harness.control(GetSessionsReqInput).data["sessions"]


def test_without_the_flag_nothing_is_pinned(folders) -> None:
    harness = engine(folders[0], session_pin_fraction=0.0)
    turn(harness, prompt_of(1), "mine")
    flood(harness)
    assert turn(harness, prompt_of(1), "mine") == 0
    harness.check_idle()


def test_the_report_counts_each_token_once(folders) -> None:
    harness = engine(folders[0])
    turn(harness, prompt_of(1), "mine")
    harness.submit([*prompt_of(1), 7, 7], rid="running", params={"max_new_tokens": 10}, session_id="mine")
    for _ in range(3):
        harness.tick()
    (req,) = harness.scheduler.queues.holding_kv()
    computed = req.device_len - req.cached_tokens
    data = harness.control(GetSessionsReqInput).data
    report = data["sessions"]["mine"]
    assert data["num_pinned_tokens"] == report["pinned_tokens"] == 33  # 30 and 4 new ones, the last without KV
    assert report["kv_tokens"] == 33 + computed > 33
    assert 0 < report["expires_in_s"] <= 60
    harness.run()
    assert harness.control(FinishSessionReqInput, session_id="nobody").data["num_released_tokens"] == 0
    assert harness.control(FinishSessionReqInput, session_id="mine").data["num_released_tokens"] > 33
    assert harness.control(GetSessionsReqInput).data == {"sessions": {}, "num_pinned_tokens": 0}
    harness.check_idle()


def test_pins_give_way_where_nothing_else_could_run(folders) -> None:
    harness = engine(folders[0], session_pin_fraction=0.9, chunked_prefill_size=16)
    for first in (1, 2, 3):
        turn(harness, prompt_of(first), f"s{first}")
    assert harness.control(GetSessionsReqInput).data["num_pinned_tokens"] > 90
    assert turn(harness, [9] * (POOL - 8), new_tokens=8) == 0  # takes the whole pool
    harness.check_idle()


def test_nobody_is_put_back_for_a_pin(folders) -> None:
    harness = engine(folders[0], session_pin_fraction=0.9)
    for first in (1, 2):
        turn(harness, prompt_of(first), f"s{first}")
    results = harness.generate([[5, 6], [7, 8]], {"max_new_tokens": 55})
    assert [result.finished.num_retractions for result in results if result.finished] == [0, 0]
    assert list(harness.scheduler.cache.pins.nodes()) == []


def test_a_commit_and_a_flush_end_all_pins(folders) -> None:
    harness = engine(folders[0])
    turn(harness, prompt_of(1), "mine")
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    harness.tick()
    harness.check_idle()
    assert harness.scheduler.cache.prefix_cache.num_cached == 0
    assert turn(harness, prompt_of(1), "mine") == 0
    assert harness.control(FlushCacheReqInput).success
    assert turn(harness, prompt_of(1), "mine") == 0


def test_a_pin_expires_after_its_timeout(folders) -> None:
    harness = engine(folders[0], session_pin_timeout=0.05)
    turn(harness, prompt_of(1), "mine")
    time.sleep(0.06)
    harness.tick()
    harness.check_idle()


@pytest.mark.parametrize("chunk", [-1, 16])
def test_pins_change_no_token(folders, chunk: int) -> None:
    """Sessions take turns in a pool that is too small for them: each request gets the tokens that it gets alone."""
    rng = random.Random(chunk)
    prompts = {f"s{i}": [i + 1, *(rng.randrange(1, 60) for _ in range(10))] for i in range(8)}
    alone = engine(folders[0], session_pin_fraction=0.0, max_total_tokens=4096)
    crowded = engine(folders[0], session_pin_fraction=0.8, chunked_prefill_size=chunk)
    for _ in range(4):
        params = {"max_new_tokens": 7}
        expected = {name: alone.generate([ids], params)[0].token_ids for name, ids in prompts.items()}
        rids = {name: crowded.submit(ids, params=params, session_id=name) for name, ids in prompts.items()}
        crowded.run()
        crowded.scheduler.cache.check()
        assert {name: crowded.results[rid].token_ids for name, rid in rids.items()} == expected
        prompts = {name: [*ids, *expected[name], rng.randrange(1, 60)] for name, ids in prompts.items()}
    crowded.scheduler.cache.pins.clear()
    crowded.check_idle()


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_ranks_keep_and_give_up_the_same(folders, layout: str) -> None:
    settings = {"tp_size": 2, "ep_size": 2, "session_pin_fraction": 0.6, "max_total_tokens": POOL}
    if layout == "dp2":
        settings |= {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "all_to_all"}
    rng = random.Random(5)
    with ParallelHarness(folders[0], **settings) as harness:
        for _ in range(4):
            for session in range(6):
                prompt = [session, *(rng.randrange(60) for _ in range(rng.randint(10, 40)))]
                harness.submit(prompt, params={"max_new_tokens": 6}, session_id=f"s{session}")
            harness.run()
            data = harness.control(GetSessionsReqInput).data
            held = [
                {name: [len(node) for end in ends for node in s.cache.prefix_cache.path(end)] for name, ends in pins}
                for s in harness.schedulers
                if (pins := s.cache.pins.nodes().items())
            ]
            assert len(held) == 2
            if layout == "tp2":
                assert held[0] == held[1]
            else:
                assert data["num_pinned_tokens"] == sum(s.cache.prefix_cache.num_pinned for s in harness.schedulers)
                assert [set(rank["sessions"]) for rank in data["dp_ranks"]] == [set(pins) for pins in held]
        assert all(result.finished.reason.type == "length" for result in harness.results.values() if result.finished)
        for scheduler in harness.schedulers:
            scheduler.cache.check()
