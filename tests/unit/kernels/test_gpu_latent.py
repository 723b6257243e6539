"""The operators of latent attention for CUDA, interpreted: against float64, and rows that do not depend on the batch.

bfloat16 is left out: triton's interpreter computes it wrongly.

Shapes: T tokens, H heads, R rank of latents, rd rotated elements, v value size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.kernels.ops import plain_ops
from tests.interpreted import kernels, mutated
from tests.kernels import error

store, values, products = map(kernels, ("latent_query_store", "latent_values", "latent_heads"))
plain = plain_ops()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}
NUM_TOKENS, HEADS, NOPE, TURNED, RANK, VALUE = 70, 3, 20, 6, 130, 9


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _given(dtype: torch.dtype) -> tuple[Any, ...]:
    query, latent = _randn(NUM_TOKENS, HEADS * (NOPE + TURNED), dtype=dtype), _randn(NUM_TOKENS, RANK + TURNED, seed=1)
    weight = _randn(HEADS * (NOPE + VALUE), RANK, seed=3, dtype=dtype) / 8
    angles, pool = _randn(NUM_TOKENS, 2, TURNED, seed=4, dtype=dtype), torch.zeros(99, 1, RANK + TURNED, dtype=dtype)
    slots = torch.randperm(99, generator=torch.Generator().manual_seed(5))[:NUM_TOKENS]
    return query, latent.to(dtype), _randn(RANK, seed=2, dtype=dtype), 1e-6, weight, HEADS, angles, pool, slots


def _in_float64(given: tuple[Any, ...]) -> list[Any]:
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]


@DTYPES
def test_queries_and_latents_agree_with_float64(dtype: torch.dtype) -> None:
    given = _given(dtype)
    exact = _in_float64(given)
    want = plain.latent_query_store(*exact)
    got = store.latent_query_store(*given)
    assert got.dtype == dtype and got.shape == want.shape
    assert error(got, want) < TOLERANCE[dtype] and error(given[7], exact[7]) < TOLERANCE[dtype]
    untouched = torch.ones(99, dtype=torch.bool)
    untouched[given[8]] = False
    assert not given[7][untouched].any()
    of_heads = [*given[:4], None, *given[5:]]
    pool = given[7].clone()
    got, want = store.latent_query_store(*of_heads), plain.latent_query_store(*_in_float64(tuple(of_heads)))
    assert got.shape == want.shape == (NUM_TOKENS, HEADS, NOPE + TURNED) and error(got, want) < TOLERANCE[dtype]
    assert torch.equal(given[7], pool)


@DTYPES
def test_values_agree_with_float64(dtype: torch.dtype) -> None:
    latents, weight = _randn(NUM_TOKENS, HEADS * RANK, dtype=dtype), _given(dtype)[4]
    want = plain.latent_values(latents.double(), weight.double(), HEADS, VALUE)
    got = values.latent_values(latents, weight, HEADS, VALUE)
    assert got.dtype == dtype and got.shape == want.shape and error(got, want) < TOLERANCE[dtype]


def test_rounding_is_that_of_plain_torch() -> None:
    """In float16 what is stored, and what is rotated, are equal bit by bit."""
    mine, theirs = _given(torch.float16), _given(torch.float16)
    got, want = store.latent_query_store(*mine), plain.latent_query_store(*theirs)
    assert torch.equal(got[..., RANK:], want[..., RANK:]) and torch.equal(mine[7], theirs[7])


def test_rows_do_not_depend_on_the_batch() -> None:
    query, latent, norm, eps, weight, heads, angles, _, _ = _given(torch.float32)
    latents = _randn(NUM_TOKENS, HEADS * RANK)

    def rows(chosen: torch.Tensor) -> torch.Tensor:
        pool = torch.zeros(len(chosen), 1, RANK + TURNED)
        given = (query[chosen], latent[chosen], norm, eps, weight, heads, angles[chosen], pool)
        out = store.latent_query_store(*given, torch.arange(len(chosen)))
        read = values.latent_values(latents[chosen], weight, heads, VALUE)
        return torch.cat((out.flatten(1), pool.flatten(1), read), 1)

    # The product of the interpreter, numpy's, depends on a row's place in its tile; a device's does not.
    whole, others = rows(torch.arange(NUM_TOKENS)), torch.arange(NUM_TOKENS).flip(0)
    for count in (1, 5, 64, 65):
        assert torch.equal(rows(torch.arange(count)), whole[:count])
        chosen = torch.cat((torch.arange(count), others[: NUM_TOKENS - count]))
        assert torch.equal(rows(chosen)[:count], whole[:count])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask=(k < K)[:, None] & (column < O)", "mask=(k < K - 1)[:, None] & (column < O)"),
        ("weight += head * w_head", "weight += 0 * w_head"),
        ("token < num_tokens - first_token", "token < num_tokens - first_token - 1"),
    ],
)
def test_wrong_products_are_noticed(tmp_path: Path, old: str, new: str) -> None:
    wrong = mutated(products, tmp_path, (old, new))
    x, weight = _randn(NUM_TOKENS, HEADS, RANK), _randn(HEADS, RANK, VALUE, seed=1)
    want = torch.einsum("thk,hko->tho", x.double(), weight.double())
    for made, agrees in ((products, True), (wrong, False)):
        out = torch.zeros(NUM_TOKENS, HEADS, VALUE)  # memory given back before might hold the right rows
        made.head_products(x, weight, out)
        assert (error(out, want) < TOLERANCE[torch.float32]) == agrees
