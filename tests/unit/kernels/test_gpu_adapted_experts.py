"""`adapted_experts` on a GPU, interpreted: against float64, with other bits than a token's own nowhere.

bfloat16 is left out: triton's interpreter computes it wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interpreted import kernels, mutated  # before any kernel

# isort: split
from triton.runtime import interpreter

from rollout.kernels.gpu.experts_lora import Adapters
from rollout.kernels.ops import RowMajorHeld
from rollout.kernels.row_places import ROW_FORMS
from tests.gpu_expert_cases import TOLERANCE, Case, draw, with_empty_slots
from tests.graph_stand_in import StandInGraphPool, launch
from tests.held_reference import held_of

adapted = kernels("adapted_experts")
fused = kernels("fused_experts")
lora = kernels("experts_lora")
experts_norm = kernels("experts_norm")
HALF, FLOAT = torch.float16, torch.float32


@dataclass(frozen=True)
class Adapted:
    """A case, and the adapters of its tokens: columns of A and rows of B that do not count are NaN."""

    case: Case
    adapters: Adapters

    def arguments(self) -> list[Any]:
        return [*self.case.arguments(), *self.adapters]

    def rows(self, index: torch.Tensor) -> Adapted:
        """Return the same for some of the tokens."""
        return Adapted(self.case.rows(index), self.adapters._replace(slots=self.adapters.slots[index]))

    def exact(self) -> torch.Tensor:
        """Compute the tokens of one adapter after the other in float64, with the sum of both matrices of an expert."""
        found = self.case.exact()
        for slot in range(self.adapters.ranks.shape[1]):
            mine = self.adapters.slots == slot
            if mine.any():
                found[mine] = replace(self.case.rows(mine), **self._sums(slot)).exact()
        return found

    def _sums(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the matrices of all experts, each with the product of an adapter."""
        _, a13, b13, a2, b2, ranks = self.adapters
        w13, w2, inner = self.case.w13.double(), self.case.w2.double(), self.case.inner_size
        for expert, (gate, up, down) in enumerate(ranks[:, slot].tolist()):
            for part, rank in enumerate((gate, up)):
                columns = slice(part * inner, (part + 1) * inner)
                a, b = a13[expert, slot, part, :, :rank], b13[expert, slot, :rank, columns]
                w13[expert, columns] += (a.double() @ b.double()).t()
            w2[expert] += (a2[expert, slot, :, :down].double() @ b2[expert, slot, :down].double()).t()
        return {"w13": w13, "w2": w2}

    def error(self, out: torch.Tensor) -> float:
        """Return the largest difference over the largest exact result; infinite where one is not a number."""
        exact = self.exact()
        assert out.shape == exact.shape and out.dtype == self.case.hidden.dtype
        return (out.double() - exact).abs().max().div(exact.abs().max()).nan_to_num(float("inf")).item()


