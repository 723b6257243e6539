"""Scores that experts get under forced routes, and the gradient of the router, against float64, of every MoE family.

Shapes: B sequences, S positions, T = B * S tokens, L MoE layers, K top-k, D hidden, E logical experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from capture import replay
from capture.errors import UnsupportedRouterError
from capture.replay import find_routers, force_routes, record_routes
from rollout.entrypoints.checkpoint_families import random_model
from rollout.entrypoints.checkpoint_spec import DENSE_FAMILIES, FAMILIES, CheckpointSpec
from tests.family_zoo import family_model

BATCH, SEQ, EXPERTS, TOP_K = 2, 6, 16, 3
MOE_FAMILIES = [name for name in FAMILIES if name not in DENSE_FAMILIES]
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "experts": EXPERTS, "top_k": TOP_K, "moe_intermediate_size": 16, "context_length": 256,
}  # fmt: skip
IDS = torch.randint(0, 64, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=MOE_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if family == "qwen3_moe":
        yield family_model(family, 0, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    else:
        yield random_model(CheckpointSpec(family=family, **SIZES))
    torch.set_num_threads(before)


def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def own_routes(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, L, K], and the logits."""
    with record_routes(model) as record:
        logits = logits_of(model)
    return record.ids().unflatten(0, (BATCH, SEQ)), logits


def other_routes(routes: torch.Tensor) -> torch.Tensor:
    return (routes + 5) % EXPERTS


@contextmanager
def watched(model: Any) -> Iterator[tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]]:
    """The inputs of the routers, and the ids and weights that the experts get."""
    inputs: list[torch.Tensor] = []
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def see(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        _hidden, ids_TK, weights_TK = args
        if weights_TK.requires_grad:
            weights_TK.retain_grad()
        given.append((ids_TK, weights_TK))

    handles = [
        router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().flatten(0, -2)))
        for router in find_routers(model)
    ]
    handles += [m.register_forward_pre_hook(see) for name, m in model.named_modules() if name.endswith(".experts")]
    yield inputs, given
    for handle in handles:
        handle.remove()


def reference(family: str, router: Any, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weight_ED: torch.Tensor) -> Any:
    """Scores [T, K] of any experts in float64, by the definition of each family."""
    logits_TE = hidden_TD.double() @ weight_ED.T
    if family == "gpt_oss":
        chosen_TK = (logits_TE + router.bias.detach().double()).gather(1, ids_TK).exp()
        return chosen_TK / chosen_TK.sum(1, keepdim=True)
    if family in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        chosen_TK = 1 / (1 + (-logits_TE).exp()).gather(1, ids_TK)
        return router.routed_scaling_factor * chosen_TK / chosen_TK.sum(1, keepdim=True)
    chosen_TK = logits_TE.exp().gather(1, ids_TK)
    return chosen_TK / chosen_TK.sum(1, keepdim=True)


def test_positions_without_a_row_route_by_themselves_in_every_forward(model: Any) -> None:
    routes, logits = own_routes(model)
    routes[0, 1] = routes[1, 3:] = -1
    with force_routes(model, routes[:, :-1]) as forced:
        for _ in range(2):
            assert torch.equal(logits_of(model), logits)
    assert (forced.forced_positions, forced.own_positions) == (BATCH * SEQ - 5, 5)


def test_other_routes_have_the_current_scores_and_their_gradient(family: str, model: Any) -> None:
    routes, logits = own_routes(model)
    other = other_routes(routes)
    with force_routes(model, other), watched(model) as (inputs, given):
        changed = logits_of(model)
        changed.logsumexp(-1).sum().backward()
    assert (changed - logits).abs().max() > 1e-2
    for layer, router in enumerate(find_routers(model)):
        ids_TK, weights_TK = given[layer]
        weight_ED = router.weight.detach().double().requires_grad_()
        scores_TK = reference(family, router, inputs[layer], ids_TK, weight_ED)
        assert torch.equal(ids_TK, other.flatten(0, 1)[:, layer])
        torch.testing.assert_close(weights_TK.detach().double(), scores_TK.detach(), rtol=1e-4, atol=1e-6)
        scores_TK.backward(weights_TK.grad.double())
        assert weight_ED.grad is not None and weight_ED.grad.abs().max() > 1e-6
        largest = float(weight_ED.grad.abs().max())
        torch.testing.assert_close(router.weight.grad.double(), weight_ED.grad, rtol=1e-3, atol=1e-4 * largest)


def biased_sigmoid(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    scores_TK = (logits_TE.sigmoid() + router.e_score_correction_bias).gather(1, ids_TK)
    return scores_TK / scores_TK.sum(1, keepdim=True) * router.routed_scaling_factor


def unscaled_sigmoid(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    scores_TK = logits_TE.sigmoid().gather(1, ids_TK)
    return scores_TK / scores_TK.sum(1, keepdim=True)


def share_of_all(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    return logits_TE.softmax(-1).gather(1, ids_TK)


def sigmoid_for_softmax(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    scores_TK = logits_TE.sigmoid().gather(1, ids_TK)
    return scores_TK / scores_TK.sum(1, keepdim=True)


WRONG = {
    "glm4_moe": (biased_sigmoid, unscaled_sigmoid, share_of_all),
    "deepseek_v3": (biased_sigmoid, unscaled_sigmoid, share_of_all),
    "glm4_moe_lite": (biased_sigmoid, share_of_all),  # its factor is checked by the reference
}


@pytest.mark.mutant
def test_a_wrong_formula_is_refused(family: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliberately wrong: scores by another formula than the family's."""
    routes, _ = own_routes(model)
    for wrong in WRONG.get(family, (share_of_all, sigmoid_for_softmax)):
        with monkeypatch.context() as patch:
            patch.setattr(replay, "weights_of", wrong)
            with force_routes(model, routes), pytest.raises(UnsupportedRouterError, match="formula"):
                logits_of(model)
