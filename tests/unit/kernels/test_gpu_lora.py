"""`add_lora` on a GPU, interpreted: against float64, with other bits than a token's own nowhere.

bfloat16 is left out: triton's interpreter computes it wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.kernels.ops import plain_ops
from tests.interpreted import kernels, mutated
from tests.kernels import error

lora = kernels("add_lora")
plain = plain_ops()
# Features, columns of the parts, ranks of each slot's parts: one split and several, one tile of ranks and two.
CASES: dict[str, tuple[int, list[int], list[list[int]]]] = {
    "one part": (40, [0, 70], [[8], [1], [5]]),
    "parts with odd borders": (40, [0, 66, 67, 90], [[8, 0, 3], [1, 16, 16], [0, 0, 2]]),
    "splits of the features": (1100, [0, 30], [[4], [16]]),
    "tiles of ranks": (70, [0, 20, 40], [[80, 64], [65, 1]]),
}
TOKENS = 21


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a step of `TOKENS` tokens, among them tokens of all slots and of none.  Ranks that count not are NaN."""
    depth, columns, ranks = CASES[name]
    ranks_SP = torch.tensor(ranks)
    slots, parts, most = len(ranks), len(columns) - 1, int(ranks_SP.max()) + 2
    a = _randn(slots, parts, depth, most, seed=2, dtype=dtype) / depth**0.5
    b = _randn(slots, most, columns[-1], seed=3, dtype=dtype)
    for slot in range(slots):
        for part in range(parts):
            a[slot, part, :, ranks[slot][part] :] = torch.nan
            b[slot, ranks[slot][part] :, columns[part] : columns[part + 1]] = torch.nan
    return {
        "out": _randn(TOKENS, columns[-1], dtype=dtype),
        "hidden": _randn(TOKENS, depth, seed=1, dtype=dtype),
        "slots": torch.tensor([(token * 7) % (slots + 1) - 1 for token in range(TOKENS)]),
        "a": a,
        "b": b,
        "ranks": ranks_SP,
        "columns": columns,
    }


def wanted(given: dict[str, Any]) -> torch.Tensor:
    """Return the result in float64."""
    numbers = {"a": given["a"].nan_to_num(0.0), "b": given["b"].nan_to_num(0.0)}
    wide = {name: given[name].double() for name in ("out", "hidden")} | {
        name: tensor.double() for name, tensor in numbers.items()
    }
    return plain.add_lora(**given | wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    given = arguments(name, dtype)
    got = lora.add_lora(**given)
    assert got.dtype == dtype and error(got, wanted(given)) < (1e-6 if dtype == torch.float32 else 1e-3)
    none = given["slots"] < 0
    assert torch.equal(got[none], given["out"][none])


def alone(given: dict[str, Any], token: int, add_lora: Any) -> torch.Tensor:
    """Return the row of a token that is alone in its step."""
    rows = {name: given[name][token : token + 1] for name in ("out", "hidden", "slots")}
    row: torch.Tensor = add_lora(**given | rows)[0]
    return row


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_bits_that_it_has_alone(name: str) -> None:
    given = arguments(name)
    whole = lora.add_lora(**given)
    assert all(torch.equal(alone(given, token, lora.add_lora), whole[token]) for token in (0, 9, 20))
    others = given | {"slots": given["slots"].roll(1)}
    others["slots"][3] = given["slots"][3]
    assert torch.equal(lora.add_lora(**others)[3], whole[3])


def test_a_step_of_no_tokens_is_one_of_no_launches() -> None:
    given = arguments("one part")
    rows = {name: given[name][:0] for name in ("out", "hidden", "slots")}
    assert lora.add_lora(**given | rows).shape == (0, 70)


def test_splits_depend_on_the_features_alone() -> None:
    assert [lora.split_depth(depth) for depth in (40, 512, 1100, 2048, 7168)] == [512, 512, 512, 512, 1792]
    assert [lora.rank_tile(ranks) for ranks in (1, 16, 17, 64, 256)] == [16, 16, 32, 64, 64]


@pytest.mark.mutant
@pytest.mark.parametrize(
    "change",
    [
        ("(column < end)[:, None] & (rank < count)[None, :]", "(column < end)[:, None] & (rank < R)[None, :]"),
        ("tl.where(has_it[None, :], own + product, own)", "own + product"),
        ("total = tl.where(has_it[None, :], product, total)", "total += product"),
    ],
    ids=["ranks that do not count", "neighbours", "sums of all adapters"],
)
def test_a_wrong_kernel_is_noticed(tmp_path: Path, change: tuple[str, str]) -> None:
    wrong, given = mutated(lora, tmp_path, change), arguments("parts with odd borders")
    assert not error(wrong.add_lora(**given), wanted(given)) < 1e-6
