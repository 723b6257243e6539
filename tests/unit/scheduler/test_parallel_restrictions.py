"""Grammars and lists of tokens on several ranks give the tokens, masks and log-probabilities of one rank.

Every rank follows the grammars of its requests by itself, and samples by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.make_checkpoint.run import make_checkpoint
from rollout.core.grammar import Grammar
from rollout.grammar.rows import RestrictedRows
from tests.model_zoo import tiny_spec
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness, Result

SCHEMA = {"type": "array", "items": {"enum": ["a", "bc", 7]}, "minItems": 2, "maxItems": 5}
REGEX = Grammar("regex", "(ab|ba){2,6}(yes|no)!?")
COMMON = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": False}
ASKS: list[dict[str, Any]] = [
    {"grammar": REGEX, "sampling_seed": 1},
    {"grammar": Grammar("json_schema", json.dumps(SCHEMA)), "sampling_seed": 2},
    {"sampling_seed": 3},
    {"allowed_token_ids": [40, 41, 42], "bad_word_ids": [[40], [41, 42]], "sampling_seed": 4},
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, "ep_size": 2},
    "dp2 of tp2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", tiny_spec(seed=1))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Result]:
    return run_all(Harness(folder, dtype="float64", num_threads=1))


def run_all(harness: Any) -> list[Result]:
    rids = [
        harness.submit([5 + n, 7, 9, *range(20, 30 + n)], params=COMMON | ask, return_sampling_mask=True)
        for n, ask in enumerate(ASKS)
    ]
    harness.run()
    return [harness.results[rid] for rid in rids]


def differences(ours: list[Result], theirs: list[Result]) -> list[str]:
    wrong = []
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.finished.reason != other.finished.reason:
            wrong.append(f"{n}: {one.finished.reason} and {other.finished.reason}")
        elif one.token_ids != other.token_ids or one.mask.counts != other.mask.counts:
            wrong.append(f"{n}: {one.token_ids} and {other.token_ids}")
        elif bytes(one.mask.token_ids) != bytes(other.mask.token_ids):
            wrong.append(f"{n}: other masks")
        elif not np.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-10):  # sums over ranks, in float64
            wrong.append(f"{n}: {one.logprobs} and {other.logprobs}")
    return wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_restricted_requests_get_on_ranks_what_they_get_on_one(name: str, folder: Path, alone: list[Result]) -> None:
    assert alone[0].finished.reason.type == "stop"
    with ParallelHarness(folder, **LAYOUTS[name]) as harness:
        assert differences(run_all(harness), alone) == []


def test_a_rank_that_does_not_restrict_is_noticed(
    folder: Path, alone: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestrictedRows, "write", lambda self: self._out_GW.fill(-1))
    with ParallelHarness(folder, **LAYOUTS["tp2"]) as harness:
        assert differences(run_all(harness), alone)
