"""KV events of models with recurrent layers or windows: a stored block is one from whose end a request can go on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import FlushCacheReqInput, GetStateReqInput
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.http.server_info import kv_events_facts
from rollout.memory.radix_cache import RadixCache
from tests.family_zoo import family_checkpoint
from tests.mixed.listener import Tap, tapped
from tests.mixed.violation import Violation
from tests.scheduler_harness import Harness

EVENTS = '{"endpoint": "ipc:///nowhere"}'
# Tokens between two snapshots, and how many tokens a prompt of each length leaves behind.
STORED = {
    "qwen3_next": (64, {40: 0, 63: 0, 64: 64, 100: 64, 127: 64, 128: 128, 200: 192}),
    "gpt_oss": (128, {40: 0, 100: 0, 127: 0, 128: 128, 200: 128}),
}


class Router:
    """An engine, and a router that follows its events."""

    def __init__(self, tap: Tap, folder: Path, **settings: Any) -> None:
        self.tap = tap
        self.harness = Harness(folder, kv_events_config=EVENTS, **{"max_total_tokens": 4096} | settings)
        self.rng = random.Random(1)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(2, 320) for _ in range(length)]

    def generate(self, prompt: list[int], tokens: int = 1) -> tuple[int, list[int]]:
        """Return how many tokens came from the cache, and the sampled tokens."""
        (result,) = self.harness.generate([prompt], {"max_new_tokens": tokens})
        assert result.finished is not None
        self.check()
        return result.finished.cached_tokens, result.token_ids

    def check(self) -> None:
        scheduler = self.harness.scheduler
        self.tap.compare(scheduler.cache.prefix_cache, scheduler.runner.state.epoch.weight_epoch)

    def is_end(self, prompt: list[int], length: int) -> bool:
        """Return whether nothing is stored below the first `length` tokens."""
        tree, parent = self.tap.tree, ("root", None)
        for token in prompt[:length]:
            parent = tree.below[parent, token]  # type: ignore[index]
        return not any(above == parent for above, _ in tree.below)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: family_checkpoint(base / name, name, 3, max_position_embeddings=512) for name in STORED}


@pytest.fixture
def tap() -> Iterator[Tap]:
    with tapped() as found:
        yield found


@pytest.mark.parametrize("family", STORED)
def test_a_prompt_is_stored_as_far_as_the_next_request_finds_it(
    folders: dict[str, Path], tap: Tap, family: str
) -> None:
    """C7: no token is stored of a prompt that ends before the first snapshot."""
    router = Router(tap, folders[family])
    for length, stored in STORED[family][1].items():
        prompt = router.prompt(length)
        router.generate(prompt)
        assert tap.tree.match(prompt) == stored, length
        assert router.generate([*prompt, 7, 8])[0] == stored, length


def traffic(router: Router, requests: int) -> tuple[int, int]:
    """Play conversations that go on and branch; count the requests that found a whole stored path, and any prefix.

    A request that goes on from the end of a stored path finds the whole path.  A request that leaves the path earlier
    finds the last snapshot before that place, if there is one.
    """
    granularity = router.harness.scheduler.cache.granularity
    conversations, exact, hits = [router.prompt(80)], 0, 0
    for number in range(requests):
        if number % 25 == 24:
            router.harness.control(FlushCacheReqInput)
            router.check()
        before = router.rng.choice(conversations[-6:])
        shared = len(before) if router.rng.random() < 0.8 else router.rng.randrange(len(before))
        prompt = [*before[:shared], *router.prompt(router.rng.randrange(1, 120))][:380]
        told = router.tap.tree.match(prompt)
        ends = told < len(prompt) and router.is_end(prompt, told)
        found, output = router.generate(prompt, router.rng.randrange(1, 100))
        assert found <= min(told, len(prompt) - 1) // granularity * granularity
        if ends:
            assert found == told
            exact += 1
        hits += found > 0
        conversations.append(prompt + output)
    return exact, hits


@pytest.mark.parametrize("rows", ["many", "few"])
@pytest.mark.parametrize("family", STORED)
def test_requests_find_what_the_events_say(folders: dict[str, Path], tap: Tap, family: str, rows: str) -> None:
    """C7: events report evicted tokens, and also snapshots that were dropped as the least recently used."""
    few = {"max_running_requests": 2, "max_total_tokens": 900}
    few |= {"max_state_rows": 5} if family == "qwen3_next" else {"chunked_prefill_size": 128}
    router = Router(tap, folders[family], **(few if rows == "few" else {}))
    exact, hits = traffic(router, 60)
    assert exact > 7 and hits > 15
    answer = router.harness.control(
        UpdateWeightsFromDiskReqInput, model_path=str(folders[family]), weight_version="next"
    )
    assert answer.success
    router.harness.tick()
    assert not tap.tree.blocks and not router.tap.tree.below
    router.generate(router.prompt(300))
    assert tap.tree.blocks


def test_where_no_row_is_left_for_snapshots_nothing_is_stored(folders: dict[str, Path], tap: Tap) -> None:
    """C7: requests find nothing, and events report nothing."""
    router = Router(tap, folders["qwen3_next"], max_running_requests=4, max_state_rows=4)
    prompt = router.prompt(300)
    for _ in range(2):
        assert router.generate(prompt)[0] == 0 and not tap.tree.blocks


@pytest.mark.parametrize("family", STORED)
def test_the_server_says_of_which_multiple_a_request_finds_tokens(
    folders: dict[str, Path], tap: Tap, family: str
) -> None:
    """C7: a router rounds down the length of a known path where a prompt leaves it."""
    router = Router(tap, folders[family])
    state = router.harness.scheduler._verbs[GetStateReqInput](GetStateReqInput(request_id="s")).data
    args = ServerArgs(model_path="m", kv_events_config=EVENTS)
    facts = kv_events_facts(args, [state])
    assert facts is not None and facts["granularity"] == STORED[family][0] and facts["block_size"] == 1


@pytest.mark.mutant
@pytest.mark.parametrize("what", ["_withdraw", "_announce"])
def test_events_that_are_left_out_are_noticed(
    folders: dict[str, Path], tap: Tap, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(RadixCache, what, lambda *_: None)
    router = Router(tap, folders["qwen3_next"], max_running_requests=2, max_state_rows=4)
    with pytest.raises((Violation, AssertionError)):
        traffic(router, 60)
