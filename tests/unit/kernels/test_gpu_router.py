"""The router of the GPU path, interpreted on the CPU.

Judged by plain torch in float64, and by the compiled CPU router, whose order of ties it must follow.

Shapes: T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.core.specs.layer_specs import RouterSpec
from rollout.kernels.operators.norm_route import RouterRule
from rollout.kernels.ops import plain_ops
from tests.family_zoo import family_config, with_experts
from tests.interpreted import kernels, mutated
from tests.kernels import error, matrix, native_ops

router, plain = kernels("norm_route"), plain_ops()
SPECS = {
    "softmax": RouterSpec(num_experts=12, top_k=3),
    "not normalised": RouterSpec(num_experts=12, top_k=3, normalise=False, scaling=1.5),
    "of the chosen": RouterSpec(num_experts=9, top_k=4, scoring="softmax_of_chosen", bias=True),
    "sigmoid": RouterSpec(num_experts=8, top_k=2, scoring="sigmoid", correction_bias=True, scaling=2.5),
    "sigmoid alone": RouterSpec(num_experts=8, top_k=3, scoring="sigmoid", normalise=False),
    "groups": RouterSpec(
        num_experts=24, top_k=5, scoring="sigmoid", correction_bias=True, num_groups=6, top_groups=2, scaling=2.5
    ),
    "groups of one": RouterSpec(num_experts=6, top_k=2, scoring="sigmoid", num_groups=6, top_groups=3),
    "every expert": RouterSpec(num_experts=5, top_k=5),
}
ALL = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def _randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Inputs of a layer; `route` calls an implementation with copies of them, or of some of their rows."""

    def __init__(self, spec: RouterSpec, tokens: int = 4, depth: int = 40, dtype: torch.dtype = torch.float32) -> None:
        self.spec, self.eps = spec, 1e-6
        self.residual, self.hidden = (_randn(tokens, depth, seed=i, dtype=dtype) for i in range(2))
        self.norm = _randn(depth, seed=2, dtype=dtype)
        self.weight = _randn(spec.num_experts, depth, seed=3, dtype=dtype) / 2
        self.bias = _randn(spec.num_experts, seed=4, dtype=dtype) if spec.bias else None
        self.correction = 0.3 * _randn(spec.num_experts, seed=5) if spec.correction_bias else None

    def route(
        self,
        norm_route: Any,
        forced: torch.Tensor | None = None,
        rows: torch.Tensor | slice = slice(None),
        dtype: torch.dtype | None = None,
        weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Call `norm_route` with the inputs, or with some of their rows.

        `dtype` is the dtype of the floating-point arguments, and `weight` the matrix as the implementation stores it.
        """
        dtype, spec = dtype or self.weight.dtype, self.spec
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        best = (spec.num_experts, spec.top_k, spec.normalise, spec.scoring, spec.scaling)
        return norm_route(
            self.residual[rows].to(dtype, copy=True),
            self.hidden[rows].to(dtype),
            self.norm.to(dtype),
            self.eps,
            self.weight.to(dtype) if weight is None else weight,
            RouterRule(*best, spec.num_groups, spec.top_groups),
            None if self.correction is None else self.correction.to(wide),
            forced,
            None,
            None if self.bias is None else self.bias.to(dtype),
        )


def complaint(norm_route: Any, case: Case, forced: torch.Tensor | None = None) -> str:
    """Return how its float32 results differ from plain torch in float64; "" if they agree."""
    normed, weights, ids = case.route(norm_route, forced)
    exact_normed, exact_weights, exact_ids = case.route(plain.norm_route, forced, dtype=torch.float64)
    if ids.dtype != torch.int64 or not torch.equal(ids, exact_ids):
        return f"ids {ids.tolist()}, not {exact_ids.tolist()}"
    if error(normed, exact_normed) > 1e-6:
        return "the norm"
    return "" if error(weights, exact_weights) < 2e-6 else f"weights are off by {error(weights, exact_weights)}"


def _forced(spec: RouterSpec, tokens: int) -> torch.Tensor:
    """Return forced ids [tokens, top_k]: random ones for every third row, and -1 for the rows that choose freely."""
    forced = torch.full((tokens, spec.top_k), -1)
    for row in range(0, tokens, 3):
        order = torch.randperm(spec.num_experts, generator=torch.Generator().manual_seed(row))
        forced[row] = order[: spec.top_k]
    return forced


@ALL
def test_chosen_experts_and_weights_agree_with_plain_torch(spec: RouterSpec) -> None:
    case = Case(spec)
    assert not complaint(router.norm_route, case)
    assert not complaint(router.norm_route, case, _forced(spec, 4))


@pytest.mark.full(but="17-130")
@pytest.mark.parametrize(("tokens", "depth"), [(1, 1), (17, 130), (16, 128), (33, 257)])
def test_sizes_that_do_not_fit_the_tiles(tokens: int, depth: int) -> None:
    """Tiles are of 16 tokens, 32 experts and 128 features."""
    assert not complaint(router.norm_route, Case(RouterSpec(num_experts=35, top_k=4), tokens, depth))


@pytest.mark.parametrize("spec", [RouterSpec(num_experts=300, top_k=10), SPECS["groups"]], ids=["experts", "groups"])
def test_rows_are_chosen_for_in_several_turns(spec: RouterSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 experts a program ranks eight rows at once; here also a single one of few experts."""
    if spec.num_experts < 300:
        monkeypatch.setattr(router, "_CHOICES", 1)
    assert not complaint(router.norm_route, Case(spec, tokens=18), _forced(spec, 18))


def _poisoned(*shape: Any, **settings: Any) -> torch.Tensor:
    """Make memory that held other numbers, in place of `torch.empty`."""
    return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, 77, **settings)


