"""A refresh in the middle of drafted requests gives what plain decoding gives with the refresh at the same token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.scheduler.drafting import Drafting
from tests.drafters import KnownDrafter
from tests.kernels import native_ops
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness, Result

PROMPT = [5, 9, 2, 6, 5, 3, 5, 8, 9, 2, 6, 5, 3]
PARAMS = {"max_new_tokens": 60, "temperature": 0.8, "sampling_seed": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    native_ops()
    base = tmp_path_factory.mktemp("models")
    return [tiny_checkpoint(base / str(seed), "moe_dense_first", seed=seed) for seed in (1, 2)]


def refreshed(harness: Harness, folder: Path, num_tokens: int) -> Result:
    """Generate with a refresh to the weights in `folder` at the first turn with `num_tokens` tokens or more."""
    rid = harness.submit(PROMPT, params=PARAMS)
    harness.tick()
    req = harness.scheduler._by_rid[rid]
    while len(req.output_ids) < num_tokens:
        harness.tick()
    before = len(req.output_ids)
    assert harness.control(PauseGenerationReqInput, mode="in_place").success
    assert refresh(harness, logical_tensors(folder), "v2").success
    assert harness.control(ContinueGenerationReqInput).success
    assert len(req.output_ids) - before < 10
    harness.run()
    harness.check_idle()
    return harness.results[rid]


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_a_refresh_between_drafted_tokens_is_one_between_plain_tokens(kind: str, folders: list[Path]) -> None:
    """The drafts are right or mixed up to the refresh, and of the old weights after it."""
    (old,) = Harness(folders[0]).generate([PROMPT], PARAMS)
    harness = Harness(folders[0], weight_version="v1", speculative_algorithm="NGRAM")
    drafter = KnownDrafter({tuple(PROMPT): old.token_ids}, 320, kind)
    harness.scheduler._steps._drafting = Drafting(drafter, None, 320, 5)
    got = refreshed(harness, folders[1], 17)
    (_, _, cut), (version, begin, end) = got.versions
    assert (version, begin, end) == ("v2", cut, 60) and cut >= 17
    assert got.token_ids[:cut] == old.token_ids[:cut] and got.token_ids != old.token_ids
    counts = harness.scheduler._steps._drafting.counts
    assert 0 < counts.num_kept < counts.num_drafted
    want = refreshed(Harness(folders[0], weight_version="v1"), folders[1], cut)
    assert got.versions == want.versions
    assert got.token_ids == want.token_ids and got.logprobs == want.logprobs
    assert np.array_equal(got.routes, want.routes)
