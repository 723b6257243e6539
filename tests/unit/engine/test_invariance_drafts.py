"""A drafted rollout has the tokens, log-probabilities and routes of a plain one, bit for bit.

Whole engines on the compiled operators; the drafters are the real one and drafters of known worth.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.make_checkpoint.run import make_checkpoint
from rollout.core.grammar import Grammar
from rollout.core.sampling_params import SamplingParams
from rollout.sampling.base import SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.verify import VerifiedRows, _Columns
from tests.drafters import KnownDrafter
from tests.family_zoo import FAMILIES, also_for, family_checkpoint
from tests.invariance import Ask, Facts, Server, assert_same
from tests.kernels import native_ops
from tests.model_zoo import tiny_spec
from tests.scheduler_harness import Harness, Result
from tests.unit.engine.test_invariance_engine import asks
from tests.unit.scheduler.test_restricted_requests import facts, run_all

DTYPES = ["bfloat16", "float32"]
ODD_SIZES = "odd sizes"
KINDS = ["right", "wrong", "hostile", "mixed"]
VOCABULARY = 320
PARAMETERS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"logit_bias": {7: 3.0, 11: -2.0}, "top_k": 9},
    {"min_new_tokens": 12, "stop_token_ids": list(range(0, 320, 9)), "top_p": 0.9},
    {"stop_token_ids": list(range(0, 320, 12))},
    {"repetition_penalty": 1.1, "min_p": 0.02, "top_k": 40},
]
WITH_FAMILIES = also_for(FAMILIES, ODD_SIZES)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", ODD_SIZES)


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    if model in FAMILIES:
        return family_checkpoint(path, model, 3)
    return make_checkpoint(path, tiny_spec(hidden_size=51, moe_intermediate_size=19, intermediate_size=45, experts=17))


def drafted(server: Server, requests: list[Ask], plain: list[Facts], kind: str) -> KnownDrafter:
    """Let the server draft from the known outputs, and verify all that is proposed."""
    outputs = {ask.prompt: facts.token_ids for ask, facts in zip(requests, plain, strict=True)}
    drafter = KnownDrafter(outputs, server.vocab_size, kind)
    server.harness.scheduler._steps._drafting = Drafting(drafter, None, server.vocab_size, 5)
    return drafter


@WITH_FAMILIES
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafted_answers_are_the_plain_ones(folder: Path, dtype: str) -> None:
    requests = asks(12, new_tokens=24)
    plain = Server(folder, dtype).together(requests)
    server = Server(folder, dtype, speculative_algorithm="NGRAM", chunked_prefill_size=7)
    for kind in KINDS:
        drafter = drafted(server, requests, plain, kind)
        assert_same(server.together(requests, gaps=[2, 0, 1, 3]), plain)
        assert drafter.num_proposed > 20
        counts = server.harness.scheduler._steps._drafting.counts
        assert counts.num_drafted > 0 and (counts.num_kept == 0) == (kind == "wrong")


def test_every_field_of_a_request_keeps_its_meaning(folder: Path) -> None:
    """Penalties, bias, shortest length, end tokens, masks, alternatives and samples are as without drafts."""
    settings = {"dtype": "float32", "max_total_tokens": 130, "chunked_prefill_size": 16}
    plain, server = Harness(folder, **settings), Harness(folder, speculative_algorithm="NGRAM", **settings)
    answers = [_ask_all(plain)]
    outputs = {tuple(result.prompt_ids): result.token_ids for result in answers[0]}
    for kind in ("mixed", "right"):
        drafter = KnownDrafter(outputs, VOCABULARY, kind)
        server.scheduler._steps._drafting = Drafting(drafter, None, VOCABULARY, 4)
        answers.append(_ask_all(server))
    assert sum(result.finished.num_retractions for result in answers[1]) > 0
    assert {result.finished.reason.type for result in answers[0]} == {"stop", "length"}
    for drafted in answers[1:]:
        for got, want in zip(drafted, answers[0], strict=True):
            assert got.token_ids == want.token_ids and got.logprobs == want.logprobs
            assert got.finished.reason == want.finished.reason
            assert got.top == want.top and got.chosen == want.chosen
            assert got.mask == want.mask
            assert np.array_equal(got.routes, want.routes)


def _ask_all(harness: Harness) -> list[Result]:
    """Ask for requests with all kinds of sampling parameters, most of them at once."""
    rng = random.Random(1)
    rids = []
    for i in range(24):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        params = {"max_new_tokens": rng.randint(1, 40), "temperature": float(i % 3 > 0), "sampling_seed": i}
        params |= PARAMETERS[i % len(PARAMETERS)]
        params["min_new_tokens"] = min(params.get("min_new_tokens", 0), params["max_new_tokens"])
        fields = {
            "return_sampling_mask": i % 2 == 0,
            "top_logprobs_num": i % 4,
            "token_ids_logprob": [3, 5] if i % 3 else None,
        }
        rids.append(
            harness.submit(
                prompt, rid=f"{harness.args.speculative_algorithm}{len(harness.results)}", params=params, **fields
            )
        )
        if i % 12 == 0:
            harness.tick()
    harness.run()
    harness.check_idle()
    return [harness.results[rid] for rid in rids]


@pytest.mark.parametrize("is_wrong", [False, True], ids=["", "one set for all depths is noticed"])
def test_drafted_grammars_and_lists_give_the_plain_tokens_log_probabilities_and_masks(
    tmp_path: Path, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "m", tiny_spec(seed=1))
    settings = {"dtype": "float32", "chunked_prefill_size": 8, "weight_version": "v0"}
    plain = Harness(folder, **settings)
    want = _ask_restricted(plain)
    assert want[8].finished.reason.type == "abort" and len(want[8].token_ids) > 1
    outputs = {tuple(result.prompt_ids): result.token_ids for result in want.values()}
    if is_wrong:
        right = VerifiedRows._restriction
        monkeypatch.setattr(VerifiedRows, "_restriction", lambda self, i, depth: right(self, i, 0))
    for kind in ["right"] if is_wrong else ["right", "mixed", "wrong", "hostile"]:
        server = Harness(folder, speculative_algorithm="NGRAM", **settings)
        drafting = Drafting(KnownDrafter(outputs, VOCABULARY, kind), None, VOCABULARY, 4)
        server.scheduler._steps._drafting = drafting
        got = _ask_restricted(server)
        assert ([facts(got[i]) for i in want] == [facts(want[i]) for i in want]) != is_wrong, kind
        kept = sum(got[i].finished.drafts.num_kept for i in (0, 1, 3, 5) if got[i].finished.drafts is not None)
        assert is_wrong or (kept > 0) == (kind != "wrong"), "drafts of restricted requests were tried"


def _ask_restricted(harness: Harness) -> dict[int, Result]:
    """Ask for requests with grammars and lists, one of which fails behind its grammar's text."""
    results = run_all(harness)
    params = {"grammar": Grammar("regex", "[ab]{5}"), "max_new_tokens": 12, "min_new_tokens": 12, "ignore_eos": False}
    rid = harness.submit([3, 1, 4], params=params, return_sampling_mask=True)
    harness.run()
    return results | {8: harness.results[rid]}


def test_masks_over_the_limit_stay_in_their_rows() -> None:
    """A sampler with room for two ids of each mask counts more; only rows within the limit are read."""
    none, counts = torch.empty(0), torch.tensor([2, 7, 1, 5])
    ids = torch.arange(8, dtype=torch.int32).view(4, 2)
    tokens = SampledTokens(
        counts, counts.float(), counts.new_empty(4, 0), none.view(4, 0), none, counts, ids, ids.float()
    )
    info = SamplingBatchInfo([SamplingRow(SamplingParams(), 0, (), [1], [], wants_mask=True)] * 4, 8)
    part = _Columns(tokens, info).rows([1, 2, 0, 3])
    assert part.kept_counts.tolist() == [7, 1, 2, 5]
    begins, flat = part.kept_begins().tolist(), part.kept_ids.flatten().tolist()
    assert flat[begins[1] : begins[1] + 1] == [4] and flat[begins[2] : begins[2] + 2] == [0, 1]
    assert part.kept_logprobs.flatten().tolist() == flat
