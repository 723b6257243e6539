"""Every KV slot is in one place, however and whenever a request ends; otherwise the server ends.

a request was retracted, comes back, and ends at its first token -> its slots are free, the tree's are not
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.core.errors import FatalError, InvariantError
from rollout.core.messages.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from rollout.core.messages.sessions import FinishSessionReqInput
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.memory.kv_pool import ReqToTokenPool, SlotAllocator
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import NO_IDS, NO_SLOTS, RadixNode
from rollout.memory.state_pool import SnapshotRows
from rollout.scheduler.req import Req
from tests.engine_thread import EngineThread
from tests.family_zoo import family_checkpoint
from tests.http_harness import live_server
from tests.late_loop import overlap
from tests.local_refresh import deliver, updater_of
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness

PROMPT = [5, 9, 2, 6, 5, 3]
FAMILIES = ["tiny", "qwen3_next", "gpt_oss"]  # KV of every token, recurrent states, windows
LENGTH = 40
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": LENGTH}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    families = {name: family_checkpoint(base / name, name, seed=3) for name in FAMILIES[1:]}
    return families | {name: tiny_checkpoint(base / name, seed=seed) for seed, name in enumerate(["tiny", "next"])}


@pytest.fixture(params=["sequential", "late"], autouse=True)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loops in the gate: the accounting differs between them."""
    if request.param == "late":
        overlap(monkeypatch)


def harness_of(folder: Path, **settings: Any) -> Harness:
    return Harness(
        folder,
        **{"max_total_tokens": 300, "max_running_requests": 8, "state_snapshot_interval": 8, "dtype": "float32"}
        | settings,
    )


def first_record(counts: list[int]) -> int:
    """Return the index of a token, not the first, whose mask is larger than all before it."""
    return next(i for i in range(1, len(counts)) if counts[i] > max(counts[:i]))


def alone(folder: Path) -> tuple[int, int, int]:
    """Return a seed, the token whose mask is larger than all masks before it, and the size of that mask."""
    for seed in range(20):
        (whole,) = harness_of(folder).generate(
            [PROMPT], params=SAMPLED | {"sampling_seed": seed}, return_sampling_mask=True
        )
        token = first_record(whole.mask.counts)
        if token >= 3:
            return seed, token, whole.mask.counts[token]
    raise AssertionError("no seed has such a token")


def run_to(harness: Harness, rid: str, length: int) -> None:
    """Run until `length` tokens of the request are sampled, the step in flight included."""
    scheduler = harness.scheduler
    for _ in range(200):
        harness.tick()
        req, step = scheduler._by_rid[rid], scheduler._in_flight
        if len(req.output_ids) + (step is not None and req in step.sampling) == length:
            return
    raise AssertionError(f"{rid} does not get there")


def others(harness: Harness, count: int = 20) -> list[list[int]]:
    """Run unrelated requests, one after the other, and return their tokens."""
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(12)] for _ in range(count)]
    return [result.token_ids for result in harness.generate(prompts, params={"max_new_tokens": 8})]


def come_back_after_a_pause(harness: Harness, _: Path) -> None:
    assert harness.control(PauseGenerationReqInput, mode="retract").success
    assert harness.control(ContinueGenerationReqInput).success


def come_back_after_a_flush(harness: Harness, _: Path) -> None:
    assert harness.control(FlushCacheReqInput, retract=True).success


def come_back_after_a_commit(harness: Harness, folder: Path) -> None:
    """Retract all requests, load the same weights again, which keeps the tokens equal, and continue."""
    assert harness.control(PauseGenerationReqInput, mode="retract").success
    assert harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folder), weight_version="same").success
    assert harness.control(ContinueGenerationReqInput).success


OTHERS = [come_back_after_a_flush, come_back_after_a_commit]
COMEBACKS = [come_back_after_a_pause, *(pytest.param(other, marks=pytest.mark.full) for other in OTHERS)]


