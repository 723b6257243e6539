"""Routes forced onto transformers' model of every MoE family: its formula for weights, gradients into the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import replay
from capture.errors import UnsupportedRouterError
from capture.replay import find_routers, force_routes, record_routes
from capture.routers import weights_of
from tests.family_zoo import FAMILIES, family_model, with_experts

BATCH, SEQ = 2, 9
Weights = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def _softmax_renormalised(logits_TE: torch.Tensor, ids_TK: torch.Tensor, router: Any) -> torch.Tensor:
    exps_TE = logits_TE.exp()
    return exps_TE.gather(1, ids_TK) / exps_TE.gather(1, ids_TK).sum(1, keepdim=True)


def _softmax(logits_TE: torch.Tensor, ids_TK: torch.Tensor, router: Any) -> torch.Tensor:
    exps_TE = logits_TE.exp()
    return exps_TE.gather(1, ids_TK) / exps_TE.sum(1, keepdim=True)


def _sigmoid_scaled(logits_TE: torch.Tensor, ids_TK: torch.Tensor, router: Any) -> torch.Tensor:
    scores_TK = 1 / (1 + (-logits_TE.gather(1, ids_TK)).exp())
    return router.routed_scaling_factor * scores_TK / scores_TK.sum(1, keepdim=True)


def formula(name: str) -> Weights:
    """Return the formula of the papers for a family of the zoo."""
    if name.startswith(("glm4", "deepseek", "kimi", "moonlight")):
        return _sigmoid_scaled
    return _softmax_renormalised if FAMILIES[name].get("norm_topk_prob", True) else _softmax


@pytest.fixture(scope="module", params=with_experts())
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def _ids() -> torch.Tensor:
    return torch.randint(3, 320, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


def _recorded(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model, and return its routes [B, S, L, K] and its logits."""
    with torch.no_grad(), record_routes(model) as record:
        logits = _logits(model, _ids())
    return record.ids().unflatten(0, (BATCH, SEQ)), logits


def _others(model: Any, routes: torch.Tensor) -> torch.Tensor:
    router: Any = find_routers(model)[0]
    return (routes + 1) % router.num_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_own_routes_change_no_bit(family: str, dtype: torch.dtype) -> None:
    model = family_model(family, 3).to(dtype)
    routes, logits = _recorded(model)
    with torch.no_grad(), force_routes(model, routes) as forced:
        assert torch.equal(_logits(model, _ids()), logits)
    assert (forced.forced_positions, forced.own_positions) == (BATCH * SEQ, 0)


def test_forced_experts_are_weighed_as_the_family_does(family: str) -> None:
    model = family_model(family, 3)
    routes, logits = _recorded(model)
    seen: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
    with torch.no_grad(), force_routes(model, _others(model, routes)):
        handles = [r.register_forward_hook(lambda m, x, y: seen.append((m, y))) for r in find_routers(model)]
        changed = _logits(model, _ids())
    for handle in handles:
        handle.remove()
    assert not torch.allclose(changed, logits, atol=1e-2)
    assert len(seen) == routes.shape[2]
    for layer, (router, (router_logits, scores, chosen)) in enumerate(seen):
        assert torch.equal(chosen, _others(model, routes).flatten(0, 1)[:, layer])
        want = formula(family)(router_logits.double(), chosen, router)
        torch.testing.assert_close(scores.double(), want, rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_router(family: str) -> None:
    """Routing weights have the gradients of the family's formula, and a whole model's gradients reach every router."""
    model = family_model(family, 3)
    router: Any = find_routers(model)[0]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, router.num_experts, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(router.num_experts, generator=generator)[: router.top_k] for _ in range(7)])
    outer = torch.randn(7, router.top_k, generator=generator, dtype=torch.float64)
    (want,) = torch.autograd.grad((formula(family)(logits, ids, router) * outer).sum(), logits)
    (got,) = torch.autograd.grad((weights_of(router, logits, ids) * outer).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)  # a softmax is computed in float32
    routes, _ = _recorded(model)
    with force_routes(model, _others(model, routes)):
        _logits(model, _ids()).logsumexp(-1).sum().backward()
    for each in find_routers(model):
        assert each.weight.grad is not None and each.weight.grad.abs().max() > 0


def test_recomputed_activations_follow_the_routes(family: str) -> None:
    """Gradient checkpointing gives the same gradients as a backward pass without it."""
    gradients = []
    for recomputes in (False, True):
        model = family_model(family, 3).train()
        routes, _ = _recorded(model)
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with force_routes(model, _others(model, routes)):
            _logits(model, _ids()).logsumexp(-1).sum().backward()
        gradients.append([router.weight.grad for router in find_routers(model)])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.mutant
def test_another_family_s_formula_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(family, 3)
    routes, _ = _recorded(model)
    wrong = _softmax_renormalised if formula(family) is _sigmoid_scaled else _sigmoid_scaled

    def weights(router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        if not hasattr(router, "routed_scaling_factor"):
            router.routed_scaling_factor = 1.0
        return wrong(logits_TE, ids_TK, router).to(logits_TE.dtype)

    monkeypatch.setattr(replay, "weights_of", weights)
    with torch.no_grad(), force_routes(model, routes), pytest.raises(UnsupportedRouterError, match="formula"):
        _logits(model, _ids())


def test_families_without_experts_have_no_routers() -> None:
    for name in sorted(FAMILIES.keys() - set(with_experts()))[:3]:
        with pytest.raises(UnsupportedRouterError, match="no router"):
            find_routers(family_model(name, 0))