def with_adapters(case: Case, ranks: Sequence[Sequence[int]]) -> Adapted:
    """Draw adapters with the ranks of gate, up and down in each slot; the last expert has another order of them.

    Tokens have all slots and none in turn.
    """
    (experts, hidden, inner), dtype, slots = case.w2.shape, case.hidden.dtype, len(ranks)
    generator = torch.Generator().manual_seed(7)
    ranks_PL3 = torch.tensor([list(each) for each in ranks]).repeat(experts, 1, 1)
    ranks_PL3[-1] = ranks_PL3[-1].roll(1, 1)
    most = int(ranks_PL3.max()) + 2

    def randn(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    a13 = randn(experts, slots, 2, hidden, most, scale=hidden**-0.5)
    b13 = randn(experts, slots, most, 2 * inner, scale=0.5)
    a2 = randn(experts, slots, inner, most, scale=inner**-0.5)
    b2 = randn(experts, slots, most, hidden, scale=0.5)
    for expert in range(experts):
        for slot, (gate, up, down) in enumerate(ranks_PL3[expert].tolist()):
            for part, rank in enumerate((gate, up)):
                a13[expert, slot, part, :, rank:] = torch.nan
                b13[expert, slot, rank:, part * inner : (part + 1) * inner] = torch.nan
            a2[expert, slot, :, down:] = torch.nan
            b2[expert, slot, down:] = torch.nan
    slots_T = torch.tensor([(token * 7) % (slots + 1) - 1 for token in range(case.hidden.shape[0])])
    return Adapted(case, Adapters(slots_T, a13, b13, a2, b2, ranks_PL3))


RANKS = ((4, 3, 5), (1, 0, 2))


def small(tokens: int, **others: Any) -> Case:
    return draw(tokens, **{"experts": 2, "hidden": 40, "inner": 24} | others)


CASES: dict[str, Callable[[torch.dtype], Adapted]] = {
    "weighted": lambda dtype: with_adapters(small(5, dtype=dtype), RANKS),
    "biases, clamps and empty slots": lambda dtype: with_adapters(
        with_empty_slots(small(5, dtype=dtype, clamped=True), (-1, 2, -7)), RANKS
    ),
    "odd sizes": lambda dtype: with_adapters(
        draw(3, top_k=3, dtype=dtype, hidden=37, inner=19, weighted=False), RANKS[:1]
    ),
    "tiles of ranks": lambda dtype: with_adapters(small(2, dtype=dtype), ((66, 70, 1),)),
    "splits of the depth": lambda dtype: with_adapters(small(2, dtype=dtype, hidden=520), RANKS[:1]),
    "many of one expert": lambda dtype: with_adapters(
        replace(small(20, top_k=1, dtype=dtype), ids=torch.ones(20, 1, dtype=torch.int64)), RANKS
    ),
}


GATE = ("weighted", "biases, clamps and empty slots", "splits of the depth")


def run(given: Adapted) -> torch.Tensor:
    return adapted.adapted_experts(*given.arguments())


def plan_all(patch: pytest.MonkeyPatch, tokens: int = 16) -> None:
    """Have few assignments planned, too, in blocks of `tokens`."""
    patch.setattr(fused, "few_assignments", lambda _: 0)
    choose = fused.choose_tiles
    patch.setattr(fused, "choose_tiles", lambda *load: choose(*load)._replace(tokens=tokens))


@pytest.mark.parametrize("dtype", [FLOAT, pytest.param(HALF, marks=pytest.mark.full)], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "name", [*GATE, *(pytest.param(name, marks=pytest.mark.full) for name in CASES if name not in GATE)]
)
def test_it_agrees_with_float64(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan changes no bit.  A row without an adapter has the bits of the plain kernels."""
    given = CASES[name](dtype)
    found = run(given)
    assert given.error(found) < TOLERANCE[dtype]
    none = given.adapters.slots < 0
    assert torch.equal(found[none], fused.fused_experts(*given.case.arguments())[none])
    plan_all(monkeypatch)
    assert torch.equal(run(given), found)


def test_blocks_of_several_tiles_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    given = CASES["many of one expert"](FLOAT)
    plan_all(monkeypatch, 32)
    assert given.error(run(given)) < TOLERANCE[FLOAT]


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    given = with_adapters(small(5), RANKS)
    whole = run(given)
    for index in (torch.tensor([4]), torch.tensor([3, 0])):
        assert torch.equal(run(given.rows(index)), whole[index])
    slots = given.adapters.slots.roll(1)
    slots[3] = given.adapters.slots[3]
    others = Adapted(given.case, given.adapters._replace(slots=slots))
    assert torch.equal(run(others)[3], whole[3])


@pytest.mark.parametrize("form", ROW_FORMS)
def test_weights_in_fewer_bits_have_the_same_products(form: str) -> None:
    case = draw(2, dtype=HALF, experts=2, hidden=200, inner=136)
    storage, (experts, hidden, inner) = RowMajorHeld(form, HALF, "cpu"), case.w2.shape
    w13, w2 = storage.empty_experts(experts, inner, hidden, HALF, "cpu")
    whole = {"gate_proj": case.w13[:, :inner], "up_proj": case.w13[:, inner:], "down_proj": case.w2}
    for part, matrices in whole.items():
        for expert, matrix in enumerate(matrices):
            storage.expert_place(w13, w2, part, expert, inner, hidden).write(matrix)  # type: ignore[arg-type]
    held = {part: held_of(form, matrices) for part, matrices in whole.items()}
    values = replace(case, w13=torch.cat([held["gate_proj"], held["up_proj"]], 1), w2=held["down_proj"])
    given = with_adapters(values, RANKS[:1])
    found = run(Adapted(replace(case, w13=w13, w2=w2), given.adapters))
    assert given.error(found) < TOLERANCE[HALF]


def test_the_sum_can_be_left_to_the_norm() -> None:
    given = CASES["biases, clamps and empty slots"](FLOAT)
    residual = torch.randn(5, 40, generator=torch.Generator().manual_seed(5))
    summed = residual + run(given)
    experts_norm.experts_norm(residual, adapted.adapted_outputs(*given.arguments()), torch.ones(40), 1e-6)
    assert torch.equal(residual, summed)


def test_no_tokens_take_no_launch() -> None:
    given = CASES["weighted"](FLOAT).rows(torch.arange(0))
    assert run(given).shape == (0, 40)


@pytest.mark.parametrize("tokens", [1, 40])
def test_four_launches_more_and_no_value_is_read_by_the_host(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors have no values: reading a value, or a count that depends on values, is an error."""
    given, names = with_adapters(draw(tokens, dtype=torch.bfloat16), RANKS), []

    class NotRun:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert all(isinstance(size, int) and size > 0 for size in grid)
            return lambda *_, **__: names.append(self._name)

    for module, of_module in (
        (lora, ("experts_shrink_kernel", "experts_expand_kernel")),
        (fused.kernels, ("plan_kernel", "gate_up_kernel", "down_kernel", "weighted_sum_kernel")),
    ):
        for name in of_module:
            monkeypatch.setattr(module, name, NotRun(name))
    arguments = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in given.arguments()]
    assert adapted.adapted_experts(*arguments).shape == (tokens, 72)
    products = ["experts_shrink_kernel", "experts_expand_kernel"]
    plan = ["plan_kernel"] if tokens > 32 else []
    assert names == [*plan, *products, "gate_up_kernel", "down_kernel", *products, "weighted_sum_kernel"]


@pytest.mark.parametrize("planned", [False, True])
def test_one_recording_holds_for_all_adapters(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other adapters, slots, ranks and routes come into the same memory: a replay is the call that is made with them.

    The graph's own memory holds garbage in between.
    """
    if planned:
        plan_all(monkeypatch)
    compute = interpreter.GridExecutor.__call__

    def kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(lambda: compute(self, *args, **kwargs), self.fn.__name__)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", kernel)
    given, out = with_adapters(small(4), RANKS), torch.empty(4, 40)
    pool = StandInGraphPool()

    def step() -> None:
        out.copy_(run(given))

    replay = pool.capture(step)
    assert pool.recordings[0].count("experts_shrink_kernel") == pool.recordings[0].count("experts_expand_kernel") == 2
    later = with_adapters(small(4, seed=5), RANKS[::-1])
    later.case.ids[1, 0] = -1
    later.adapters.slots.copy_(torch.tensor([1, 1, -1, 0]))
    wanted = run(later)
    for place, content in zip(given.arguments(), later.arguments(), strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(content)
    replay()
    assert torch.equal(out, wanted) and not torch.equal(wanted, run(with_adapters(small(4), RANKS)))


# Wrong kernels.

WRONG: dict[str, tuple[str, str, str]] = {
    "another slot's A": ("weighted", "a_ptr + (adapter * Q + part)", "a_ptr + ((adapter ^ 1) * Q + part)"),
    "another expert's B": ("weighted", "matrix = b_ptr + adapter * (R * O)", "matrix = b_ptr + slot * (R * O)"),
    "a rank too many": ("weighted", " + part)\n            matrix", " + part) + 1\n            matrix"),
    "a rank too few": ("weighted", "(rank < count)[None, :]", "(rank < count - 1)[None, :]"),
    "gate's A for up": ("weighted", "tl.program_id(1) % Q, tl.program_id(1) // Q", "0, tl.program_id(1) // Q"),
    "gate's rank for up": ("weighted", " + part)\n            matrix", ")\n            matrix"),
    "neighbours' adapters": ("many of one expert", "own = tl.where(has_it[None, :], product, own)", "own = product"),
    "one split of several": ("splits of the depth", "in tl.static_range(N)", "in tl.static_range(1)"),
    "another output": ("weighted", "assignments.to(tl.int64) if ADDS else places", "places if ADDS else assignments"),
    "the output is not read": ("weighted", "own += tl.load(out_ptrs,", "own += 0.0 * tl.load(out_ptrs,"),
    "a row of another token": ("weighted", "rows = places if BY_PLACE else tokens", "rows = places"),
    "the first tile of a block": ("many of one expert", "mask=is_filled, other=0) + first", "mask=is_filled, other=0)"),
}  # fmt: skip


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, *change = WRONG[name]
    plan_all(monkeypatch, 32)
    monkeypatch.setattr(adapted, "Adapters", mutated(lora, tmp_path, (change[0], change[1])).Adapters)
    given = CASES[case](FLOAT)
    assert not given.error(run(given)) < TOLERANCE[FLOAT]


OF_SUMS: dict[str, tuple[str, str]] = {
    "gate and up exchanged": ("delta_ptrs + I, mask=adapted", "delta_ptrs, mask=adapted"),
    "another token's slot": ("tl.load(slots_ptr + token)", "tl.load(slots_ptr + token * 0)"),
}  # fmt: skip


@pytest.mark.mutant
@pytest.mark.parametrize("name", OF_SUMS)
def test_wrong_sums_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = CASES["weighted"](FLOAT)
    monkeypatch.setattr(fused, "kernels", mutated(fused.kernels, tmp_path, OF_SUMS[name]))
    assert not given.error(run(given)) < TOLERANCE[FLOAT]
