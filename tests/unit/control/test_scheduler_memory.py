"""Memory hand-over of a real scheduler: what is refused, what survives, and when it serves again.

Float32 on the compiled operators, so that "the same" means the same bits.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    FlushCacheReqInput,
    GetStateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.kernels import native_ops
from tests.late_loop import captured_loop  # noqa: F401
from tests.local_refresh import deliver, io_of, refresh, updater_of
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.memory.test_memory_saver import files_of_at_most

PROMPTS = [[5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9], [5, 9, 2, 6, 1]]
ALL = ["weights", "kv_cache", "cuda_graph"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def new_tensors(folders: list[Path]) -> dict[str, torch.Tensor]:
    return logical_tensors(folders[1])


def engine(folder: Path, **settings: Any) -> Harness:
    return Harness(folder, weight_version="v1", **{"enable_memory_saver": True} | settings)


def release(harness: Harness, *tags: str) -> ControlReqOutput:
    return harness.control(ReleaseMemoryOccupationReqInput, tags=list(tags) or None)


def resume(harness: Harness, *tags: str) -> ControlReqOutput:
    return harness.control(ResumeMemoryOccupationReqInput, tags=list(tags) or None)


def answers(harness: Harness) -> list[tuple]:
    results = harness.generate(PROMPTS, {"max_new_tokens": 6})
    return [(result.token_ids, result.logprobs, result.routes.tolist()) for result in results]


def refusal(harness: Harness) -> str:
    """Return the message of the 503 with which a request is refused now."""
    rid = harness.submit(PROMPTS[0], params={"max_new_tokens": 1})
    harness.tick()
    finished = harness.results[rid].finished
    assert finished is not None and finished.reason.type == "abort" and finished.reason.status_code == 503
    return finished.reason.message


def storages(harness: Harness) -> list[int]:
    runner = harness.scheduler.runner
    tensors = [*runner.state.model.tensors(), *runner.kv_pool.k, *runner.kv_pool.v, harness.scheduler.cache.pool.table]
    return [tensor.data_ptr() for tensor in tensors]


def memory(harness: Harness) -> dict[str, str]:
    return harness.control(GetStateReqInput).data["memory"]


def test_without_the_flag_it_is_refused(folders) -> None:
    harness = engine(folders[0], enable_memory_saver=False)
    for answer in (release(harness), resume(harness)):
        assert not answer.success and answer.status_code == 400 and "--enable-memory-saver" in answer.message
    assert len(answers(harness)) == 3


def test_everything_released_and_restored_by_a_refresh(folders, new_tensors) -> None:
    """The order of slime: release all, resume weights, refresh, continue, resume the rest."""
    harness = engine(folders[0])
    old, addresses = answers(harness), storages(harness)
    harness.control(PauseGenerationReqInput, mode="abort")
    released = release(harness)
    assert released.success and released.data["released"] == ALL and released.data["num_bytes"] > 0
    assert "released (weights, kv_cache)" in refusal(harness)
    assert resume(harness, "weights").success
    assert memory(harness) == {"weights": "awaiting_refresh", "kv_cache": "released", "cuda_graph": "released"}
    assert refresh(harness, new_tensors, "v2").success
    assert harness.control(ContinueGenerationReqInput).success
    assert "released (kv_cache)" in refusal(harness)
    assert resume(harness, "kv_cache").success
    assert memory(harness) == {"weights": "in_use", "kv_cache": "in_use", "cuda_graph": "released"}
    assert answers(harness) == answers(engine(folders[1])), "nothing is held under cuda_graph, so nothing is missing"
    assert resume(harness, "cuda_graph").success
    assert set(memory(harness).values()) == {"in_use"}
    assert answers(harness) == answers(engine(folders[1])) != old
    assert storages(harness) == addresses
    harness.check_idle()


def test_what_a_refresh_keeps_for_the_next_goes_with_the_weights(folders, new_tensors) -> None:
    harness = engine(folders[0])
    assert refresh(harness, new_tensors, "v2").success
    shadows = updater_of(harness)._held.shadows
    assert shadows._areas
    assert release(harness, "kv_cache").success and shadows._areas
    assert release(harness, "weights").success and not shadows._areas
    assert resume(harness).success and refresh(harness, new_tensors, "v3").success
    assert answers(harness) == answers(engine(folders[1]))


def test_without_keeping_a_refresh_leaves_no_memory(folders, new_tensors) -> None:
    harness = engine(folders[0], keep_staging_memory=False)
    assert refresh(harness, new_tensors, "v2").success
    held = updater_of(harness)._held
    held.await_release(5.0)
    assert not held.shadows._areas


def test_resumed_weights_without_content_serve_nothing(folders, new_tensors) -> None:
    """They serve neither at once, nor after half a refresh, nor after a failed one."""
    harness = engine(folders[0])
    assert release(harness, "weights").success
    answer = resume(harness, "weights")
    assert answer.success and "complete refresh" in answer.message
    assert "complete refresh" in refusal(harness)
    name = sorted(new_tensors)[0]
    assert refresh(harness, {name: new_tensors[name]}, "v2", coverage="partial").success
    assert "complete refresh" in refusal(harness)
    assert not refresh(harness, {name: new_tensors[name]}, "v3").success
    assert "complete refresh" in refusal(harness)
    assert refresh(harness, new_tensors, "v4").success
    assert answers(harness) == answers(engine(folders[1]))


def test_a_refresh_into_released_weights_restores_them(folders, new_tensors) -> None:
    harness = engine(folders[0])
    assert release(harness, "weights").success
    assert refresh(harness, new_tensors, "v2").success
    assert answers(harness) == answers(engine(folders[1]))
    assert memory(harness)["weights"] == "in_use"
    assert resume(harness, "weights").success, "the refresh came first; there is nothing left to do"
    assert resume(harness, "weights").status_code == 409
    assert release(harness, "weights").success


def bucket(harness: Harness, tensors: dict[str, torch.Tensor], **fields: Any) -> ControlReqOutput:
    """Send tensors in one call without a begin, and return the answer."""
    payload = bytearray(safetensors.torch.save(tensors))
    return harness.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors", **fields)


def split(tensors: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[start::count]} for start in range(count)]


@pytest.mark.parametrize("version", [None, "v2"])
def test_calls_without_begin_into_lost_weights_add_up(folders, new_tensors, version: str | None) -> None:
    """The order of verl without a backup: release, resume the weights, buckets, resume the rest; no call pauses."""
    harness = engine(folders[0])
    assert release(harness).success and resume(harness, "weights").success
    for part in split(new_tensors, 3)[:2]:
        answer = bucket(harness, part, weight_version=version)
        assert answer.success and answer.data["weight_update"]["implicit"], answer.message
        assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
    answer = bucket(harness, split(new_tensors, 3)[2], weight_version=version)
    assert answer.success and answer.data["num_tensors"] == len(new_tensors)
    assert answer.data["weight_version"] == (version or "v1+1")
    assert resume(harness, "kv_cache").success
    assert answers(harness) == answers(engine(folders[1]))
    name = sorted(new_tensors)[0]
    after = bucket(harness, {name: new_tensors[name]}, weight_version="v3")
    assert after.data["weight_version"] == f"v3~1of{len(new_tensors)}", "with content each call is one of its own"


@pytest.mark.parametrize("anew", ["resume", "pause", "abort"])
def test_a_bad_call_of_those_ends_them_until_a_new_start(folders, new_tensors, anew: str) -> None:
    """Tensors of the failed attempt may not join the tensors of the next one."""
    harness = engine(folders[0])
    assert release(harness, "weights").success
    first, second = split(new_tensors, 2)
    assert bucket(harness, first).success
    name = sorted(second)[0]
    bad = bucket(harness, {name: torch.full_like(second[name], torch.nan)})
    assert bad.status_code == 400 and "finite" in bad.message
    refused = bucket(harness, second)
    assert refused.status_code == 409 and "an earlier weight update was dropped" in refused.message
    if anew == "resume":
        assert resume(harness, "weights").success
    elif anew == "abort":
        harness.control(AbortWeightUpdateReqInput)
    else:
        assert harness.control(PauseGenerationReqInput).success
    assert bucket(harness, second).success and bucket(harness, first).success
    if anew == "pause":
        assert harness.control(ContinueGenerationReqInput).success
    assert answers(harness) == answers(engine(folders[1]))


def test_another_label_does_not_join_them(folders, new_tensors) -> None:
    harness = engine(folders[0])
    assert release(harness, "weights").success
    first, second = split(new_tensors, 2)
    assert bucket(harness, first, weight_version="6").success
    assert bucket(harness, second, weight_version="7").status_code == 409
    assert bucket(harness, second, weight_version="6").success
    assert answers(harness) == answers(engine(folders[1]))


def test_an_update_of_nothing_changes_the_label_only(folders) -> None:
    harness = engine(folders[0])
    old = answers(harness)
    for update_id, version, want in (("a", None, "v1"), ("b", "v2", "v2")):
        assert harness.control(BeginWeightUpdateReqInput, coverage="partial", update_id=update_id).success
        answer = harness.control(EndWeightUpdateReqInput, update_id=update_id, weight_version=version)
        assert answer.success and answer.data["num_tensors"] == 0 and answer.data["weight_epoch"] == 0
        assert answer.data["weight_version"] == want == harness.control(GetStateReqInput).data["weight_version"]
    alone = bucket(harness, {}, weight_version="v3")
    assert alone.success and alone.data["weight_version"] == "v2", "a call of nothing, outside of an update"
    assert answers(harness) == old
    assert harness.control(BeginWeightUpdateReqInput).success
    refused = harness.control(EndWeightUpdateReqInput)
    assert refused.status_code == 400 and "tensors missing" in refused.message, "an update of all tensors lacks them"


def test_a_kept_copy_serves_the_same_bits(folders) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    old = answers(harness)
    assert release(harness).success
    assert "released" in refusal(harness)
    answer = resume(harness)
    assert answer.success and answer.data["resumed"] == ALL
    assert answers(harness) == old
    hits = harness.generate(PROMPTS[:1], {"max_new_tokens": 1})[0].finished.cached_tokens
    assert hits == len(PROMPTS[0]) - 1
    assert release(harness, "weights").success and resume(harness, "weights").success
    again = harness.generate(PROMPTS[:1], {"max_new_tokens": 6})[0]
    assert again.finished.cached_tokens == len(PROMPTS[0]) - 1, "the same weights: the prefixes stay"
    assert (again.token_ids, again.logprobs, again.routes.tolist()) == old[0]


def test_a_refresh_outdates_the_kept_copy(folders, new_tensors) -> None:
    """A complete refresh serves, and the copy may never overwrite it; after half a refresh nothing may serve."""
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    assert release(harness, "weights").success
    name = sorted(new_tensors)[0]
    assert refresh(harness, {name: new_tensors[name]}, "v2", coverage="partial").success
    assert resume(harness, "weights").success
    assert "complete refresh" in refusal(harness)
    assert refresh(harness, new_tensors, "v3").success
    want = answers(engine(folders[1]))
    assert answers(harness) == want
    assert release(harness, "weights").success
    assert refresh(harness, new_tensors, "v4").success
    assert resume(harness, "weights").success
    assert answers(harness) == want


def test_state_errors_are_conflicts_and_change_nothing(folders) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    old = answers(harness)
    for answer in (resume(harness), resume(harness, "weights"), resume(harness, "kv_cache", "cuda_graph")):
        assert answer.status_code == 409 and "not currently released" in answer.message
    assert release(harness, "kv_cache").success
    for tags in (["kv_cache"], ["weights", "kv_cache"]):
        answer = release(harness, *tags)
        assert answer.status_code == 409 and answer.message == "already released: kv_cache"
    assert memory(harness) == {"weights": "in_use", "kv_cache": "released", "cuda_graph": "in_use"}
    assert resume(harness, "kv_cache", "weights").message == "not currently released: weights"
    assert release(harness).data["released"] == ["weights", "cuda_graph"], "without names: what is still in use"
    assert release(harness).message == "already released: weights, kv_cache, cuda_graph"
    assert resume(harness).data["resumed"] == ALL
    assert answers(harness) == old
    harness.check_idle()


@pytest.mark.parametrize("paused", [None, "in_place"])
@pytest.mark.parametrize("tag", ALL)
def test_running_requests_are_a_conflict(folders, paused: str | None, tag: str) -> None:
    harness = engine(folders[0])
    want = engine(folders[0]).generate([PROMPTS[0]], {"max_new_tokens": 30})[0]
    harness.submit(PROMPTS[0], rid="r", params={"max_new_tokens": 30})
    for _ in range(3):
        harness.tick()
    if paused:
        harness.control(PauseGenerationReqInput, mode=paused)
    answer = release(harness, tag)
    assert not answer.success and answer.status_code == 409 and "1 requests running" in answer.message
    harness.control(ContinueGenerationReqInput)
    harness.run()
    result = harness.results["r"]
    assert (result.token_ids, result.logprobs) == (want.token_ids, want.logprobs)


def test_requests_that_wait_survive_a_release(folders) -> None:
    harness = engine(folders[0], max_running_requests=1)
    want = engine(folders[0], max_running_requests=1).generate([PROMPTS[0]], {"max_new_tokens": 12})[0]
    harness.submit(PROMPTS[0], rid="r", params={"max_new_tokens": 12})
    for _ in range(4):
        harness.tick()
    harness.control(PauseGenerationReqInput, mode="retract")
    assert release(harness, "kv_cache").success
    assert harness.control(ContinueGenerationReqInput).success
    for _ in range(3):
        assert not harness.tick(), "no step runs without memory"
    assert resume(harness, "kv_cache").success
    harness.run()
    result = harness.results["r"]
    assert (result.token_ids, result.logprobs) == (want.token_ids, want.logprobs)
    assert result.routes.tolist() == want.routes.tolist() and result.finished.num_retractions == 1
    harness.check_idle()


def test_nothing_depends_on_kv_from_before(folders) -> None:
    harness = engine(folders[0])
    old = answers(harness)
    pool, table = harness.scheduler.runner.kv_pool, harness.scheduler.cache.pool.table
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(torch.nan)
    assert release(harness, "kv_cache").success
    assert harness.scheduler.cache.prefix_cache.num_cached == 0
    assert not any(tensor.any() for tensor in (*pool.k, *pool.v, table))
    assert resume(harness, "kv_cache").success
    assert answers(harness) == old
    assert harness.control(FlushCacheReqInput).success
    harness.check_idle()


def test_an_empty_list_of_tags_names_nothing(folders: list[Path]) -> None:
    """C9: a client that computed an empty list lost all of its memory."""
    harness = engine(folders[0])
    for verb in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
        refused = harness.control(verb, tags=[])
        assert refused.status_code == 400 and "leave it out for all" in refused.message
    assert set(harness.control(GetStateReqInput).data["memory"].values()) == {"in_use"}
    assert harness.control(ReleaseMemoryOccupationReqInput, tags=None).data["released"] == ALL


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_release_in_the_middle_of_a_refresh(folders, new_tensors, tag: str) -> None:
    """Weights are in the refresh's hands until it ends; KV is not."""
    harness = engine(folders[0])
    names = sorted(new_tensors)
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
    deliver(harness, {name: new_tensors[name] for name in names[::2]})
    answer = release(harness, tag)
    assert answer.success == (tag == "kv_cache")
    if tag == "weights":
        assert answer.status_code == 409 and "a weight update is already open" in answer.message
    deliver(harness, {name: new_tensors[name] for name in names[1::2]})
    assert harness.control(EndWeightUpdateReqInput).success
    if tag == "kv_cache":
        assert "kv_cache" in refusal(harness)
        assert resume(harness).success
    assert answers(harness) == answers(engine(folders[1]))


