"""`norm_route`: the router of an MoE layer as Triton kernels.

    add_rms_norm -> logits [T, E] -> the best K of each row, or the given ones, and their weights

A row's experts depend on that row alone.  Logits are sums over D in one order, in tiles of one shape for every number
of tokens; a library's matrix product takes other tiles for another number.  One program then chooses for each row.  On
an H100 a tensor core adds in one order wherever in the tile a row stands (`tests/gpu`).  Of equal scores the lower id
comes first, as in the compiled CPU router.  A NaN counts as the least.  The K ids are distinct for any scores.

Shapes: T tokens, D hidden, E logical experts, K top-k, G groups of experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import add_rms_norm
from rollout.kernels.gpu.sigmoid_gate import sigmoid
from rollout.kernels.operators.norm_route import RouterRule

_TILE_T, _TILE_E, _TILE_D = 16, 32, 128
_LOGITS_WARPS, _LOGITS_STAGES = 4, 4
SCORINGS = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}


@triton.jit(do_not_specialize=["num_tokens"])
def logits_kernel(
    hidden,
    weight,
    bias,
    logits,
    num_tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    expert = tl.program_id(1) * TILE_E + tl.arange(0, TILE_E)
    sums = tl.zeros((TILE_T, TILE_E), tl.float32)
    for first in range(0, D, TILE_D):
        at = first + tl.arange(0, TILE_D)
        x_mask = (token < num_tokens)[:, None] & (at < D)[None, :]
        w_mask = (expert < E)[None, :] & (at < D)[:, None]
        x = tl.load(hidden + token[:, None] * D + at[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight + expert[None, :] * D + at[:, None], mask=w_mask, other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    inside = (token < num_tokens)[:, None] & (expert < E)[None, :]
    place = logits + token[:, None] * E + expert[None, :]
    tl.store(place, sums.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def best_of(values, free, at, SIZE: tl.constexpr):
    """Return the place of the largest of the free `values`, of equal ones the lowest.  At least one place is free."""
    largest = tl.max(tl.where(free, values, float("-inf")), 0)
    return tl.min(tl.where(free & (values == largest), at, SIZE), 0)


@triton.jit
def of_best_groups(
    choices,
    expert,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Replace `choices` outside of the best groups by -inf; a group counts as much as its two best choices together."""
    group = tl.arange(0, BLOCK_G)
    totals = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        mine = expert // GROUP_SIZE == g
        first = best_of(choices, mine, expert, BLOCK_E)
        rest = mine & (expert != first)
        total = tl.max(tl.where(mine, choices, float("-inf")), 0)
        if GROUP_SIZE > 1:
            total += tl.max(tl.where(rest, choices, float("-inf")), 0)
        totals = tl.where(group == g, total, totals)
    free = group < NUM_GROUPS
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        g = best_of(totals, free, group, BLOCK_G)
        free = free & (group != g)
        kept = kept | (expert // GROUP_SIZE == g)
    return tl.where(kept, choices, float("-inf"))


@triton.jit
def choose_kernel(
    logits,
    correction_bias,
    forced_ids,
    weights,
    ids,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,  # the numbers of SCORINGS
    NORMALISE: tl.constexpr,
    CORRECTS: tl.constexpr,
    FORCES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < E
    slot = tl.arange(0, BLOCK_K)
    line = logits + row * E
    x = tl.load(line + expert, mask=inside, other=float("-inf")).to(tl.float32)
    choices = x
    if SCORING == 2:
        choices = sigmoid(x)
        if CORRECTS:
            choices += tl.load(correction_bias + expert, mask=inside, other=0.0)
    choices = tl.where(inside & (choices == choices), choices, float("-inf"))
    largest = tl.max(choices, 0)
    if NUM_GROUPS > 1:
        choices = of_best_groups(choices, expert, E // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, BLOCK_E, BLOCK_G)
    chosen = tl.zeros((BLOCK_K,), tl.int64)
    free = inside
    for k in range(K):
        best = best_of(choices, free, expert, BLOCK_E)
        free = free & (expert != best)
        chosen = tl.where(slot == k, best.to(tl.int64), chosen)
    if FORCES:
        given = tl.load(forced_ids + row * K + slot, mask=slot < K, other=0)
        chosen = tl.where(tl.load(forced_ids + row * K) >= 0, given, chosen)
    tl.store(ids + row * K + slot, chosen, mask=slot < K)

    # An id without an expert has no logit: its weight is NaN.
    known = (chosen >= 0) & (chosen < E)
    own = tl.load(line + chosen, mask=known & (slot < K), other=float("nan")).to(tl.float32)
    least = 0.0
    if SCORING == 0:
        own = tl.div_rn(tl.exp(own - largest), tl.sum(tl.exp(x - largest), 0))
    elif SCORING == 1:
        own = tl.exp(own - tl.max(tl.where(slot < K, own, float("-inf")), 0))
    else:
        own = sigmoid(own)
        least = 1e-20  # DeepSeek-V3's guard against a sum of zero
    own = tl.where(slot < K, own, 0.0)
    if NORMALISE or SCORING == 1:
        own = tl.div_rn(own, tl.sum(own, 0) + least)
    tl.store(weights + row * K + slot, (own * scaling).to(weights.dtype.element_ty), mask=slot < K)


def norm_route(
    residual: torch.Tensor,
    hidden: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    rule: RouterRule,
    correction_bias: torch.Tensor | None = None,
    forced_ids: torch.Tensor | None = None,
    weight_offset: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose experts for the norm of `residual += hidden`.

    Returns the norm [T, D], the weights [T, K] and the ids [T, K] int64.  Ids in `forced_ids` are not checked against
    E: a wrong one gives its row NaN for weights.
    """
    assert rule.scoring in SCORINGS and rule.num_experts % rule.num_groups == 0
    assert rule.top_k <= rule.num_experts // rule.num_groups * rule.top_groups
    normed_TD = add_rms_norm(residual, hidden, norm_weight, eps, weight_offset)
    num_tokens, device = normed_TD.shape[0], normed_TD.device
    weights_TK = torch.empty((num_tokens, rule.top_k), dtype=normed_TD.dtype, device=device)
    ids_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=device)
    if num_tokens == 0:
        return normed_TD, weights_TK, ids_TK
    logits_TE = router_logits(normed_TD, weight, bias, torch.float32 if rule.scoring == "sigmoid" else normed_TD.dtype)
    choose_kernel[(num_tokens,)](
        logits_TE,
        logits_TE if correction_bias is None else correction_bias,
        ids_TK if forced_ids is None else forced_ids.contiguous(),
        weights_TK,
        ids_TK,
        rule.scaling,
        E=rule.num_experts,
        K=rule.top_k,
        SCORING=SCORINGS[rule.scoring],
        NORMALISE=rule.normalise,
        CORRECTS=correction_bias is not None,
        FORCES=forced_ids is not None,
        NUM_GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        BLOCK_E=triton.next_power_of_2(rule.num_experts),
        BLOCK_G=triton.next_power_of_2(rule.num_groups),
        BLOCK_K=triton.next_power_of_2(rule.top_k),
        num_warps=_choose_warps(rule.num_experts),
        enable_fp_fusion=False,
    )
    return normed_TD, weights_TK, ids_TK


def router_logits(
    normed_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Compute logits [T, E] in float32, rounded once to `dtype`: the model's for a softmax, float32 for sigmoids."""
    num_tokens, depth = normed_TD.shape
    num_experts = weight_ED.shape[0]
    assert normed_TD.is_contiguous() and weight_ED.is_contiguous()
    logits_TE = torch.empty((num_tokens, num_experts), dtype=dtype, device=normed_TD.device)
    logits_kernel[(triton.cdiv(num_tokens, _TILE_T), triton.cdiv(num_experts, _TILE_E))](
        normed_TD,
        weight_ED,
        weight_ED if bias_E is None else bias_E,
        logits_TE,
        num_tokens,
        E=num_experts,
        D=depth,
        HAS_BIAS=bias_E is not None,
        TILE_T=_TILE_T,
        TILE_E=_TILE_E,
        TILE_D=_TILE_D,
        num_warps=_LOGITS_WARPS,
        num_stages=_LOGITS_STAGES,
        enable_fp_fusion=False,
    )
    return logits_TE


def _choose_warps(num_experts: int) -> int:
    return 1 if num_experts <= 256 else 2


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases for logits of bfloat16 and float32 models, and for choices of Qwen3, GPT-OSS and DeepSeek-V3."""
    cases = []
    tiles: dict[str, object] = {"HAS_BIAS": False, "TILE_T": _TILE_T, "TILE_E": _TILE_E, "TILE_D": _TILE_D}
    for dtype in ("bf16", "fp32"):
        signature = dict.fromkeys(("hidden", "weight", "bias", "logits"), f"*{dtype}") | {"num_tokens": "i32"}
        sizes: dict[str, object] = {"E": 128, "D": 2048}
        name = f"router logits {dtype}"
        cases.append((name, logits_kernel, signature, sizes | tiles, _LOGITS_WARPS, _LOGITS_STAGES))
    for scoring, experts, groups, top_groups, top_k in (
        ("softmax", 128, 1, 1, 8),
        ("softmax", 512, 1, 1, 10),
        ("softmax_of_chosen", 128, 1, 1, 4),
        ("sigmoid", 256, 8, 4, 8),
    ):
        is_sigmoid = scoring == "sigmoid"
        signature = {"logits": "*fp32" if is_sigmoid else "*bf16", "correction_bias": "*fp32", "forced_ids": "*i64"}
        signature |= {"weights": "*bf16", "ids": "*i64", "scaling": "fp32"}
        constants: dict[str, object] = {"E": experts, "K": top_k, "SCORING": SCORINGS[scoring], "NORMALISE": True}
        constants |= {"CORRECTS": is_sigmoid, "FORCES": True, "NUM_GROUPS": groups, "TOP_GROUPS": top_groups}
        constants |= {"BLOCK_E": experts, "BLOCK_G": groups, "BLOCK_K": triton.next_power_of_2(top_k)}
        name = f"router {scoring} E={experts} G={groups} K={top_k}"
        cases.append((name, choose_kernel, signature, constants, _choose_warps(experts), 3))
    return cases