def order_complaint(norm_route: Any) -> str:
    """Return how the last program of a tile fails, in memory that held other numbers; "" if it chooses rightly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned)
        return complaint(norm_route, Case(RouterSpec(num_experts=67, top_k=4), tokens=17))


def test_the_last_program_of_a_tile_chooses() -> None:
    assert not order_complaint(router.norm_route)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("before + 1 == tl.num_programs(1)", "before == 0"),
        ("before + 1 == tl.num_programs(1)", "before == tl.num_programs(1)"),
        ("cleared=counts_T", "cleared=None"),
        ("tl.atomic_add(counts + tl.program_id(0), 1", "tl.atomic_add(counts, 1"),
    ],
)
def test_programs_that_choose_at_a_wrong_time_are_caught(old: str, new: str, tmp_path: Path) -> None:
    assert order_complaint(mutated(router, tmp_path, (old, new)).norm_route)


@pytest.mark.full
@pytest.mark.parametrize("name", with_experts())
def test_the_router_of_every_family(name: str) -> None:
    config = family_config(name)
    assert config.moe is not None
    case = Case(config.moe.router, depth=config.hidden_size)
    assert not complaint(router.norm_route, case)
    assert not complaint(router.norm_route, case, _forced(case.spec, 4))


@pytest.mark.full(but="sigmoid")
@ALL
def test_half_precision_rounds_where_plain_torch_does(spec: RouterSpec) -> None:
    """Logits of a softmax are rounded to the model's dtype, logits of sigmoids not at all."""
    case = Case(spec, tokens=16, dtype=torch.float16)
    ours, theirs = case.route(router.norm_route), case.route(plain.norm_route)
    assert torch.equal(ours[2], theirs[2])
    eps = torch.finfo(torch.float16).eps
    torch.testing.assert_close(ours[1], theirs[1], rtol=4 * eps, atol=eps)


def _tied(spec: RouterSpec) -> Case:
    """Return inputs whose logits mostly occur four times, twice next to one another.

    All sums are of small multiples of 1/8: exact in any order, as the interpreter's product is a library's.
    """
    case = Case(spec, tokens=6)
    case.eps = 0.0
    case.residual, case.norm = case.residual.sign(), torch.ones_like(case.norm)
    case.hidden = torch.zeros_like(case.hidden)
    twins = torch.arange(spec.num_experts) // 2 % -(-spec.num_experts // 3)
    case.weight = (8 * case.weight[twins]).round() / 8
    for name in ("bias", "correction"):
        values = getattr(case, name)
        setattr(case, name, None if values is None else (8 * values[twins]).round() / 8)
    return case


def tie_complaint(norm_route: Any, case: Case) -> str:
    """Return how the result differs from the compiled CPU router in float32; "" if it agrees."""
    native = native_ops()
    ours, cpu = case.route(norm_route), case.route(native.norm_route, weight=matrix(native, case.weight))
    if not torch.equal(ours[2], cpu[2]):
        return f"ids {ours[2].tolist()}, not {cpu[2].tolist()}"
    return "" if error(ours[1], cpu[1].double()) < 2e-6 else "weights"


@ALL
def test_the_order_of_ties_is_that_of_the_cpu(spec: RouterSpec) -> None:
    case = _tied(spec)
    assert not tie_complaint(router.norm_route, case)
    case.weight.zero_()
    assert not tie_complaint(router.norm_route, case)
    if case.bias is None and case.correction is None:
        assert (case.route(router.norm_route)[2] == torch.arange(spec.top_k)).all()


def test_a_nan_is_never_chosen_over_a_number_and_ids_are_distinct() -> None:
    for spec in (SPECS["softmax"], SPECS["groups"], SPECS["every expert"]):
        case = Case(spec)
        case.weight[1] = torch.nan
        ids = case.route(router.norm_route)[2]
        if spec.num_groups == 1 and spec.top_k < spec.num_experts:
            assert not (ids == 1).any()
        case.hidden[2] = torch.nan
        for row in case.route(router.norm_route)[2].tolist():
            assert len(set(row)) == spec.top_k and set(row) <= set(range(spec.num_experts))


