"""Overlap on and off, graphs on and off: the same answers, whatever ends, stops or interrupts the requests.

A loop that overlaps computes a step more of a request that has ended, so that batch sizes are others: rounding is
allowed within the bounds of `disagreement`, and everything else is equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.io_struct import AbortReqInput, ContinueGenerationReqInput, PauseGenerationReqInput
from tests.gpu.engines import LOGPROB_SLACK, checkpoint, disagreement, engine, recordings
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness, Result

LOOPS = [{"disable_overlap_schedule": not overlap, "disable_cuda_graph": not graphs}
         for overlap in (True, False) for graphs in (True, False)]  # fmt: skip
IDS = ["overlap and graphs", "overlap", "graphs", "neither"]
PLAINEST = LOOPS[-1]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [checkpoint(base / f"v{seed}", device, seed=seed) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def _recordings(device: torch.device) -> Iterator[None]:
    with recordings(device):
        yield


def submitted(harness: Harness, count: int = 6, **params: Any) -> list[str]:
    rids = []
    for i in range(count):
        prompt = [(11 * i + 5 * j) % 300 for j in range(4 + 9 * i)]
        rids.append(harness.submit(prompt, params={"max_new_tokens": NEW_TOKENS - 3 * i} | params))
        harness.tick()
    return rids


def results(harness: Harness, rids: list[str]) -> list[Result]:
    harness.run()
    harness.check_idle()
    return [harness.results[rid] for rid in rids]


# name -> sampling parameters, settings
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "sampled": ({"temperature": 1.0, "top_k": 20}, {"random_seed": 3}),
    "retractions": ({}, {"max_total_tokens": 200}),  # less than all requests need
    "penalties": ({"frequency_penalty": 0.5}, {}),
    "stops": ({"stop_token_ids": [5, 17, 33, 70, 101, 200], "ignore_eos": False}, {}),
    "chunks": ({}, {"chunked_prefill_size": 8}),
}
PAIRS = [("overlap and graphs", case) for case in CASES]
PAIRS += [(loop, case) for loop in ("overlap", "graphs") for case in list(CASES)[:3]]


@pytest.fixture(scope="module")
def plain_answers() -> dict[str, list[Result]]:
    """Hold the answers of the plainest loop, by case; filled as they are needed."""
    return {}


def answers(loop: dict[str, Any], case: str, folder: Path, device: torch.device) -> list[Result]:
    params, settings = CASES[case]
    harness = engine(folder, device, **loop, **settings)
    return results(harness, submitted(harness, **params))


@pytest.mark.parametrize(("loop", "case"), PAIRS)
def test_answers_are_those_of_the_plainest_loop(
    loop: str, case: str, folders: list[Path], device: torch.device, plain_answers: dict[str, list[Result]]
) -> None:
    if case not in plain_answers:
        plain_answers[case] = answers(PLAINEST, case, folders[0], device)
    got = answers(LOOPS[IDS.index(loop)], case, folders[0], device)
    assert disagreement(got, plain_answers[case], LOGPROB_SLACK[device.type]) is None


def until(result: Result, count: int) -> Result:
    """Return a result with its first tokens only."""
    return replace(result, token_ids=result.token_ids[:count], logprobs=result.logprobs[:count])


@pytest.mark.parametrize("loop", LOOPS, ids=IDS)
def test_tokens_before_an_interruption_match_a_calm_run(loop: dict, folders: list[Path], device: torch.device) -> None:
    """Tokens before an abort, a pause in place or a refresh match an undisturbed run; versions label the rest."""
    harness, calm = (engine(folders[0], device, weight_version="v1", **loop) for _ in range(2))
    undisturbed = results(calm, submitted(calm))
    rids = submitted(harness)
    for _ in range(4):
        harness.tick()
    harness.channel.inbox.append(AbortReqInput(rids=[rids[1]]))
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    length = len(harness.results[rids[0]].token_ids)
    for _ in range(3):
        harness.tick()
    assert len(harness.results[rids[0]].token_ids) == length, "a paused engine samples nothing"
    assert refresh(harness, logical_tensors(folders[1]), "v2").success
    assert harness.control(ContinueGenerationReqInput).success
    ended = results(harness, rids)
    before = []
    for one in ended:
        (version, start, changed), *later = one.versions or [("v1", 0, 0)]
        assert (version, start) == ("v1", 0)
        assert later == [] if one is ended[1] else later == [("v2", changed, len(one.token_ids))]
        before.append(changed)
    ours, theirs = ([until(one, count) for one, count in zip(some, before)] for some in (ended, undisturbed))
    assert disagreement(ours, theirs, LOGPROB_SLACK[device.type]) is None
    assert len(ended[1].token_ids) < len(undisturbed[1].token_ids) and len(ended[0].token_ids) == NEW_TOKENS