def test_a_kept_copy_is_not_put_back_below_an_open_refresh(folders, new_tensors) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    old = answers(harness)
    assert release(harness, "weights").success
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
    assert resume(harness, "weights").status_code == 409
    assert harness.control(AbortWeightUpdateReqInput).success
    assert resume(harness, "weights").success
    assert answers(harness) == old


def test_a_copy_that_cannot_be_kept_releases_nothing(folders) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    old = answers(harness)
    with files_of_at_most(1000):
        answer = release(harness)
    assert not answer.success and answer.status_code == 500 and "kept" in answer.message
    assert set(memory(harness).values()) == {"in_use"}
    assert answers(harness) == old
    assert release(harness).success and resume(harness).success
    assert answers(harness) == old


def test_a_request_that_comes_while_the_copy_is_made_wins(folders) -> None:
    harness = engine(folders[0], enable_weights_cpu_backup=True)
    old = answers(harness)
    copying = threading.Event()
    io_of(harness).submit(lambda: copying.wait(30.0), gives_way=False)  # the copy's turn comes after this
    request = harness.post(ReleaseMemoryOccupationReqInput)
    assert not harness.tick()
    harness.submit(PROMPTS[0], rid="r", params={"max_new_tokens": 100})
    assert harness.tick()
    copying.set()
    answer = harness.wait(request)
    assert not answer.success and answer.status_code == 409 and "1 requests running" in answer.message
    harness.run()
    assert harness.results["r"].finished.reason.type == "length"
    assert set(memory(harness).values()) == {"in_use"} and answers(harness) == old


def test_a_request_that_came_just_before_the_release_wins(folders) -> None:
    harness = engine(folders[0])
    harness.submit(PROMPTS[0], rid="r", params={"max_new_tokens": 3})
    answer = release(harness)
    assert not answer.success and answer.status_code == 409 and "1 waiting" in answer.message
    harness.run()
    assert harness.results["r"].finished.reason.type == "length"
