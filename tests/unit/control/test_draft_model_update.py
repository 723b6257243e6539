"""Updates of the drafts that servers really have: the checkpoint's own layer, and a second model.

A draft that is stale, or refreshed in the middle of requests, changes how many of its tokens are kept, and no answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout.scheduler.model_drafting import ModelDrafting
from tests.adapter_updates import IDS, begin, bring, end
from tests.draft_updates import DRAFT, holds
from tests.family_zoo import family_checkpoint
from tests.faults.harness import RefreshHarness
from tests.faults.transports import Named
from tests.kernels import native_ops
from tests.mtp_zoo import mtp_checkpoint
from weight_sync.tensor_meta import TensorMeta


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


def start(checkpoint: Path, scratch: Path, **settings: Any) -> RefreshHarness:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "enable_return_routed_experts": False}
    harness = RefreshHarness(checkpoint, scratch=scratch, staging="host", **defaults | settings)
    drafting = harness.scheduler._steps._drafting
    if isinstance(drafting, ModelDrafting):
        drafting._choice = None  # verify all that it proposes
    return harness


def answer(engine: RefreshHarness, ids: list[int] = IDS) -> tuple[list[int], list[float]]:
    (result,) = engine.generate([ids], {"max_new_tokens": 24})
    return result.token_ids, result.logprobs


def kept_share(engine: RefreshHarness) -> float:
    """Return the share of drafted tokens that an answer keeps.  Its prompt is new, so that no KV of it is cached."""
    counts = engine.scheduler.stats.drafts
    drafted, kept = counts.num_drafted, counts.num_kept
    answer(engine, [200 - engine.number(), *IDS])
    return (counts.num_kept - kept) / (counts.num_drafted - drafted)


def tensors(checkpoint: Path) -> Named:
    return [item for file in sorted(checkpoint.glob("*.safetensors")) for item in load_file(file).items()]


def send(engine: RefreshHarness, named: Named, target: Any = None, version: str | None = None) -> Any:
    assert begin(engine, target, weight_version=version).success
    for part in (named[::2], named[1::2]):
        came = bring(engine, part)
        assert came.success, came.message
    return end(engine)


def test_the_layer_of_a_checkpoint_moves_with_the_model(tmp_path: Path) -> None:
    checkpoints = [mtp_checkpoint(tmp_path / f"m{seed}", "glm4_moe", seed) for seed in (3, 4)]
    plain = answer(start(checkpoints[1], tmp_path))
    engine = start(checkpoints[0], tmp_path, speculative_algorithm="NEXTN", context_length=128)
    state, named = engine.scheduler.runner.state, tensors(checkpoints[1])
    assert state.draft is not None
    weights = state.model.weights
    layer = {name for name, it in named if not weights.split(TensorMeta(name, it.dtype, tuple(it.shape)))}
    model = [(name, tensor) for name, tensor in named if name not in layer]
    assert layer and model
    stale = send(engine, model, version="1")
    assert stale.success and state.draft.is_stale and "The draft is stale" in stale.message, stale.message
    assert answer(engine) == plain, "a stale draft changes no answer"
    assert begin(engine, None).success and bring(engine, [*model, *(it for it in named if it[0] == min(layer))]).success
    refused = end(engine)
    assert not refused.success and "tensors missing" in refused.message
    both = send(engine, named, version="2")
    assert both.success and both.data["draft"]["came"] == "with the model" and not state.draft.is_stale
    assert answer(engine) == plain
    assert send(engine, named, DRAFT).data["draft"]["came"] == "alone", "the model's tensors are left out"
    assert answer(engine) == plain


def test_a_second_model_is_refreshed_in_the_middle_of_a_request(tmp_path: Path) -> None:
    """A draft that equals the model is right nearly always, and one of older weights is not."""
    checkpoints = [family_checkpoint(tmp_path / f"m{seed}", "qwen3", seed) for seed in (3, 4)]
    plain = answer(start(checkpoints[1], tmp_path))
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(checkpoints[0])}
    engine = start(checkpoints[0], tmp_path, **settings)
    state, named = engine.scheduler.runner.state, tensors(checkpoints[1])
    assert state.draft is not None and kept_share(engine) > 0.8
    stale = send(engine, named, version="1")
    assert stale.success and state.draft.is_stale and holds(state, tensors(checkpoints[0])), stale.message
    assert answer(engine) == plain and kept_share(engine) < 0.5
    rid = engine.submit(IDS, params={"max_new_tokens": 24})
    while len(engine.results[rid].token_ids) < 3:
        engine.tick()
    refreshed = send(engine, named, DRAFT)
    assert refreshed.success and not state.draft.is_stale and holds(state, named)
    engine.run()
    assert (engine.results[rid].token_ids, engine.results[rid].logprobs) == plain
    assert [span[0] for span in engine.results[rid].versions] == ["1"], "tokens have the model's version alone"
    assert answer(engine) == plain and kept_share(engine) > 0.8
