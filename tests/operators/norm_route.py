"""Cases of `norm_route` with experts that are given."""

from __future__ import annotations

from typing import Any

import torch

from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import Ops
from tests.kernels import matrix
from tests.operators import Arguments, D, E, K, T, rand

IDS = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)])


def case(rule: RouterRule, **others: Any) -> Arguments:
    norm = {"residual": rand(T, D), "hidden": None, "norm_weight": rand(D, seed=1), "eps": 1e-6}
    return {**norm, "weight": rand(E, D), "rule": rule, "forced_ids": IDS, **others}


CASES = {
    "": case(RouterRule(E, K, scaling=1.7)),
    "not normalised": case(RouterRule(E, K, normalise=False, scaling=1.7)),
    "of chosen": case(RouterRule(E, K, scoring="softmax_of_chosen", scaling=1.7), bias=rand(E)),
    "sigmoid": case(
        RouterRule(E, K, scoring="sigmoid", scaling=1.7, num_groups=3, top_groups=2), correction_bias=rand(E)
    ),
}


def stored(ops: Ops, arguments: Arguments) -> Arguments:
    return arguments | {"weight": matrix(ops, arguments["weight"])}
