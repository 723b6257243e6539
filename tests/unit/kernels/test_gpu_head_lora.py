"""`add_head_lora` on a GPU, interpreted: against float64, with other bits than a token's own nowhere.

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

lora = kernels("add_head_lora")
plain = plain_ops()
HEADS, TOKENS = 3, 21
# Heads of A and of B, features and row of the input, columns and row of the result, the rank of each slot: columns in
# two tiles and a tile without any, features in two tiles, ranks in two tiles.
CASES: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], list[int]]] = {
    "queries": ((HEADS, 1), (20, 26), (130, 260), [8, 0, 5]),
    "values": ((1, HEADS), (70, 70), (9, 9), [65, 1, 80]),
}


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a step of `TOKENS` tokens, among them tokens of all slots and of none.  Ranks that count not are NaN."""
    (a_heads, b_heads), (depth, in_row), (columns, out_row), ranks = CASES[name]
    slots, most = len(ranks), max(ranks) + 2
    a = _randn(slots, a_heads, depth, most, seed=2, dtype=dtype) / depth**0.5
    b = _randn(slots, b_heads, most, columns, seed=3, dtype=dtype)
    for slot, rank in enumerate(ranks):
        a[slot, :, :, rank:], b[slot, :, rank:] = torch.nan, torch.nan
    return {
        "out": _randn(TOKENS, HEADS, out_row, dtype=dtype),
        "hidden": _randn(TOKENS, HEADS * in_row, seed=1, dtype=dtype),
        "slots": torch.tensor([(token * 7) % (slots + 1) - 1 for token in range(TOKENS)]),
        "a": a,
        "b": b,
        "ranks": torch.tensor(ranks).unsqueeze(1),
        "num_heads": HEADS,
    }


def wanted(given: dict[str, Any]) -> torch.Tensor:
    """Return the result in float64."""
    wide = {name: given[name].double().nan_to_num(0.0) for name in ("out", "hidden", "a", "b")}
    return plain.add_head_lora(**given | wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    given = arguments(name, dtype)
    got = lora.add_head_lora(**given)
    assert got.dtype == dtype and error(got, wanted(given)) < (1e-6 if dtype == torch.float32 else 1e-3)
    changed = given["ranks"][given["slots"].clamp(min=0), 0].masked_fill(given["slots"] < 0, 0) > 0
    columns = CASES[name][2][0]
    assert torch.equal(got[~changed], given["out"][~changed])
    assert torch.equal(got[..., columns:], given["out"][..., columns:])


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_bits_that_it_has_alone(name: str) -> None:
    given = arguments(name)
    whole = lora.add_head_lora(**given)
    for token in (0, 9, 20):
        rows = {each: given[each][token : token + 1] for each in ("out", "hidden", "slots")}
        assert torch.equal(lora.add_head_lora(**given | rows)[0], whole[token])
    none = {each: given[each][:0] for each in ("out", "hidden", "slots")}
    assert lora.add_head_lora(**given | none).shape[0] == 0


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("queries", ("a + (head % A_HEADS) * D * R", "a + ((head + 1) % A_HEADS) * D * R")),
        ("values", ("b + (head % B_HEADS) * R * O", "b + ((head + 1) % B_HEADS) * R * O")),
        ("queries", ("has_it[None, :] & (column < O)[:, None]", "(column < O)[:, None]")),
        ("values", ("a_mask = (rank < count)[:, None] & (at < D)[None, :]", "a_mask = (rank < R)[:, None]")),
    ],
    ids=["queries of the next head", "values of the next head", "neighbours", "ranks that do not count"],
)
def test_a_wrong_kernel_is_noticed(tmp_path: Path, name: str, change: tuple[str, str]) -> None:
    wrong, given = mutated(lora, tmp_path, change), arguments(name)
    assert not error(wrong.add_head_lora(**given), wanted(given)) < 1e-6