def test_ids_are_experts_whatever_the_numbers_are() -> None:
    """A placement looks ids up without a check, and on a device an id beyond its table ends the process."""
    for spec in (SPECS["softmax"], SPECS["groups"]):
        case = Case(spec)
        case.hidden[0], case.hidden[1, 0], case.hidden[2] = torch.nan, torch.inf, -torch.inf
        case.weight[2], case.weight[3] = -torch.inf, torch.nan
        if case.correction is not None:  # a group of both infinities counts as NaN
            case.correction[::2], case.correction[1::2] = torch.inf, -torch.inf
        ids = case.route(router.norm_route)[2]
        mirrored = ExpertLocationMetadata(torch.arange(spec.num_experts - 1, -1, -1)[None], spec.num_experts)
        slots = ExpertPlacement(mirrored).logical_to_physical(0, ids)
        assert torch.equal(slots, spec.num_experts - 1 - ids)


def test_a_forced_id_that_is_no_experts_gives_nan() -> None:
    case = Case(SPECS["softmax"])
    forced = torch.full((4, 3), -1)
    forced[2], forced[3] = torch.tensor([0, 12, 3]), torch.tensor([5, 1, 2])
    weights = case.route(router.norm_route, forced)[1]
    assert weights.isnan().any(1).tolist() == [False, False, True, False]


def test_the_router_takes_an_empty_batch() -> None:
    normed, weights, ids = Case(SPECS["groups"], tokens=0).route(router.norm_route)
    assert normed.shape == (0, 40) and weights.shape == ids.shape == (0, 5)


def _product_in_order(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    sums = np.zeros((a.shape[0], b.shape[1]), dtype)
    for k in range(a.shape[1]):
        sums += a[:, k : k + 1].astype(dtype) * b[k].astype(dtype)
    return sums


@pytest.mark.full
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_rows_do_not_depend_on_one_another(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 18 rows a row is computed in a whole tile, in a part of one, and alone.

    The interpreter's product of tiles is a library's, whose order of sums depends on a row's place in the tile; a
    tensor core's order is taken not to.
    """
    monkeypatch.setattr(np, "matmul", _product_in_order)
    assert _is_independent(router.norm_route, SPECS[name])


def _is_independent(norm_route: Any, spec: RouterSpec) -> bool:
    case = Case(spec, tokens=18, depth=200)
    whole = case.route(norm_route)
    for rows in ([17], [16, 3], [0], [9, 8, 7, 6]):
        part = case.route(norm_route, rows=torch.tensor(rows))
        if not all(torch.equal(a, b[rows]) for a, b in zip(part, whole)):
            return False
    return True


@pytest.mark.mutant
def test_tiles_that_depend_on_the_batch_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", _product_in_order)
    change = ("**_constants(rule),", "**_constants(rule) | {'TILE_D': 128 if num_tokens > 2 else 64},")
    wrong = mutated(router, tmp_path, change)
    assert not _is_independent(wrong.norm_route, SPECS["softmax"])


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("softmax", "tl.min(tl.where(free & (values == largest[:, None]), at, SIZE), 1)", "tl.argmax(values, 1)"),
        ("softmax", "(values == largest[:, None]), at, SIZE)", "(values == largest[:, None]), -at, SIZE) * -1"),
        ("softmax", "free = free & (expert != best)", "free = free & (expert < best)"),
        ("not normalised", "tl.exp(own - largest)", "tl.exp(own)"),
        ("softmax", "own = tl.div_rn(own, tl.sum(own, 1)[:, None] + least)", "own = own"),
        ("softmax", "tl.load(forced_ids + row * K) >= 0", "tl.load(forced_ids + row * K) > 0"),
        ("softmax", "sums = tl.dot(x, w, sums", "sums = tl.dot(x, w, 0 * sums"),
        ("not normalised", "(own * scaling)", "own"),
        ("of the chosen", "sums += tl.load(bias", "sums += 0 * tl.load(bias"),
        ("of the chosen", "if NORMALISE or SCORING == 1:", "if False:"),
        ("sigmoid", "choices += tl.load(correction_bias", "choices += 0 * tl.load(correction_bias"),
        ("sigmoid", "own = sigmoid(own)", "own = sigmoid(own) + 0.1"),
        ("groups", "if NUM_GROUPS > 1:", "if False:"),
        ("groups", "if GROUP_SIZE > 1:", "if False:"),
        ("groups", "kept = kept | (", "kept = (kept & False) | ("),
    ],
)  # fmt: skip
def test_wrong_routers_are_caught(name: str, old: str, new: str, tmp_path: Path) -> None:
    wrong = mutated(router, tmp_path, (old, new)).norm_route
    spec = SPECS[name]
    case = Case(spec, tokens=8, depth=200)
    forced = _forced(spec, 8)
    forced[0] = (torch.arange(spec.top_k) + spec.num_experts // 2) % spec.num_experts
    forced[3] = torch.arange(spec.top_k)
    assert complaint(wrong, case, forced) or complaint(wrong, case) or tie_complaint(wrong, _tied(spec))
