"""The age that KV may reach: retraction after commits, aborts below a version, and what records say of it.

Float32 on the compiled operators: a token re-scored by a fresh engine has the bits that it was sampled with.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import UpdateWeightVersionReqInput
from tests.kernels import native_ops
from tests.late_loop import captured_loop  # noqa: F401
from tests.local_refresh import deliver, refresh, updater_of
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness, Result

PROMPT = [5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def tensors(folders: list[Path]) -> list[dict[str, torch.Tensor]]:
    return [logical_tensors(folder) for folder in folders]


def engine(folder: Path, **settings) -> Harness:
    return Harness(folder, weight_version="v1", **settings)


def started(folder: Path, steps: int = 5, new_tokens: int = 60, **fields) -> Harness:
    """Start an engine with one request, and run `steps` steps of it."""
    harness = engine(folder)
    harness.submit(PROMPT, rid="r", params={"max_new_tokens": new_tokens}, **fields)
    for _ in range(steps):
        harness.tick()
    return harness


def rescored(folder: Path, result: Result) -> np.ndarray:
    """Score the output again with KV of the weights in `folder` alone, and return its log-probabilities."""
    first = len(result.prompt_ids) - 1
    sequence = result.prompt_ids + result.token_ids
    (scored,) = engine(folder).generate([sequence], {"max_new_tokens": 0}, logprob_start_len=first)
    return np.array(scored.finished.prompt_logprobs.values[1:])


def prefilled_by(result: Result) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in result.finished.prefill_weight_versions]


def test_kv_within_the_lag_is_kept_and_said_to_be_old(folders, tensors) -> None:
    harness = started(folders[0])
    assert refresh(harness, tensors[1], "v2").success
    harness.run()
    result = harness.results["r"]
    assert [version for version, _, _ in result.versions] == ["v1", "v2"]
    assert result.finished.num_retractions == 0
    assert prefilled_by(result) == [("v1", 0, len(PROMPT))]
    assert result.finished.kv_weight_version_oldest == "v1"
    cut = result.versions[0][2]
    assert np.array_equal(np.array(result.logprobs[:cut]), rescored(folders[0], result)[:cut])
    assert not np.array_equal(np.array(result.logprobs[cut:]), rescored(folders[1], result)[cut:])


@pytest.mark.parametrize(("server", "request_"), [(0, None), (-1, 0), (5, 0)])
def test_kv_beyond_the_lag_is_computed_again(folders, tensors, server: int, request_: int | None) -> None:
    """The request is retracted at the first step after the commit.

    Tokens that were sampled before stay, and the new weights compute everything after them.
    """
    harness = engine(folders[0], max_kv_version_lag=server)
    harness.submit(PROMPT, rid="r", params={"max_new_tokens": 120}, max_kv_version_lag=request_, stream=True)
    for _ in range(5):
        harness.tick()
    result = harness.results["r"]
    assert refresh(harness, tensors[1], "v2").success
    tokens, logprobs = list(result.token_ids), list(result.logprobs)
    harness.run()
    cut = result.versions[0][2]
    assert 4 <= cut <= len(tokens) < 120
    assert result.token_ids[: len(tokens)] == tokens and result.logprobs[: len(tokens)] == logprobs
    assert result.finished.num_retractions == 1
    assert prefilled_by(result) == [("v2", 0, len(PROMPT))]
    assert result.finished.kv_weight_version_oldest == "v1", "the first tokens were sampled on it"
    assert np.array_equal(np.array(result.logprobs[:cut]), rescored(folders[0], result)[:cut])
    assert np.array_equal(np.array(result.logprobs[cut:]), rescored(folders[1], result)[cut:])
    rows = len(PROMPT) + cut - 1
    spans = [(span.version, span.start, span.end) for span in result.finished.routed_experts.versions]
    assert spans == [("v1", 0, rows), ("v2", rows, len(PROMPT) + 119)]
    harness.check_idle()


def test_a_lag_of_one_is_used_up_by_the_second_commit(folders, tensors) -> None:
    harness = started(folders[0], new_tokens=150, max_kv_version_lag=1)
    assert refresh(harness, tensors[1], "v2").success
    assert harness.scheduler.stats.num_retractions == 0
    for _ in range(3):
        harness.tick()
    assert refresh(harness, tensors[2], "v3").success
    harness.run()
    result = harness.results["r"]
    assert [version for version, _, _ in result.versions] == ["v1", "v2", "v3"]
    assert result.finished.num_retractions == 1
    assert prefilled_by(result) == [("v3", 0, len(PROMPT))]
    cut = result.versions[1][2]
    assert np.array_equal(np.array(result.logprobs[cut:]), rescored(folders[2], result)[cut:])


def test_a_request_may_ask_for_no_limit(folders, tensors) -> None:
    harness = engine(folders[0], max_kv_version_lag=0)
    harness.submit(PROMPT, rid="kept", params={"max_new_tokens": 60}, max_kv_version_lag=-1)
    harness.submit(PROMPT, rid="renewed", params={"max_new_tokens": 60})
    for _ in range(5):
        harness.tick()
    assert refresh(harness, tensors[1], "v2").success
    harness.run()
    assert harness.results["kept"].finished.num_retractions == 0
    assert harness.results["renewed"].finished.num_retractions == 1


def test_a_prompt_that_is_half_computed_starts_again(folders, tensors) -> None:
    harness = engine(folders[0], max_kv_version_lag=0, chunked_prefill_size=1)
    prompt = [7, *PROMPT * 20]  # longer than the turns that a refresh takes
    harness.submit(prompt, rid="r", params={"max_new_tokens": 3})
    harness.tick()
    assert harness.scheduler.queues.partial is not None
    assert refresh(harness, tensors[1], "v2").success
    harness.run()
    result = harness.results["r"]
    assert prefilled_by(result) == [("v2", 0, len(prompt))] and result.versions == [("v2", 0, 3)]
    assert np.array_equal(np.array(result.logprobs), rescored(folders[1], result))
    harness.check_idle()


def test_a_relabelling_ages_nothing(folders) -> None:
    harness = started(folders[0], max_kv_version_lag=0)
    assert harness.control(UpdateWeightVersionReqInput, new_version="other", abort_all_requests=False).success
    harness.run()
    assert harness.results["r"].finished.num_retractions == 0
    (again,) = harness.generate([PROMPT], {"max_new_tokens": 1})
    assert again.finished.cached_tokens == len(PROMPT) - 1, "the same content: its prefixes stay"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_aborted_request_says_which_kv_it_used(folders, tensors, mode: str) -> None:
    """The record names it even where a retraction gave that KV up and it was not computed again."""
    harness = started(folders[0])
    harness.control(PauseGenerationReqInput, mode=mode)
    assert refresh(harness, tensors[1], "v2").success
    harness.scheduler.abort(["r"])
    harness.tick()
    result = harness.results["r"]
    assert prefilled_by(result) == [("v1", 0, len(PROMPT))]
    assert result.finished.kv_weight_version_oldest == "v1" and [v for v, _, _ in result.versions] == ["v1"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("label", ["v1", "v2"])
def test_abort_below_ends_what_began_under_older_weights(folders, tensors, mode: str, label: str) -> None:
    harness = started(folders[0])
    harness.control(PauseGenerationReqInput, mode=mode)
    harness.submit(PROMPT, rid="late", params={"max_new_tokens": 3})
    assert refresh(harness, tensors[1], "v2").success
    answer = harness.control(ContinueGenerationReqInput, abort_below_weight_version=label)
    assert answer.success and answer.data["num_aborted"] == (label == "v2")
    harness.run()
    old, late = harness.results["r"], harness.results["late"]
    assert late.finished.reason.type == "length" and late.versions == [("v2", 0, 3)]
    if label == "v1":
        assert old.finished.reason.type == "length"
        return
    assert old.finished.reason.type == "abort" and old.finished.reason.status_code is None
    assert "'v1'" in old.finished.reason.message and "'v2'" in old.finished.reason.message
    assert 4 <= len(old.token_ids) < 20 and old.versions == [("v1", 0, len(old.token_ids))]
    harness.check_idle()


def test_versions_are_ordered_by_their_commits_not_by_their_labels(folders, tensors) -> None:
    """A request begins under the second commit, whose label sorts before the label of the first."""
    harness = engine(folders[0])
    assert refresh(harness, tensors[1], "z").success
    assert refresh(harness, tensors[2], "a").success
    harness.submit(PROMPT, rid="r", params={"max_new_tokens": 8})
    for _ in range(3):
        harness.tick()
    harness.control(PauseGenerationReqInput, mode="in_place")
    assert harness.control(ContinueGenerationReqInput, abort_below_weight_version="z").data["num_aborted"] == 0
    harness.run()
    assert harness.results["r"].finished.reason.type == "length"


def test_an_unknown_version_is_refused_and_changes_nothing(folders) -> None:
    harness = started(folders[0])
    harness.control(PauseGenerationReqInput, mode="in_place")
    answer = harness.control(ContinueGenerationReqInput, abort_below_weight_version="v2")
    assert not answer.success and answer.status_code == 400 and "'v2'" in answer.message
    assert harness.scheduler.serving.is_paused and len(harness.scheduler.queues.running) == 1
    assert harness.control(ContinueGenerationReqInput, abort_below_weight_version="v1").success
    harness.run()
    assert harness.results["r"].finished.reason.type == "length"


@pytest.mark.parametrize(("named", "label"), [("v2", "v2"), (None, "v1+1")])
def test_the_version_that_continue_itself_puts_in_force_is_known(folders, tensors, named, label) -> None:
    """A client calls neither begin nor end: the continue that names the version settles its update."""
    harness = started(folders[0])
    harness.control(PauseGenerationReqInput, mode="in_place")
    updater_of(harness).open_implicit("full")
    deliver(harness, tensors[1])
    if named is not None:
        harness.control(UpdateWeightVersionReqInput, new_version=named, abort_all_requests=False)
    assert harness.control(ContinueGenerationReqInput, abort_below_weight_version="v9").status_code == 400
    assert updater_of(harness).is_open and harness.scheduler.serving.is_paused
    answer = harness.control(ContinueGenerationReqInput, abort_below_weight_version=label)
    assert answer.success and answer.data["num_aborted"] == 1 and answer.data["weight_version"] == label
    harness.run()
    assert harness.results["r"].finished.reason.type == "abort"
    harness.check_idle()
