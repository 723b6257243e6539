"""The whole engine against transformers in float32: greedy tokens, log-probabilities, experts.

Three kinds of model, three seeds each.  Routers are scaled, so that the choice of experts is not a matter of rounding;
scores closer than 1e-5 count as tied and only their set is compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from capture.replay import find_routers
from tests.model_zoo import KINDS, tiny_checkpoint
from tests.scheduler_harness import Harness, Result

NEW_TOKENS = 32
LOGPROB_TOLERANCE = 1e-4
TIED = 1e-5


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in (1, 5, 17, 40)]


def hf_scores(
    model: torch.nn.Module, ids: list[int], routers: list[torch.nn.Module]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the log-softmax of every position, [S, V], and each router's probabilities, [S, E]."""
    scores: list[np.ndarray] = []

    def keep(_: torch.nn.Module, __: object, output: tuple[torch.Tensor, ...]) -> None:
        scores.append(output[0].softmax(-1).numpy())

    handles = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1).numpy(), scores


def check_routes(result: Result, scores: list[np.ndarray]) -> int:
    """Compare every row and layer; returns how many choices were compared in order."""
    in_order = 0
    rows = result.routes
    assert rows.shape[:2] == (len(result.prompt_ids) + len(result.token_ids) - 1, len(scores))
    for layer, probabilities in enumerate(scores):
        for token, chosen in enumerate(rows[:, layer].astype(int)):
            values = probabilities[token]
            order = np.argsort(-values, kind="stable")
            k = len(chosen)
            if values[order[k - 1]] - values[order[k]] > TIED:
                assert set(chosen) == set(order[:k].tolist())
            gaps = -np.diff(values[order[: k + 1]])
            if (gaps > TIED).all():
                assert chosen.tolist() == order[:k].tolist()
                in_order += 1
    return in_order


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_engine_agrees_with_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", kind, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    is_moe = kind != "dense"
    harness = Harness(folder, dtype="float32", enable_return_routed_experts=is_moe, chunked_prefill_size=16)
    results = harness.generate(prompts(model.config.vocab_size), {"max_new_tokens": NEW_TOKENS}, logprob_start_len=0)
    routers = find_routers(model) if is_moe else []
    compared = 0
    for result in results:
        ids = result.prompt_ids + result.token_ids
        logprobs, scores = hf_scores(model, ids, routers)
        first = len(result.prompt_ids) - 1
        expected = logprobs[first:-1]
        assert result.token_ids == expected.argmax(-1).tolist()
        assert np.allclose(result.logprobs, expected.max(-1), rtol=0, atol=LOGPROB_TOLERANCE)
        scored = result.finished.prompt_logprobs.values[1:]
        want = [logprobs[i, ids[i + 1]] for i in range(first)]
        assert np.allclose(scored, want, rtol=0, atol=LOGPROB_TOLERANCE)
        if is_moe:
            compared += check_routes(result, scores)
    assert compared > 300 or not is_moe, "too few rows were compared in order"


@pytest.mark.mutant
def test_the_route_check_can_fail(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe_dense_first", seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (result,) = Harness(folder, dtype="float32").generate([[1, 2, 3, 4]], {"max_new_tokens": 8})
    _, scores = hf_scores(model, result.prompt_ids + result.token_ids, find_routers(model))
    check_routes(result, scores)
    with pytest.raises(AssertionError):
        check_routes(result, [np.roll(layer, 1, axis=0) for layer in scores])  # off by one token
