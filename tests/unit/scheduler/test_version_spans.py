"""The versions in a record: spans by content, and spans of the prompt's log-probabilities.

Float32 on the compiled operators: a fresh engine scores tokens that its weights explain with the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.req_output import VersionSpan
from rollout.core.messages.weights import UpdateWeightVersionReqInput
from tests.kernels import native_ops
from tests.late_loop import captured_loop  # noqa: F401
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness

PROMPT = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    torch.set_num_threads(1)
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


def scored(folder: Path, sequence: list[int]) -> list[float | None]:
    """Score `sequence` with a fresh engine under the weights in `folder`; return its log-probabilities."""
    (result,) = Harness(folder).generate([sequence], {"max_new_tokens": 0}, logprob_start_len=0)
    return result.finished.prompt_logprobs.values


def spans_of(spans: list[VersionSpan]) -> list[tuple[str, int, int, int]]:
    return [(span.version, span.start, span.end, span.weight_epoch) for span in spans]


# --- 10 ----------------------------------------------------------------------------------------------------------


def test_engine_10_other_weights_under_the_label_in_force_are_a_span_of_their_own(folders: list[Path]) -> None:
    """KV of the old weights is dropped, so that each span is explained by one checkpoint."""
    harness = Harness(folders[0], weight_version="v1", max_kv_version_lag=0)
    rid = harness.submit(PROMPT, params={"max_new_tokens": 120})  # a slow machine receives for many steps
    for _ in range(5):
        harness.tick()
    assert refresh(harness, logical_tensors(folders[1]), "v1").success
    harness.run()
    result = harness.results[rid]
    spans = [(span.version, span.start, span.end) for span in result.finished.weight_versions]
    assert len(spans) == 2 and {version for version, _, _ in spans} == {"v1"}
    (_, first, cut), (_, again, last) = spans
    assert (first, again, last) == (0, cut, 120)
    for folder, begin, end in ((folders[0], 0, cut), (folders[1], cut, 120)):
        wanted = scored(folder, PROMPT + result.token_ids)[len(PROMPT) :]
        assert result.logprobs[begin:end] == wanted[begin:end]
    assert [span.weight_epoch for span in result.finished.weight_versions] == [0, 1]


def test_engine_10_kv_of_two_contents_under_one_label(folders: list[Path]) -> None:
    harness = Harness(folders[0], weight_version="v1", chunked_prefill_size=10)
    rid = harness.submit(PROMPT, params={"max_new_tokens": 4})
    harness.tick()  # ten tokens of the prompt
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    assert refresh(harness, logical_tensors(folders[1]), "v1").success
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    finished = harness.results[rid].finished
    assert spans_of(finished.prefill_weight_versions) == [("v1", 0, 10, 0), ("v1", 10, 16, 1)]
    assert (finished.kv_weight_version_oldest, finished.kv_weight_epoch_oldest) == ("v1", 0)
    assert spans_of(finished.weight_versions) == [("v1", 0, 4, 1)]


def test_engine_10_another_label_for_the_same_weights_is_another_span_of_the_same_epoch(folders: list[Path]) -> None:
    harness = Harness(folders[0], weight_version="v1")
    rid = harness.submit(PROMPT, params={"max_new_tokens": 6})
    for _ in range(3):
        harness.tick()
    assert harness.control(UpdateWeightVersionReqInput, new_version="v2", abort_all_requests=False).success
    harness.run()
    (one, two) = spans_of(harness.results[rid].finished.weight_versions)
    assert (one[0], two[0]) == ("v1", "v2") and one[3] == two[3] == 0


# --- 22 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("computed", [4, 10, 16])
def test_engine_22_prompt_logprobs_name_the_weights_that_computed_them(folders: list[Path], computed: int) -> None:
    """`computed` tokens under the old weights; then the request gives its KV up and goes on under new ones."""
    harness = Harness(folders[0], weight_version="v1", chunked_prefill_size=computed)
    rid = harness.submit(PROMPT, params={"max_new_tokens": 4}, logprob_start_len=0)
    harness.tick()
    assert harness.control(PauseGenerationReqInput, mode="retract").success
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    finished = harness.results[rid].finished
    assert finished.num_retractions == 1
    assert {span.version for span in finished.prefill_weight_versions} == {"v2"}, "all KV is new"
    prompt = finished.prompt_logprobs
    old_entries = min(computed, len(PROMPT) - 1)
    wanted = [("v1", 1, 1 + old_entries, 0)]
    if old_entries < len(PROMPT) - 1:
        wanted.append(("v2", 1 + old_entries, len(PROMPT), 1))
    weights = {"v1": folders[0], "v2": folders[1]}
    assert len(prompt.values) == len(PROMPT) and prompt.values[0] is None
    for version, start, end, _ in wanted:
        assert prompt.values[start:end] == scored(weights[version], PROMPT)[start:end]
    assert spans_of(prompt.versions) == wanted


def test_engine_22_an_aborted_prompt_names_versions_of_what_it_has(folders: list[Path]) -> None:
    harness = Harness(folders[0], weight_version="v1", chunked_prefill_size=6)
    rid = harness.submit(PROMPT, logprob_start_len=2)
    harness.tick()
    harness.scheduler.abort([rid])
    harness._collect()
    prompt = harness.results[rid].finished.prompt_logprobs
    assert len(prompt.values) == 5 and spans_of(prompt.versions) == [("v1", 1, 5, 0)]
