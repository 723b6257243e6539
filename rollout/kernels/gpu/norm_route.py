"""`norm_route`: the router of an MoE layer as two Triton kernels.

    add_rms_norm -> logits [T, E] -> the best K of each row, or the given ones, and their weights

The second kernel has a program for 16 rows and 32 experts.  Programs count on the device as they write their logits,
and the last one of a tile of rows chooses for these rows.  The norm sets the counts to zero, so that a replay of a
graph needs no other launch.

A row's experts depend on that row alone.  Logits are sums over D in one order, in tiles of one shape for every number
of tokens; a library's matrix product takes other tiles for another number.  Tiles of the choice have one shape, too.
On an H100 a tensor core adds in one order wherever in the tile a row stands (`tests/gpu`).  Of equal scores the lower
id comes first, as in the compiled CPU router.  A NaN counts as the least.  The K ids are distinct for any scores.

Shapes: T tokens, D hidden, E logical experts, K top-k, G groups of experts, R rows that are chosen for at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu.add_rms_norm import normed_rows
from rollout.kernels.gpu.launch_options import launch_options
from rollout.kernels.gpu.predecessor import wait_for_predecessor
from rollout.kernels.gpu.sigmoid_gate import sigmoid
from rollout.kernels.operators.norm_route import RouterRule

_TILE_T, _TILE_E, _TILE_D = 16, 32, 128
_WARPS, _STAGES = 4, 4
_CHOICES = 4096  # scores that a program ranks at once: 32 of a thread
SCORINGS = {"softmax": 0, "softmax_of_chosen": 1, "sigmoid": 2}


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    hidden,
    weight,
    bias,
    correction_bias,
    forced_ids,
    logits,
    counts,
    weights,
    ids,
    num_tokens,
    scaling,
    E: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,  # the numbers of SCORINGS
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CORRECTS: tl.constexpr,
    FORCES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a tile of `logits` [T, E]; in the last program of a tile of rows also their `weights` and `ids` [T, K].

    `counts`: zero for each tile of rows.
    """
    wait_for_predecessor()
    first_row = tl.program_id(0).to(tl.int64) * TILE_T
    store_logits(hidden, weight, bias, logits, first_row, num_tokens, E, D, HAS_BIAS, TILE_T, TILE_E, TILE_D)
    tl.debug_barrier()  # the release below covers the stores of all threads
    before = tl.atomic_add(counts + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
    if before + 1 == tl.num_programs(1):
        tl.debug_barrier()
        for row in range(first_row, tl.minimum(first_row + TILE_T, num_tokens), ROWS):
            choose(
                logits, correction_bias, forced_ids, weights, ids, row, num_tokens, scaling, E, K, SCORING, NORMALISE,
                CORRECTS, FORCES, NUM_GROUPS, TOP_GROUPS, ROWS, BLOCK_E, BLOCK_G, BLOCK_K
            )  # fmt: skip


@triton.jit
def store_logits(
    hidden,
    weight,
    bias,
    logits,
    first_row,
    num_tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_D: tl.constexpr,
):
    token = first_row + tl.arange(0, TILE_T)
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
    """Return the place of each row's largest of the free `values`, of equal ones the lowest.

    At least one place of a row is free.  `at` [1, SIZE] are the places.
    """
    largest = tl.max(tl.where(free, values, float("-inf")), 1)
    return tl.min(tl.where(free & (values == largest[:, None]), at, SIZE), 1)


@triton.jit
def of_best_groups(
    choices,
    expert,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Replace `choices` outside of the best groups by -inf; a group counts as much as its two best choices together."""
    group = tl.arange(0, BLOCK_G)[None, :]
    totals = tl.full((ROWS, BLOCK_G), float("-inf"), tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        mine = expert // GROUP_SIZE == g
        first = best_of(choices, mine, expert, BLOCK_E)
        rest = mine & (expert != first[:, None])
        total = tl.max(tl.where(mine, choices, float("-inf")), 1)
        if GROUP_SIZE > 1:
            total += tl.max(tl.where(rest, choices, float("-inf")), 1)
        totals = tl.where(group == g, total[:, None], totals)
    free = group < NUM_GROUPS
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        g = best_of(totals, free, group, BLOCK_G)
        free = free & (group != g[:, None])
        kept = kept | (expert // GROUP_SIZE == g[:, None])
    return tl.where(kept, choices, float("-inf"))


@triton.jit
def choose(
    logits,
    correction_bias,
    forced_ids,
    weights,
    ids,
    first_row,
    num_tokens,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTS: tl.constexpr,
    FORCES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose for rows `first_row ..` of logits that other programs have written: loads pass by the first cache.

    Beyond the edge the last row is chosen for once more, and not stored.
    """
    place = first_row + tl.arange(0, ROWS)[:, None]
    row = tl.minimum(place, num_tokens - 1)
    expert = tl.arange(0, BLOCK_E)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    stored = (place < num_tokens) & (slot < K)
    x = tl.load(logits + row * E + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    choices = x
    if SCORING == 2:
        choices = sigmoid(x)
        if CORRECTS:
            choices += tl.load(correction_bias + expert, mask=expert < E, other=0.0)
    choices = tl.where((expert < E) & (choices == choices), choices, float("-inf"))
    largest = tl.max(choices, 1)[:, None]
    if NUM_GROUPS > 1:
        choices = of_best_groups(choices, expert, E // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, ROWS, BLOCK_E, BLOCK_G)
    chosen = tl.zeros((ROWS, BLOCK_K), tl.int64)
    free = tl.broadcast_to(expert < E, (ROWS, BLOCK_E))
    for k in range(K):
        best = best_of(choices, free, expert, BLOCK_E)[:, None]
        free = free & (expert != best)
        chosen = tl.where(slot == k, best.to(tl.int64), chosen)
    if FORCES:
        given = tl.load(forced_ids + row * K + slot, mask=slot < K, other=0)
        chosen = tl.where(tl.load(forced_ids + row * K) >= 0, given, chosen)
    tl.store(ids + row * K + slot, chosen, mask=stored)

    # An id without an expert has no logit: its weight is NaN.
    known = (slot < K) & (chosen >= 0) & (chosen < E)
    own = tl.load(logits + row * E + chosen, mask=known, other=float("nan"), cache_modifier=".cg").to(tl.float32)
    least = 0.0
    if SCORING == 0:
        own = tl.div_rn(tl.exp(own - largest), tl.sum(tl.exp(x - largest), 1)[:, None])
    elif SCORING == 1:
        own = tl.exp(own - tl.max(tl.where(slot < K, own, float("-inf")), 1)[:, None])
    else:
        own = sigmoid(own)
        least = 1e-20  # DeepSeek-V3's guard against a sum of zero
    own = tl.where(slot < K, own, 0.0)
    if NORMALISE or SCORING == 1:
        own = tl.div_rn(own, tl.sum(own, 1)[:, None] + least)
    tl.store(weights + row * K + slot, (own * scaling).to(weights.dtype.element_ty), mask=stored)


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
    assert weight.is_contiguous()
    num_tokens, device = residual.shape[0], residual.device
    counts_T = torch.empty(num_tokens, dtype=torch.int32, device=device)
    normed_TD = normed_rows(residual, hidden, norm_weight, eps, weight_offset, cleared=counts_T)
    weights_TK = torch.empty((num_tokens, rule.top_k), dtype=normed_TD.dtype, device=device)
    ids_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=device)
    if num_tokens == 0:
        return normed_TD, weights_TK, ids_TK
    # Logits are rounded once: to the model's dtype for a softmax, to float32 for sigmoids.
    dtype = torch.float32 if rule.scoring == "sigmoid" else normed_TD.dtype
    logits_TE = torch.empty((num_tokens, rule.num_experts), dtype=dtype, device=device)
    route_kernel[(triton.cdiv(num_tokens, _TILE_T), triton.cdiv(rule.num_experts, _TILE_E))](
        normed_TD,
        weight,
        weight if bias is None else bias,
        logits_TE if correction_bias is None else correction_bias,
        ids_TK if forced_ids is None else forced_ids.contiguous(),
        logits_TE,
        counts_T,
        weights_TK,
        ids_TK,
        num_tokens,
        rule.scaling,
        D=normed_TD.shape[1],
        HAS_BIAS=bias is not None,
        CORRECTS=correction_bias is not None,
        FORCES=forced_ids is not None,
        **_constants(rule),
        num_warps=_WARPS,
        num_stages=_STAGES,
        enable_fp_fusion=False,
        **launch_options(normed_TD),
    )
    return normed_TD, weights_TK, ids_TK


def _constants(rule: RouterRule) -> dict[str, object]:
    block = triton.next_power_of_2(rule.num_experts)
    return {
        "E": rule.num_experts,
        "K": rule.top_k,
        "SCORING": SCORINGS[rule.scoring],
        "NORMALISE": rule.normalise,
        "NUM_GROUPS": rule.num_groups,
        "TOP_GROUPS": rule.top_groups,
        "TILE_T": _TILE_T,
        "TILE_E": _TILE_E,
        "TILE_D": _TILE_D,
        "ROWS": max(min(_TILE_T, _CHOICES // block), 1),
        "BLOCK_E": block,
        "BLOCK_G": triton.next_power_of_2(rule.num_groups),
        "BLOCK_K": triton.next_power_of_2(rule.top_k),
    }


def compile_cases() -> list[tuple[Any, ...]]:
    """Return cases of Qwen3 in bfloat16 and float32, Qwen3-Next, GPT-OSS and DeepSeek-V3."""
    cases = []
    for dtype, rule, depth in (
        ("bf16", RouterRule(128, 8), 2048),
        ("fp32", RouterRule(128, 8), 2048),
        ("bf16", RouterRule(512, 10), 2048),
        ("bf16", RouterRule(128, 4, scoring="softmax_of_chosen"), 2880),
        ("bf16", RouterRule(256, 8, scoring="sigmoid", num_groups=8, top_groups=4), 7168),
    ):
        is_sigmoid = rule.scoring == "sigmoid"
        signature = dict.fromkeys(("hidden", "weight", "bias", "logits", "weights"), f"*{dtype}")
        signature |= {"logits": "*fp32" if is_sigmoid else f"*{dtype}", "correction_bias": "*fp32"}
        signature |= {"forced_ids": "*i64", "ids": "*i64", "counts": "*i32", "num_tokens": "i32", "scaling": "fp32"}
        flags = {"HAS_BIAS": rule.scoring == "softmax_of_chosen", "CORRECTS": is_sigmoid, "FORCES": True}
        constants = {"D": depth} | flags | _constants(rule)
        name = f"router {rule.scoring} {dtype} E={rule.num_experts} G={rule.num_groups} K={rule.top_k}"
        cases.append((name, route_kernel, signature, constants, _WARPS, _STAGES))
    return cases
