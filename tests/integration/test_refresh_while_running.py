"""A refresh while 16 requests run: every pause mode, with begin/end and without.

The test decides at which step the trainer's calls come.  Checked for every request: its version spans, each token's
log-probability under the version that its span names, and that no request admitted after the commit matched a prefix
of before it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.core.messages.io_struct import ContinueGenerationReqInput, GetStateReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightVersionReqInput,
    WeightsCheckerReqInput,
)
from tests.family_zoo import FAMILIES, also_for, family_checkpoint, with_experts
from tests.late_loop import loop  # noqa: F401
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness, Result
from tests.trainer_process import TrainerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex

NUM_REQUESTS = 16
STEPS_BEFORE = 10
NEW_TOKENS = 120  # far more than the steps that run while a bucket comes
QWEN3 = "moe_dense_first"
WITH_FAMILIES = also_for(with_experts(), QWEN3)
# Two float64 engines that batch differently differ by summation order only.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", QWEN3)


@pytest.fixture(scope="module")
def folders(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Old and new weights of one architecture."""
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("models")
    if model in FAMILIES:
        both = ((base / name, model, seed, torch.float64) for name, seed in (("old", 1), ("new", 2)))
        old, new = (family_checkpoint(*arguments) for arguments in both)
        return old, new
    return (
        tiny_checkpoint(base / "old", QWEN3, seed=1, dtype="float64"),
        tiny_checkpoint(base / "new", QWEN3, seed=2, dtype="float64"),
    )


@pytest.fixture
def trainer(folders: tuple[Path, Path], tmp_path: Path):
    process = TrainerProcess(logical_tensors(folders[1]), tmp_path)
    yield process
    process.close()


def prompt(index: int) -> list[int]:
    return [3, 1, 4, 1, 5, *range(10 + index, 20 + 2 * index)]


def engine(folder: Path, **settings) -> Harness:
    return Harness(folder, dtype="float64", weight_version="v1", **settings)


def start(folders: tuple[Path, Path], trainer: TrainerProcess, **settings) -> Harness:
    """Return an engine that has joined the trainer's group and has 16 requests under way."""
    harness = engine(folders[0], **settings)
    assert harness.control(InitWeightsUpdateGroupReqInput, **trainer.join_fields()).success
    for index in range(NUM_REQUESTS):
        harness.submit(prompt(index), rid=f"run{index}", params={"max_new_tokens": NEW_TOKENS})
    for _ in range(STEPS_BEFORE):
        harness.tick()
    assert len(harness.scheduler.queues.running) == NUM_REQUESTS
    return harness


def halves(trainer: TrainerProcess) -> list[list[str]]:
    """Divide the names into two buckets by turns, so that they cut through fused tensors."""
    names = sorted(trainer.tensors)
    return [names[::2], names[1::2]]


def send_all(harness: Harness, trainer: TrainerProcess, weight_version: str | None = None) -> None:
    for names in halves(trainer):
        fields = trainer.send(names)
        answer = harness.control(UpdateWeightsFromDistributedReqInput, weight_version=weight_version, **fields)
        assert answer.success, answer.message


