"""A rollout that a model drafts for has the tokens, log-probabilities and routes of a plain one, bit for bit.

Whole engines on the compiled operators.  The drafts are the served model itself and another random one.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.make_checkpoint.run import make_checkpoint
from rollout.core.errors import StartupError
from rollout.scheduler.model_drafting import ModelDrafting
from rollout.scheduler.proposal_sampler import ProposalSampler
from rollout.scheduler.verify import VerifiedRows
from tests.family_zoo import FAMILIES, also_for, family_checkpoint, published_config
from tests.invariance import Ask, Server, any_differs, assert_same
from tests.kernels import native_ops
from tests.model_zoo import tiny_checkpoint, tiny_spec
from tests.scheduler_harness import Harness
from tests.unit.engine.test_invariance_drafts import VOCABULARY, _ask_all, _ask_restricted
from tests.unit.engine.test_invariance_engine import asks
from tests.unit.scheduler.test_restricted_requests import facts

ODD_SIZES = "odd sizes"
RECURRENT = ("qwen3_next", "qwen3_5")
WITH_FAMILIES = also_for(FAMILIES, ODD_SIZES)
ODD = {"hidden_size": 51, "moe_intermediate_size": 19, "intermediate_size": 45, "experts": 17}


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", ODD_SIZES)


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    return family_checkpoint(path, model, 3) if model in FAMILIES else make_checkpoint(path, tiny_spec(**ODD))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("other") / "m", seed=9)


def drafting_of(harness: Harness) -> ModelDrafting:
    """Return the engine's drafting, which from now on verifies all that is proposed."""
    drafting = harness.scheduler._steps._drafting
    assert isinstance(drafting, ModelDrafting)
    drafting._choice = None
    return drafting


def drafted(folder: Path, draft: Path, dtype: str, **settings: Any) -> tuple[Server, ModelDrafting]:
    settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    server = Server(folder, dtype, **settings)
    return server, drafting_of(server.harness)


@WITH_FAMILIES
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_with_a_draft_model_are_the_plain_ones(folder: Path, other: Path, model: str, dtype: str) -> None:
    """Prompts come in chunks at first.  The second time they are prefix hits, also of the draft."""
    requests = asks(8, new_tokens=24)
    settings = {"chunked_prefill_size": 24, "context_length": 128}
    plain = Server(folder, dtype, context_length=128).together(requests)
    for draft in (other, *([] if model.startswith(RECURRENT) else [folder])):
        server, drafting = drafted(folder, draft, dtype, **settings)
        for _ in range(2):
            before = drafting.counts.num_drafted, drafting.counts.num_kept
            assert_same(server.together(requests, gaps=[2, 0, 1, 3]), plain)
            num_drafted, num_kept = drafting.counts.num_drafted - before[0], drafting.counts.num_kept - before[1]
            assert num_drafted > 20
            if draft is folder and dtype == "float32":
                assert num_kept > 0.98 * num_drafted  # the same numbers choose the same tokens


def test_every_field_of_a_request_keeps_its_meaning(folder: Path, other: Path) -> None:
    """Penalties, bias, shortest length, end tokens, masks, alternatives and retractions are as without drafts."""
    settings = {"dtype": "float32", "max_total_tokens": 130, "chunked_prefill_size": 16, "context_length": 128}
    want = _ask_all(Harness(folder, **settings))
    settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    harness = Harness(folder, **settings)
    drafting = drafting_of(harness)
    got = _ask_all(harness)
    assert sum(result.finished.num_retractions for result in got) > 0 < drafting.counts.num_kept
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs
        assert ours.finished.reason == theirs.finished.reason and ours.mask == theirs.mask
        assert ours.top == theirs.top and ours.chosen == theirs.chosen
        assert np.array_equal(ours.routes, theirs.routes)


RESTRICTED = (0, 1, 3, 5, 7)
"""Requests of `_ask_restricted` with a regex, a schema, and lists; without penalties, which a draft does not count."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grammars_and_lists_give_the_plain_tokens_and_masks(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is kept as without a grammar.  One that does not follow its own tokens is kept less, and as right."""
    folder = make_checkpoint(tmp_path / "m", tiny_spec(seed=1))
    settings = {"dtype": dtype, "chunked_prefill_size": 32, "weight_version": "v0"}
    want = _ask_restricted(Harness(folder, **settings))
    assert want[8].finished.reason.type == "abort" and len(want[8].token_ids) > 1
    settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    shares = []
    for follows in (True, False):
        if not follows:
            monkeypatch.setattr(ProposalSampler, "_feed", lambda self, token_ids: None)
        harness = Harness(folder, **settings)
        drafting_of(harness)
        got = _ask_restricted(harness)
        assert [facts(got[i]) for i in want] == [facts(want[i]) for i in want]
        tallies = [got[i].finished.drafts for i in RESTRICTED]
        assert all(tally is not None and tally.num_kept > 0 for tally in tallies)
        shares.append(sum(tally.num_kept for tally in tallies) / sum(tally.num_drafted for tally in tallies))
    assert shares[0] > (0.9 if dtype == "float32" else 0.5) and shares[0] > shares[1] + 0.1, shares


