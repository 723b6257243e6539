"""Two groups of ranks whose steps and drafts are replayed, while requests of either group want hidden states.

A step that keeps states between layers runs in Python on all ranks.  A draft without experts is replayed by each group
for itself, and one whose experts are on all ranks by none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.hidden import HiddenStatesParams
from rollout.executor.draft_graphs import DraftGraphs
from rollout.scheduler.model_drafting import ModelDrafting
from tests.captured_ranks import captured_gloo, captured_ranks
from tests.kernels import native_ops
from tests.model_zoo import tiny_checkpoint
from tests.mtp_zoo import mtp_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.unit.executor.test_captured_drafts import EAGER, PIECES, SMALL, Replays

DP: dict[str, Any] = {"dp_size": 2, "enable_dp_attention": True, "num_threads": 1, "context_length": 128}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"tp_size": 2, "ep_size": 2},
    "dp2 of tp2": {"tp_size": 4, "ep_size": 2},
}
WANTED = HiddenStatesParams(layers=(0, 1))
KEEPING = (1, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    native_ops()
    return mtp_checkpoint(tmp_path_factory.mktemp("models") / "mtp", "glm4_moe", 3)


def play(harness: ParallelHarness) -> list[tuple[Any, ...]]:
    """Send requests to both groups, more to the first; a few of each want states in front of layers."""
    rids = []
    for number in range(8):
        prompt = torch.randint(1, 250, (2 + 5 * number % 11,), generator=torch.Generator().manual_seed(number)).tolist()
        length = 3 if number in KEEPING else 12 + 5 * number % 13
        params = {"max_new_tokens": length, "temperature": 0.9 * (number % 2), "sampling_seed": number}
        fields = {"hidden_states": WANTED} if number in KEEPING else {}
        rids.append(harness.submit(prompt, f"r{number}", params, dp_rank=int(number % 3 == 1), **fields))
        harness.tick()
    harness.run()
    harness.check_idle()
    found = [harness.results[rid] for rid in rids]
    states = [None if x.finished is None else x.finished.hidden_states for x in found]
    return [(x.token_ids, x.logprobs, x.routes.tolist(), y) for x, y in zip(found, states, strict=True)]


def draftings(harness: ParallelHarness) -> list[ModelDrafting]:
    """Return what drafts on each rank, whatever it costs."""
    found = [scheduler._steps._drafting for scheduler in harness.schedulers]
    for drafting in found:
        assert isinstance(drafting, ModelDrafting)
        drafting._choice = None
    return found  # type: ignore[return-value]


@pytest.mark.full(but="dp2 ep2-STANDALONE")
@pytest.mark.parametrize("name", ["STANDALONE", "NEXTN"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_draft_and_keep_hidden_states(layout: str, name: str, folder: Path, tmp_path: Path) -> None:
    settings = SMALL | DP | LAYOUTS[layout]
    drafted: dict[str, Any] = {"speculative_algorithm": name, "speculative_num_steps": 3}
    if name == "STANDALONE":
        drafted["speculative_draft_model_path"] = str(tiny_checkpoint(tmp_path / "small", "dense", seed=4))
    with captured_ranks(PIECES) as patch:
        with ParallelHarness(folder, captured_gloo, **settings | EAGER) as harness:
            expected = play(harness)
        replays, drafts = Replays(patch), [0]
        forward = DraftGraphs.forward

        def counted(self: DraftGraphs, *given: Any) -> Any:
            found = forward(self, *given)
            drafts[0] += found is not None
            return found

        patch.setattr(DraftGraphs, "forward", counted)
        with ParallelHarness(folder, captured_gloo, **settings | drafted) as harness:
            own = draftings(harness)
            assert play(harness) == expected
        assert all(drafting.counts.num_drafted > 20 for drafting in own)
        assert sum(replays.whole.values()) > 6 and replays.others
    assert [drafting.runner.meets_groups for drafting in own] == [name == "NEXTN"] * len(own)
    assert drafts[0] > 20 if name == "STANDALONE" else drafts[0] == 0
    assert [states is not None for *_, states in expected] == [number in KEEPING for number in range(8)]