def rescored(folder: Path, result: Result) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities of the output, and routes, of a fresh engine with the weights in `folder`."""
    sequence = result.prompt_ids + result.token_ids
    first = len(result.prompt_ids) - 1
    (scored,) = engine(folder).generate([sequence], {"max_new_tokens": 0}, logprob_start_len=first)
    return np.array(scored.finished.prompt_logprobs.values[1:]), scored.routes


def score(folder: Path, result: Result) -> np.ndarray:
    return rescored(folder, result)[0]


def check_old_rows(result: Result, cut: int, old_routes: np.ndarray, new_routes: np.ndarray) -> None:
    """Check that the rows of routes up to the `cut`-th token are the old weights', and are labelled as theirs.

    These rows stay even if a retraction made the new weights compute the tokens once more.
    """
    if cut == 0:
        return
    rows = len(result.prompt_ids) + cut - 1
    assert np.array_equal(result.routes[:rows], old_routes[:rows])
    assert not np.array_equal(result.routes[:rows], new_routes[:rows])
    spans = result.finished.routed_experts.versions
    assert (spans[0].version, spans[0].start, spans[0].end) == ("v1", 0, rows)


def check_results(harness: Harness, folders: tuple[Path, Path], *, new_kv: bool, label: str = "v2") -> None:
    """Run to the end, and check that the spans of each result are `v1`, `label`, or `v1` and then `label`.

    Tokens of `v1` must be the old model's.  Tokens of `label` must be the new model's if the whole KV is new.
    """
    harness.run()
    switched = 0
    for result in harness.results.values():
        assert result.finished.reason.type == "length" and len(result.token_ids) == NEW_TOKENS
        spans = result.versions
        assert [v for v, _, _ in spans] in (["v1"], [label], ["v1", label])
        assert spans[0][1] == 0 and spans[-1][2] == NEW_TOKENS
        assert result.routes.shape[0] == len(result.prompt_ids) + NEW_TOKENS - 1
        cut = next((end for v, _, end in spans if v == "v1"), 0)
        switched += 0 < cut < NEW_TOKENS
        logprobs = np.array(result.logprobs)
        (old, old_routes), (new, new_routes) = (rescored(folder, result) for folder in folders)
        check_old_rows(result, cut, old_routes, new_routes)
        assert np.allclose(logprobs[:cut], old[:cut], rtol=0, atol=TOLERANCE)
        if new_kv and cut < NEW_TOKENS:
            assert np.allclose(logprobs[cut:], new[cut:], rtol=0, atol=TOLERANCE)
            assert not np.allclose(logprobs[cut:], old[cut:], rtol=0, atol=1e-3)
    assert switched == (NUM_REQUESTS if label == "v2" or new_kv else switched)
    harness.check_idle()


def check_new_admissions(harness: Harness, folders: tuple[Path, Path], *, cold: bool) -> None:
    """Send the same prompts again, and check that they use no KV of the old weights.

    Tokens, routes and log-probabilities must be a fresh engine's on the new weights.  `cold`: nothing was prefilled
    under the new weights yet, so there is nothing to match.
    """
    fresh = engine(folders[1])
    for index in range(3):
        (again,) = harness.generate([prompt(index)], {"max_new_tokens": 8})
        (want,) = fresh.generate([prompt(index)], {"max_new_tokens": 8})
        assert not cold or again.finished.cached_tokens == want.finished.cached_tokens
        assert again.token_ids == want.token_ids and np.array_equal(again.routes, want.routes)
        assert np.allclose(again.logprobs, want.logprobs, rtol=0, atol=TOLERANCE)
        assert again.finished.kv_weight_version_oldest != "v1"
        assert {span.version for span in again.finished.prefill_weight_versions} == {again.versions[0][0]} != {"v1"}


def live_checksums(harness: Harness) -> dict[str, str]:
    return harness.control(WeightsCheckerReqInput).data["checksums"]


@pytest.mark.full(but="sequential-moe_dense_first-True-in_place")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("bracketed", [True, False])
@WITH_FAMILIES
def test_a_refresh_in_a_pause_reaches_all_running_requests(folders, trainer, mode: str, bracketed: bool) -> None:
    harness = start(folders, trainer)
    paused = harness.control(PauseGenerationReqInput, mode=mode)
    assert paused.data["num_running"] == (0 if mode == "retract" else NUM_REQUESTS)
    if bracketed:
        assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
        send_all(harness, trainer)
        assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
        assert harness.control(EndWeightUpdateReqInput).success
        assert harness.control(ContinueGenerationReqInput).success
    else:
        send_all(harness, trainer, weight_version="v2")
        state = harness.control(GetStateReqInput).data
        assert state["weight_version"] == "v1" and state["weight_update"]["implicit"]
        assert harness.control(ContinueGenerationReqInput).success
    assert live_checksums(harness) == {n: fingerprint_hex(fingerprint(t)) for n, t in trainer.tensors.items()}
    check_results(harness, folders, new_kv=mode == "retract")
    for index in range(NUM_REQUESTS):
        finished = harness.results[f"run{index}"].finished
        written_by = {span.version for span in finished.prefill_weight_versions}
        assert written_by == ({"v2"} if mode == "retract" else {"v1"})
        assert finished.kv_weight_version_oldest == "v1"  # the first tokens were sampled on it in both modes
    check_new_admissions(harness, folders, cold=mode == "in_place")


@pytest.mark.full(but="sequential-moe_dense_first-True")
@pytest.mark.parametrize("bracketed", [True, False])
@WITH_FAMILIES
def test_refresh_after_pause_abort(folders, trainer, bracketed: bool) -> None:
    harness = start(folders, trainer)
    assert harness.control(PauseGenerationReqInput, mode="abort").data["num_aborted"] == NUM_REQUESTS
    late = harness.submit(prompt(0), params={"max_new_tokens": 8})
    if bracketed:
        harness.control(BeginWeightUpdateReqInput, weight_version="v2")
        send_all(harness, trainer)
        assert harness.control(EndWeightUpdateReqInput).success
    else:
        send_all(harness, trainer, weight_version="v2")
    assert harness.results[late].finished is None, "a request that comes while paused waits"
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    for index in range(NUM_REQUESTS):
        result = harness.results[f"run{index}"]
        assert result.finished.reason.type == "abort"
        assert len(result.token_ids) == STEPS_BEFORE and result.versions == [("v1", 0, STEPS_BEFORE)]
        assert result.routes.shape[0] == len(result.prompt_ids) + STEPS_BEFORE - 1
        assert np.allclose(result.logprobs, score(folders[0], result), rtol=0, atol=TOLERANCE)
    assert harness.results[late].versions == [("v2", 0, 8)]
    assert np.allclose(harness.results[late].logprobs, score(folders[1], harness.results[late]), rtol=0, atol=TOLERANCE)
    check_new_admissions(harness, folders, cold=False)


@WITH_FAMILIES
def test_bracketed_refresh_without_a_pause(folders, trainer) -> None:
    """Generation goes on between the buckets; the version changes at one step boundary."""
    harness = start(folders, trainer)
    harness.control(BeginWeightUpdateReqInput, weight_version="v2")
    before = harness.scheduler.stats.num_steps
    send_all(harness, trainer)
    assert harness.scheduler.stats.num_steps > before, "no step ran while the buckets came"
    assert harness.control(EndWeightUpdateReqInput).success
    check_results(harness, folders, new_kv=False)
    check_new_admissions(harness, folders, cold=True)


@WITH_FAMILIES
def test_one_unbracketed_call_is_a_transaction_of_its_own(folders, trainer) -> None:
    """Without begin, one call with all tensors commits at once while requests run.

    Without a label the engine makes one.
    """
    harness = start(folders, trainer)
    fields = trainer.send(sorted(trainer.tensors))
    answer = harness.control(UpdateWeightsFromDistributedReqInput, **fields)
    assert answer.success and answer.data["weight_version"] == "v1+1"
    check_results(harness, folders, new_kv=False, label="v1+1")
    check_new_admissions(harness, folders, cold=True)


@pytest.mark.full
def test_one_broadcast_a_tensor_reaches_all_running_requests(folders, trainer) -> None:
    harness = start(folders, trainer)
    harness.control(BeginWeightUpdateReqInput, weight_version="v2")
    for names in halves(trainer):
        answer = harness.control(UpdateWeightsFromDistributedReqInput, **trainer.send(names, load_format=None))
        assert answer.success, answer.message
    assert harness.control(EndWeightUpdateReqInput).success
    check_results(harness, folders, new_kv=False)


@pytest.mark.full
def test_version_named_between_buckets(folders, trainer) -> None:
    """The order that miles uses: buckets, update_weight_version, end."""
    harness = start(folders, trainer)
    harness.control(PauseGenerationReqInput, mode="retract")
    harness.control(BeginWeightUpdateReqInput)
    send_all(harness, trainer)
    harness.control(UpdateWeightVersionReqInput, new_version="v2", abort_all_requests=False)
    assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
    assert harness.control(EndWeightUpdateReqInput).data["weight_version"] == "v2"
    harness.control(ContinueGenerationReqInput)
    check_results(harness, folders, new_kv=True)


@pytest.mark.full(but="sequential-moe_dense_first-True")
@pytest.mark.parametrize("bracketed", [True, False])
@WITH_FAMILIES
def test_half_an_update_never_serves(folders, trainer, bracketed: bool) -> None:
    """A trainer that stops half-way: end (or continue) refuses, and the old weights serve bit for bit."""
    harness = start(folders, trainer)
    old = live_checksums(harness)
    harness.control(PauseGenerationReqInput, mode="retract")
    if bracketed:
        harness.control(BeginWeightUpdateReqInput, weight_version="v2")
    names = halves(trainer)[0]
    answer = harness.control(UpdateWeightsFromDistributedReqInput, weight_version="v2", **trainer.send(names))
    assert answer.success
    shown = harness.control(GetWeightsByNameReqInput, name=names[0], truncate_size=2)
    assert shown.data["staged"] and shown.data["parameter"] == trainer.tensors[names[0]][:2].tolist()
    settle = EndWeightUpdateReqInput if bracketed else ContinueGenerationReqInput
    refused = harness.control(settle)
    assert not refused.success and refused.status_code == 400 and "missing" in refused.message.lower()
    assert harness.scheduler.serving.is_paused, "a refused update does not resume on its own"
    assert harness.control(ContinueGenerationReqInput).success
    assert live_checksums(harness) == old
    harness.run()
    for result in harness.results.values():
        assert result.versions == [("v1", 0, NEW_TOKENS)]
        assert np.allclose(result.logprobs, score(folders[0], result), rtol=0, atol=TOLERANCE)


@pytest.mark.full
def test_a_failed_bucket_dooms_the_session(folders, trainer) -> None:
    """A short bucket inside begin/end: the bucket is refused, end is refused, and a new session works."""
    harness = start(folders, trainer)
    old = live_checksums(harness)
    harness.control(BeginWeightUpdateReqInput, weight_version="v2")
    first, second = halves(trainer)
    assert harness.control(UpdateWeightsFromDistributedReqInput, **trainer.send(first)).success
    short = harness.control(UpdateWeightsFromDistributedReqInput, **trainer.send(second, cut_bytes=8))
    assert not short.success and "short" in short.message
    ended = harness.control(EndWeightUpdateReqInput)
    assert not ended.success and ended.status_code == 409
    assert live_checksums(harness) == old
    assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
    assert harness.control(BeginWeightUpdateReqInput, weight_version="v2").success
    send_all(harness, trainer)
    assert harness.control(EndWeightUpdateReqInput).success
    check_results(harness, folders, new_kv=False)


def test_state_errors_change_nothing(folders, trainer) -> None:
    harness = start(folders, trainer)
    old = live_checksums(harness)
    assert harness.control(EndWeightUpdateReqInput).status_code == 409
    assert harness.control(BeginWeightUpdateReqInput).success
    assert harness.control(BeginWeightUpdateReqInput).status_code == 409
    unknown = harness.control(GetWeightsByNameReqInput, name="no.such")
    assert unknown.status_code == 404
    bad = {"names": ["x"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "nobody"}
    assert harness.control(UpdateWeightsFromDistributedReqInput, **bad).status_code == 404
    assert live_checksums(harness) == old
    harness.run()
