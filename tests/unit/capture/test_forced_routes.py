"""Routes that a trainer's model is forced to follow: padding, gradients, and rows that cannot be followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from capture import replay
from capture.errors import RouteValueError
from capture.replay import find_routers, force_routes, pad_routes, record_routes
from tests.routes_judge import EXPERTS, LAYERS

TOP_K, MOE_LAYERS, HIDDEN_LAYERS = 3, (1, 2), 3


IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def own_routes(model: Qwen3MoeForCausalLM) -> torch.Tensor:
    """Return the model's own choices [B, S, L, K]."""
    with record_routes(model) as recorded, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return recorded.ids().view(*IDS.shape, LAYERS, TOP_K)


def others(routes: torch.Tensor) -> torch.Tensor:
    """Return valid routes that differ from `routes` everywhere."""
    return (routes + 1) % EXPERTS


def forced(model: Qwen3MoeForCausalLM, routes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the routes that were followed [B, S, L, K], and at how many positions they were forced."""
    with force_routes(model, routes) as state, record_routes(model) as recorded, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return recorded.ids().view(*IDS.shape, LAYERS, TOP_K), state.forced_positions


def with_expert_zero(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Fill missing rows with the first experts (a wrong padding)."""
    padded = pad_routes(sequences, EXPERTS, IDS.shape[1])
    return torch.where(padded < 0, torch.arange(TOP_K).expand_as(padded), padded)


def on_the_left(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Move padding to the left, so that all rows end where the longest sequence ends (a wrong padding)."""
    padded = pad_routes(sequences, EXPERTS, IDS.shape[1])
    return torch.stack([row.roll(IDS.shape[1] - len(item), 0) for row, item in zip(padded, sequences, strict=True)])


def follows(model: Qwen3MoeForCausalLM, pad: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> bool:
    """Return whether given rows are followed where their tokens are, and every other position routes by itself."""
    own, lengths = own_routes(model), (6, 4)
    given = [others(own[row, :length]) for row, length in enumerate(lengths)]
    got, count = forced(model, pad(given))
    rows_are_right = all(torch.equal(got[row, :length], given[row]) for row, length in enumerate(lengths))
    return rows_are_right and count == sum(lengths)


def test_27_tunix_2046_and_31_slime_1052_padding_is_no_expert(model: Qwen3MoeForCausalLM) -> None:
    assert follows(model, lambda given: pad_routes(given, EXPERTS, IDS.shape[1]))
    assert not follows(model, with_expert_zero)
    assert not follows(model, on_the_left)


def from_the_top_k(router, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Gather from scores that are zero outside the router's own choice (a wrong formula)."""
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    top = scores_TE.topk(router.top_k, dim=-1)
    kept_TE = torch.zeros_like(scores_TE).scatter(1, top.indices, top.values)
    return kept_TE.gather(1, ids_TK).to(logits_TE.dtype)


def router_gradient(model: Qwen3MoeForCausalLM, routes: torch.Tensor) -> float:
    """Return the largest absolute element of the first router's gradient under forced routes."""
    model.zero_grad()
    with force_routes(model, routes):
        model(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    gradient = find_routers(model)[0].weight.grad  # type: ignore[union-attr]
    return float(gradient.abs().max())  # type: ignore[union-attr, operator]


def test_28_megatron_79_forced_experts_have_gradients(
    model: Qwen3MoeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router would choose none of the forced experts."""
    chosen = own_routes(model)
    absent = torch.ones(*chosen.shape[:-1], EXPERTS).scatter(-1, chosen, 0.0).topk(TOP_K, dim=-1).indices
    assert router_gradient(model, absent) > 0
    monkeypatch.setattr(replay, "weights_of", from_the_top_k)
    monkeypatch.setattr(replay, "_check_formula", lambda *_: None)
    assert router_gradient(model, absent) == 0


def test_30_areal_1496_what_is_not_followed_is_refused_or_counted(
    model: Qwen3MoeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_routes(model)
    routes = others(own)
    absent = routes.clone()
    absent[1, 3:] = -1
    got, count = forced(model, absent)
    assert count == 9 + 3 and torch.equal(got[0], routes[0]) and torch.equal(got[1, :3], routes[1, :3])
    broken = routes.clone()
    broken[1, 5, 1, 2] = EXPERTS
    with pytest.raises(RouteValueError, match=f"outside 0..{EXPERTS - 1}"):
        forced(model, broken)

    def forgiving(ids_TLK: np.ndarray, num_experts: int, missing: int) -> np.ndarray:
        """Take a row that cannot be followed for a missing one (a wrong check)."""
        return ((ids_TLK < 0) | (ids_TLK >= num_experts)).any(axis=(1, 2))

    monkeypatch.setattr(replay, "checked_missing_rows", forgiving)
    got, count = forced(model, broken)
    assert count == 17 and not torch.equal(got[1, 5], routes[1, 5])
