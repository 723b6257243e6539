"""A rollout for which the checkpoint's own layer drafts has the tokens, log-probabilities and routes of a plain one.

Whole engines on the compiled operators.  A random layer is almost never right, so that tests also tell it most of the
answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.make_checkpoint.tokenizer import save_tokenizer, train_tokenizer
from rollout.core.errors import StartupError
from rollout.scheduler.model_drafting import ModelDrafting
from tests.family_zoo import family_checkpoint
from tests.invariance import Ask, Facts, Server, any_differs, assert_same
from tests.kernels import native_ops
from tests.mtp_zoo import MTP_FAMILIES, mtp_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.engine.test_invariance_drafts import VOCABULARY, _ask_restricted
from tests.unit.engine.test_invariance_engine import asks
from tests.unit.scheduler.test_restricted_requests import facts

OFTEN = ("deepseek_v3", "glm4_moe", "qwen3_next")
FAMILIES = [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.full]) for name in MTP_FAMILIES]


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_checkpoint(tmp_path_factory.mktemp("model") / "m", request.param, 3)


def drafted(folder: Path, dtype: str, **settings: Any) -> tuple[Server, ModelDrafting]:
    """Return an engine that verifies all that the layer proposes."""
    server = Server(folder, dtype, **{"speculative_algorithm": "NEXTN", "context_length": 128} | settings)
    drafting = server.harness.scheduler._steps._drafting
    assert isinstance(drafting, ModelDrafting)
    drafting._choice = None
    return server, drafting


def tell(drafting: ModelDrafting, requests: Sequence[Ask], answers: Sequence[Facts]) -> None:
    """Let the layer's proposals be the known answers, three times of four."""
    texts = {ask.prompt: [*ask.prompt, *facts.token_ids] for ask, facts in zip(requests, answers, strict=True)}
    rng, rows = random.Random(2), drafting._pick

    def told(reqs: Sequence[Any], device: torch.device) -> Any:
        pick = rows(reqs, device)

        def picked(logits_NV: torch.Tensor, depth: int) -> torch.Tensor:
            ids = pick(logits_NV, depth)
            for row in range(len(ids)):
                text, place = texts[tuple(reqs[row].prompt.ids)], reqs[row].num_tokens + depth
                if place < len(text) and rng.random() < 0.75:
                    ids[row] = text[place]
            return ids

        return picked

    drafting._pick = told  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_with_the_layer_are_the_plain_ones(folder: Path, dtype: str) -> None:
    """Prompts come in chunks at first.  The second time they are prefix hits, and the layer knows the answers."""
    requests = asks(8, new_tokens=24)
    plain = Server(folder, dtype, context_length=128).together(requests)
    server, drafting = drafted(folder, dtype, chunked_prefill_size=24, speculative_num_steps=4)
    assert_same(server.together(requests, gaps=[2, 0, 1, 3]), plain)
    assert drafting.counts.num_drafted > 30
    tell(drafting, requests, plain)
    before = drafting.counts.num_kept
    assert_same(server.together(requests, gaps=[2, 0, 1, 3]), plain)
    assert drafting.counts.num_kept > before + 20


@pytest.mark.parametrize("folder", ["glm4_moe"], indirect=True)
def test_every_depth_and_the_name_of_sglang(folder: Path) -> None:
    requests = asks(4, new_tokens=16)
    plain = Server(folder, "float32", context_length=128).together(requests)
    for algorithm, steps in (("EAGLE", 1), ("NEXTN", 8)):
        settings = {"speculative_algorithm": algorithm, "speculative_num_steps": steps}
        server, drafting = drafted(folder, "float32", **settings)
        tell(drafting, requests, plain)
        assert_same(server.together(requests), plain)
        assert 0 < drafting.counts.num_kept < drafting.counts.num_drafted


@pytest.mark.parametrize("folder", ["glm4_moe"], indirect=True)
def test_grammars_and_lists_give_the_plain_tokens_and_masks(folder: Path) -> None:
    """The layer is mostly wrong, but right where a grammar leaves one token."""
    save_tokenizer(train_tokenizer(VOCABULARY), folder, 256)
    settings = {"dtype": "float32", "chunked_prefill_size": 32, "weight_version": "v0"}
    want = _ask_restricted(Harness(folder, **settings))
    harness = Harness(folder, speculative_algorithm="NEXTN", **settings)
    drafting = harness.scheduler._steps._drafting
    assert isinstance(drafting, ModelDrafting)
    drafting._choice = None
    got = _ask_restricted(harness)
    assert [facts(got[i]) for i in want] == [facts(want[i]) for i in want]
    tallies = [got[i].finished.drafts for i in (0, 1, 3, 5, 7)]
    assert all(tallies) and sum(tally.num_kept for tally in tallies if tally is not None) > 10, tallies


@pytest.mark.parametrize("folder", ["glm4_moe"], indirect=True)
def test_a_layer_that_writes_the_models_kv_is_found(folder: Path) -> None:
    """A wrong variant: the comparison above must see it."""
    requests = asks(6, new_tokens=24)
    plain = Server(folder, "float32", context_length=128).together(requests)
    server, drafting = drafted(folder, "float32")
    drafting.runner._attention = server.harness.scheduler.runner.attention
    assert any_differs(server.together(requests), plain)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "m", "qwen3_moe", 3)
    with pytest.raises(StartupError, match="Qwen3MoeForCausalLM has no layer that predicts several tokens at once"):
        drafted(folder, "float32")