def test_another_models_drafts_stay_within_grammars_and_lists(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept where the grammar leaves few tokens.  Without sets of allowed tokens hardly any is."""
    folder = make_checkpoint(tmp_path / "m", tiny_spec(seed=1))
    settings = {"dtype": "float32", "max_total_tokens": 112, "max_running_requests": 6, "chunked_prefill_size": 32}
    want = _ask_restricted(Harness(folder, **settings))
    settings |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(other)}
    kept = []
    for restricts in (True, False):
        if not restricts:
            monkeypatch.setattr(ProposalSampler, "_restrict", lambda self, count: None)
        harness = Harness(folder, **settings)
        drafting_of(harness)
        got = _ask_restricted(harness)
        assert sum(result.finished.num_retractions for result in got.values()) > 0
        assert [facts(got[i]) for i in want] == [facts(want[i]) for i in want]
        kept.append(sum(got[i].finished.drafts.num_kept for i in RESTRICTED))
    assert kept[0] > 2 * kept[1], kept


def test_samples_of_one_prompt_share_its_kv_in_the_draft(folder: Path) -> None:
    requests = [
        Ask(tuple(range(3, 60)), {"max_new_tokens": 9, "temperature": 1.0, "sampling_seed": i}) for i in range(5)
    ]
    plain = Server(folder, "float32", context_length=128).together(requests)
    server, drafting = drafted(folder, folder, "float32", context_length=128)
    computed: list[int] = []
    propose = drafting.runner.propose

    def counted(spans: Any, *rest: Any) -> Any:
        computed.extend(len(span.token_ids) for span in spans)
        return propose(spans, *rest)

    drafting.runner.propose = counted
    assert_same(server.together(requests), plain)
    assert sum(computed) < 57 + 5 * 9 and drafting.counts.num_kept == drafting.counts.num_drafted


def test_a_draft_whose_weights_change_changes_no_bit(folder: Path) -> None:
    requests = asks(6, new_tokens=24)
    plain = Server(folder, "float32", context_length=128).together(requests)
    server, drafting = drafted(folder, folder, "float32", context_length=128)
    rids = [server.submit(ask) for ask in requests]
    for _ in range(4):
        server.harness.tick()
    layer = drafting.runner.model.model.model.layers[0]
    layer.input_layernorm.weight.normal_()
    server.harness.run()
    assert_same(server.facts(rids), plain)
    assert 0 < drafting.counts.num_kept < drafting.counts.num_drafted


def test_a_draft_that_writes_the_served_kv_is_found(folder: Path, tmp_path: Path) -> None:
    """A wrong variant: the comparison above must see it."""
    requests = asks(6, new_tokens=24)
    plain = Server(folder, "float32", context_length=128).together(requests)
    same_sizes = make_checkpoint(tmp_path / "m", tiny_spec(seed=4, **ODD))
    server, drafting = drafted(folder, same_sizes, "float32", context_length=128)
    drafting.runner._attention = server.harness.scheduler.runner.attention
    assert any_differs(server.together(requests), plain)


def test_rejected_kv_that_counts_as_kept_changes_only_the_speed(folder: Path) -> None:
    """Wrong tokens among the right ones leave KV behind, which the next draft must not read as its own."""
    requests = asks(6, new_tokens=24)
    plain = Server(folder, "float32", context_length=128).together(requests)
    shares = []
    for is_clean in (True, False):
        server, drafting = drafted(folder, folder, "float32", context_length=128)
        _mislead(drafting, is_clean)
        assert_same(server.together(requests), plain)
        shares.append(drafting.counts.num_kept / drafting.counts.num_drafted)
    assert shares[0] > shares[1] > 0


def _mislead(drafting: ModelDrafting, is_clean: bool) -> None:
    """Make every fourth proposal wrong.  Not `is_clean`: what was rejected counts as the KV of the kept tokens."""
    propose, note, calls = drafting.runner.propose, drafting.note, itertools.count()

    def misled(spans: Any, counts: Any, pool: Any, pick: Any) -> Any:
        def wrong(logits_NV: torch.Tensor, depth: int) -> torch.Tensor:
            return (pick(logits_NV, depth) + (next(calls) % 4 == 0)) % VOCABULARY

        return propose(spans, counts, pool, wrong)

    def unclamped(rows: VerifiedRows, counts: Any) -> None:
        note(rows, counts)
        for req in rows.reqs:
            if req in drafting._reaches:
                drafting._reaches[req].length = req.num_tokens - 1

    drafting.runner.propose = misled
    if not is_clean:
        drafting.note = unclamped


def test_a_draft_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="has 319 tokens, but the served model has 320"):
        drafted(folder, tiny_checkpoint(tmp_path / "words", vocab_size=319), "float32")
    short = tiny_checkpoint(tmp_path / "short")
    settings = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 64}
    (short / "config.json").write_text(json.dumps(settings))
    with pytest.raises(StartupError, match="has 64 positions, but a context has 128"):
        drafted(folder, short, "float32", context_length=128)


def test_a_recurrent_draft_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published_config("qwen3_next")))
    with pytest.raises(StartupError, match="recurrent layers"):
        drafted(folder, tmp_path, "float32", context_length=128)