@pytest.mark.parametrize("comes_back", COMEBACKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_over_the_limit_right_after_a_retraction_frees_no_slot_of_the_prefix_tree(
    folders: dict[str, Path], family: str, comes_back: Callable
) -> None:
    """C1: the request ends with a 400, and other requests get the answers that they get alone."""
    folder = folders[family]
    expected = others(harness_of(folder))
    seed, token, size = alone(folder)
    harness = harness_of(folder, sampling_mask_max_tokens=size - 1)
    rid = harness.submit(PROMPT, params=SAMPLED | {"sampling_seed": seed}, return_sampling_mask=True)
    run_to(harness, rid, token)
    comes_back(harness, folder)
    harness.run()
    finished = harness.results[rid].finished
    assert finished is not None and finished.reason.status_code == 400 and finished.num_retractions == 1
    assert len(harness.results[rid].token_ids) == len(harness.results[rid].mask.counts) == token
    harness.check_idle()
    assert others(harness) == expected
    assert harness.control(FlushCacheReqInput).success
    assert harness.scheduler.cache.num_available == 300


ENDS: dict[str, dict[str, Any]] = {
    "length": {"max_new_tokens": 5},
    "stop token": {"stop_token_ids": list(range(160))},
    "end of text": {"ignore_eos": False},
    "stop string": {"stop": [chr(code) for code in range(33, 65)]},
    "abort": {},
    "abort of all": {},
    "pause that aborts": {},
    "end of its session": {},
}


@pytest.mark.parametrize("comes_back", COMEBACKS)
def test_whatever_ends_requests_right_after_a_retraction_every_slot_is_in_one_place(
    folders: dict[str, Path], comes_back: Callable
) -> None:
    """C1: all other ends, each at the first token after the request came back, or some turns later."""
    for family in FAMILIES:
        harness, folder = harness_of(folders[family]), folders[family]
        for number, (end, params) in enumerate(ENDS.items()):
            if end == "stop string" and family != "tiny":
                continue  # the others have no tokenizer
            rid = harness.submit(
                [number, *PROMPT],
                params=SAMPLED | {"min_new_tokens": 5} | params,
                return_sampling_mask=True,
                session_id="s",
            )
            twin = harness.submit([number, *PROMPT], params=SAMPLED)  # shares the prompt
            run_to(harness, rid, 4)
            comes_back(harness, folder)
            for _ in range(number % 3):
                harness.tick()
            if "abort" in end:
                harness.channel.inbox.append(AbortReqInput(rids=[rid, twin], abort_all=end == "abort of all"))
            if end == "end of its session":
                harness.control(FinishSessionReqInput, session_id="s")
            if end == "pause that aborts":
                harness.control(PauseGenerationReqInput, mode="abort")
                harness.control(ContinueGenerationReqInput)
            harness.run()
            assert harness.results[rid].finished and harness.results[twin].finished
            harness.check_idle()


@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_of_masks_over_their_limit_and_a_short_pool_account_for_every_slot(
    folders: dict[str, Path], family: str
) -> None:
    """C1: the accounting is checked after every turn."""
    for seed in range(2):
        rng = random.Random(seed)
        harness = harness_of(folders[family], sampling_mask_max_tokens=110 + 40 * seed, max_total_tokens=150)
        prompts = [[rng.randrange(300) for _ in range(rng.randrange(3, 20))] for _ in range(4)]
        for _ in range(30):
            prompt = rng.choice(prompts)[: rng.randrange(2, 20)]
            harness.submit(
                prompt,
                params=SAMPLED | {"top_p": rng.choice([0.5, 0.9, 1.0]), "max_new_tokens": rng.randrange(1, 60)},
                return_sampling_mask=rng.random() < 0.7,
            )
        while not all(result.finished for result in harness.results.values()):
            harness.tick()
            harness.scheduler.cache.check()
            if rng.random() < 0.1:
                harness.scheduler.retract(
                    rng.sample(running := harness.scheduler.queues.holding_kv(), len(running) // 2)
                )
        harness.check_idle()
        ends = [result.finished.reason.status_code for result in harness.results.values() if result.finished]
        assert len(ends) == 30 and ends.count(400) > 3
        assert harness.scheduler.stats.num_retractions > 10


# --- the assertion that stays on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misuse",
    [
        lambda a, held, cached: a.free(cached),
        lambda a, held, cached: a.free_cached(held),
        lambda a, held, cached: (a.free(held), a.free(held)),
        lambda a, held, cached: (a.free_cached(cached), a.free_cached(cached)),
        lambda a, held, cached: a.keep(cached),
        lambda a, held, cached: (a.free(held[1:]), a.keep(held)),
        lambda a, held, cached: a.free(torch.cat([held, cached[:1]])),
    ],
)
def test_a_slot_that_leaves_a_place_where_it_is_not_is_refused(misuse: Callable) -> None:
    """C1: the check compares the place of each slot, and not only counts."""
    allocator = SlotAllocator(8)
    held, cached = allocator.alloc(3), allocator.alloc(3)
    allocator.keep(cached)
    with pytest.raises(InvariantError):
        misuse(allocator, held, cached)


def test_rows_of_states_and_of_the_slot_table_that_leave_a_place_where_they_are_not_are_refused() -> None:
    """C1: pages of windows are such rows, too."""
    rows, node = SnapshotRows(2, 3), RadixNode(None, NO_IDS, NO_SLOTS)
    taken = rows.take(drops=False)
    assert taken is not None and rows.keep(taken, node, 8)
    with pytest.raises(InvariantError, match="goes to the prefix cache"):
        rows.keep(taken, node, 16)
    rows.free_of(node)
    for misuse in (lambda: rows.free(taken), lambda: rows.keep(taken, node, 8)):
        with pytest.raises(InvariantError):
            misuse()
    rows.check(())
    pool = ReqToTokenPool(2, 10, 5)
    pool.free(row := pool.alloc())
    with pytest.raises(InvariantError, match="freed twice"):
        pool.free(row)


def old_length(req: Req) -> int:
    """Count a token of the tree that the record does not cover (an earlier mistake)."""
    return min(req.device_len, req.num_tokens - bool(req.output_ids))


def test_wrong_accounting_ends_the_server_where_it_happens(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: no answer is computed on a slot that is in two places."""
    seed, token, size = alone(folders["tiny"])
    harness = harness_of(folders["tiny"], sampling_mask_max_tokens=size - 1)
    monkeypatch.setattr(Req, "recorded_len", property(old_length))
    rid = harness.submit(PROMPT, params=SAMPLED | {"sampling_seed": seed}, return_sampling_mask=True)
    run_to(harness, rid, token)
    with pytest.raises(InvariantError):
        come_back_after_a_pause(harness, folders["tiny"])
        harness.run()


@pytest.mark.parametrize("verb", ["abort", "pause", "flush", "refresh"])
def test_a_verb_that_meets_wrong_accounting_is_not_answered_as_a_failure(folders: dict[str, Path], verb: str) -> None:
    """C1: a 500 would leave the server in service."""
    harness = harness_of(folders["tiny"])
    rid = harness.submit(PROMPT, params=SAMPLED)
    run_to(harness, rid, 4)
    harness.scheduler.cache.num_private += 1
    if verb == "abort":
        harness.channel.inbox.append(AbortReqInput(rids=[rid]))
    elif verb == "refresh":
        harness.post(UpdateWeightsFromDiskReqInput, model_path=str(folders["next"]), weight_version="next")
    else:
        kind = PauseGenerationReqInput if verb == "pause" else FlushCacheReqInput
        harness.post(kind, **({"mode": "retract"} if verb == "pause" else {"retract": True}))
    with pytest.raises(InvariantError, match="KV slots accounted for"):
        harness.run()
    assert harness.scheduler.runner.state.epoch.weight_version == "default", "checked before it was published"


# --- nothing fails between publish and answer --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["retire", "drop_retired"])
def test_a_committed_refresh_is_never_answered_as_a_failure(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """C1: an error after the version was published ends the engine, because the version in force is unknown."""

    def fails(*_: Any) -> None:
        raise ValueError("more slots freed than exist")

    harness = harness_of(folders["tiny"])
    harness.generate([PROMPT], params=SAMPLED)
    monkeypatch.setattr(RadixCache, where, fails)
    request_id = harness.post(UpdateWeightsFromDiskReqInput, model_path=str(folders["next"]), weight_version="next")
    with pytest.raises(FatalError, match="in doubt: ValueError: more slots freed"):
        harness.wait(request_id)
    assert request_id not in harness.answers


def test_what_follows_the_commit_of_a_continue_does_not_turn_it_into_a_failure(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: `abort_below_weight_version` acts after the version was published."""

    def fails(*_: Any) -> int:
        raise ValueError("no such request")

    harness = harness_of(folders["tiny"])
    assert harness.control(PauseGenerationReqInput, mode="retract").success
    updater_of(harness).open_implicit("full", "in the pause")
    deliver(harness, logical_tensors(folders["next"]))
    updater_of(harness).admit(None, "name").transaction.weight_version = "next"
    monkeypatch.setattr("rollout.control.weight_control.abort_below", fails)
    request_id = harness.post(ContinueGenerationReqInput, abort_below_weight_version="default")
    with pytest.raises(FatalError, match="weight version 'next' was published, and then ValueError: no such request"):
        harness.wait(request_id)


# --- over HTTP ---------------------------------------------------------------------------------------------------


def flat_checkpoint(source: Path, folder: Path) -> Path:
    """Copy the model, with nearly equal logits: the masks of `top_p` then hold nearly the whole vocabulary."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 0.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_trainer_that_pauses_with_retractions_and_samples_with_masks_gets_its_next_refresh(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """C1: over HTTP, where the flush was a 500, and the refresh, too, with its version in force."""
    flat = flat_checkpoint(folders["tiny"], tmp_path / "flat")
    args = {"max_total_tokens": 400, "dtype": "float32", "sampling_mask_max_tokens": 200, "context_length": 400}
    body = {
        "input_ids": PROMPT,
        "return_sampling_mask": True,
        "sampling_params": SAMPLED | {"ignore_eos": True, "max_new_tokens": 380},
    }
    with live_server(folders["tiny"], engine=EngineThread, **args) as live, ThreadPoolExecutor(1) as pool:

        def call(path: str, **fields: Any) -> None:
            answer = live.client.post(path, json=fields)
            assert answer.status_code == 200, answer.text

        posted = pool.submit(httpx.post, f"{live.url}/generate", json=body, timeout=30)
        live.wait_until(lambda: live.scheduler.scheduler.stats.num_generated > 3)
        call("/pause_generation", mode="retract")
        call("/update_weights_from_disk", model_path=str(flat), weight_version="flat")
        call("/continue_generation")
        refused = posted.result()
        assert refused.status_code == 400 and "--sampling-mask-max-tokens is 200" in refused.text
        call("/flush_cache")
        call("/update_weights_from_disk", model_path=str(folders["next"]), weight_version="next")
        assert live.client.get("/health").status_code == 200
        assert live.scheduler.scheduler.cache.num_available == 400
        assert live.scheduler.error is None
