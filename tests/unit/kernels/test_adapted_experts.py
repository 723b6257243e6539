"""`adapted_experts` for rows without an adapter, for every form of held weights, and for wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.kernels.held_places import HELD_FORMS
from rollout.kernels.ops import Ops, PackedHeld, compiled_ops, plain_ops
from tests.kernels import error, expert_weights, native_ops
from tests.operators import D, E, K, copies, rand
from tests.operators.adapted_experts import INNER, RANKS, R, S, adapted

ROWS = 300
ADAPTERS = ("a13", "b13", "a2", "b2", "ranks")
FORMS = ("plain", *HELD_FORMS)


@pytest.fixture(scope="module")
def native() -> Ops:
    return native_ops()


def given(dtype: torch.dtype, rows: int = ROWS, **others: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    routed = {
        "hidden": rand(rows, D),
        "ids": torch.rand(rows, E, generator=generator).argsort(dim=1)[:, :K],
        "weights": rand(rows, K).abs(),
        "slots": torch.randint(-1, S, (rows,), generator=generator),
    }
    return copies(adapted(**others) | routed, dtype)


def base(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in (*ADAPTERS, "slots")}


def without_adapters_keep_their_bits(ops: Ops, arguments: dict[str, Any]) -> bool:
    plain = arguments["slots"] < 0
    got, want = ops.adapted_experts(**arguments), ops.fused_experts(**base(arguments))
    assert plain.any() and not torch.equal(got[~plain], want[~plain])
    return torch.equal(got[plain], want[plain])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "others", [{}, {"w13_bias": rand(E, 2 * INNER), "limit": 1.0, "alpha": 1.7}], ids=["", "clamped"]
)
def test_every_held_form_takes_the_products_of_adapters(native: Ops, form: str, others: dict[str, Any]) -> None:
    """The reference computes with the values that are held, in float64."""
    ops = compiled_ops(PackedHeld(form)) if form != "plain" else native
    arguments = given(torch.bfloat16, **others)
    held = expert_weights(ops, arguments["w13"], arguments["w2"])[:2]
    w13, w2 = (torch.empty_like(arguments[name]) for name in ("w13", "w2"))
    for expert in range(E):
        gate, up, down = (
            ops.storage.expert_place(*held, part, expert, INNER, D).read()  # type: ignore[arg-type]
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        w13[expert], w2[expert] = torch.cat((gate, up)), down
    stored = arguments | {"w13": held[0], "w2": held[1]}
    assert without_adapters_keep_their_bits(ops, stored)
    right = plain_ops().adapted_experts(**copies(arguments | {"w13": w13, "w2": w2}, torch.float64))
    assert error(ops.adapted_experts(**stored), right) < 0.01, "bfloat16, and sums in it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_plain_rows_without_adapters_keep_their_bits(dtype: torch.dtype) -> None:
    assert without_adapters_keep_their_bits(plain_ops(), given(dtype))


@pytest.mark.mutant
def test_a_rank_too_many_and_an_adapter_of_another_slot_are_noticed(native: Ops) -> None:
    arguments = given(torch.float32)
    w13, w2, _ = expert_weights(native, arguments["w13"], arguments["w2"])
    right = plain_ops().adapted_experts(**copies(arguments, torch.float64))
    stored = arguments | {"w13": w13, "w2": w2}
    assert error(native.adapted_experts(**stored), right) < 1e-5
    for wrong in ({"ranks": (stored["ranks"] + 1).clamp(max=R)}, {"slots": (stored["slots"] + 2) % (S + 1) - 1}):
        assert error(native.adapted_experts(**stored | wrong), right) > 1e-3


def test_wrong_arguments_are_refused(native: Ops) -> None:
    arguments = given(torch.float32, rows=4)
    w13, w2, _ = expert_weights(native, arguments["w13"], arguments["w2"])
    stored = arguments | {"w13": w13, "w2": w2}
    wrong: dict[str, Any] = {
        "there is no adapter slot 3": {"slots": torch.tensor([0, 3, 0, 0])},
        "a rank is over": {"ranks": stored["ranks"] + R},
        "a2 must be": {"a2": stored["a2"][:, :, :, :4]},
        "slots must be": {"slots": torch.tensor([0])},
    }
    for message, changes in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            native.adapted_experts(**stored | changes)
    assert RANKS.max() == R
