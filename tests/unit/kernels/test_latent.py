"""The operators of latent attention: float64 as the judge, rows that are independent, and where the weights live.

Shapes: T tokens, H heads, N elements of a query that meet the latent, rd rotated ones, R latent, v value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from rollout.kernels.ops import Ops, plain_ops
from rollout.kernels.places import AbsorbedPlace, LatentSizes
from tests.kernels import error, native_ops, rows_are_independent
from tests.layer_storage import stored_latent

EPS = 1e-5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# heads, N, v, R, rd: sizes of published models apart from the number of heads, and odd sizes
SIZES = pytest.mark.parametrize(
    "sizes", [(2, 128, 128, 512, 64), (3, 192, 256, 512, 64), (5, 7, 33, 17, 6), (1, 1, 1, 1, 2)]
)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@dataclass
class Block:
    """Inputs of both operators for 41 tokens."""

    heads: int
    sizes: LatentSizes
    query: torch.Tensor  # [T, H (N + rd)]
    latent: torch.Tensor  # [T, R + rd]
    norm: torch.Tensor
    weight: torch.Tensor  # [H (N + v), R]
    angles: torch.Tensor
    means: torch.Tensor  # [T, H R]
    slots: torch.Tensor

    @classmethod
    def random(cls, dtype: torch.dtype, sizes: tuple[int, ...]) -> Block:
        generator = torch.Generator().manual_seed(3)
        heads, nope, value, rank, rotary_dim = sizes

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return cls(
            heads,
            LatentSizes(nope, value, rank),
            randn(41, heads * (nope + rotary_dim)),
            randn(41, rank + rotary_dim),
            1 + 0.1 * randn(rank),
            randn(heads * (nope + value), rank),
            randn(41, 2, rotary_dim),
            randn(41, heads * rank),
            torch.randperm(64, generator=generator)[:41],
        )

    def stored(self, ops: Ops) -> torch.Tensor:
        return stored_latent(ops, self.weight, self.heads, self.sizes)

    def run(
        self, ops: Ops, rows: torch.Tensor | slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries [T, H, R + rd], the rows kept in the pool [T, R + rd] and the values [T, H v]."""
        pool = torch.full((64, 1, self.latent.shape[1]), torch.nan, dtype=self.latent.dtype)
        weight = self.stored(ops)
        query = ops.latent_query_store(
            self.query[rows],
            self.latent[rows],
            self.norm,
            EPS,
            weight,
            self.heads,
            self.angles[rows],
            pool,
            self.slots[rows],
        )
        kept = pool[self.slots[rows], 0]
        assert pool.isnan().sum() == (64 - kept.shape[0]) * kept.shape[1]
        return query, kept, ops.latent_values(self.means[rows], weight, self.heads, self.sizes.value)

    def exact(self) -> tuple[torch.Tensor, ...]:
        """Compute the same results in float64, token by token and head by head."""
        sizes, queries, kept, values = self.sizes, [], [], []
        by_head = self.weight.double().view(self.heads, -1, sizes.rank)
        for token in range(41):
            latent, key = self.latent[token].double().split([sizes.rank, self.angles.shape[2]])
            normed = latent / (latent.square().mean() + EPS).sqrt() * self.norm.double()
            kept.append(torch.cat((normed, self._turned(key, token))))
            of_heads = self.query[token].double().view(self.heads, -1).split([sizes.nope, self.angles.shape[2]], dim=1)
            parts = [torch.cat((q @ w[: sizes.nope], self._turned(r, token))) for q, r, w in zip(*of_heads, by_head)]
            queries.append(torch.stack(parts))
            means = self.means[token].double().view(self.heads, -1)
            values.append(torch.cat([w[sizes.nope :] @ mean for w, mean in zip(by_head, means)]))
        return torch.stack(queries), torch.stack(kept), torch.stack(values)

    def _turned(self, x: torch.Tensor, token: int) -> torch.Tensor:
        cos, signed_sin = self.angles[token].double()
        partner = torch.arange(len(x)) ^ 1
        return x * cos + x[partner] * signed_sin


@pytest.fixture(scope="module", autouse=True)
def native() -> Ops:
    return native_ops()


@DTYPES
@SIZES
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_both_operators_agree_with_float64(
    dtype: torch.dtype, sizes: tuple[int, ...], compiled: bool, native: Ops
) -> None:
    block = Block.random(dtype, sizes)
    for got, exact in zip(block.run(native if compiled else plain_ops()), block.exact(), strict=True):
        assert error(got, exact) < TOLERANCE[dtype]


def _by_head(block: Block, change: Callable[[torch.Tensor], torch.Tensor]) -> Block:
    """Apply `change` to the weight as [H, 2, N, R]: for each head the parts that make keys and values."""
    return replace(block, weight=change(block.weight.view(block.heads, 2, -1, 512)).reshape(-1, 512))


WRONG: dict[str, Callable[[Block], Block]] = {
    "keys and values exchanged": lambda b: replace(
        b, weight=b.weight.view(b.heads, 2, -1, 512).flip(1).reshape(-1, 512)
    ),
    "heads in another order": lambda b: _by_head(b, lambda w: w.flip(0)),
    "turned the other way": lambda b: replace(b, angles=b.angles * torch.tensor([1.0, -1.0])[:, None]),
    "norm without its weight": lambda b: replace(b, norm=torch.ones_like(b.norm)),
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_one_is_noticed(wrong: str, native: Ops) -> None:
    block = Block.random(torch.float32, (2, 128, 128, 512, 64))
    found = zip(WRONG[wrong](block).run(native), block.exact(), strict=True)
    assert max(error(got, exact) for got, exact in found) > 1e-2


@DTYPES
@SIZES
@pytest.mark.parametrize("result", [0, 1, 2], ids=["queries", "kept", "values"])
def test_rows_of_latent_operators_are_independent(
    dtype: torch.dtype, sizes: tuple[int, ...], result: int, native: Ops
) -> None:
    block = Block.random(dtype, sizes)
    assert rows_are_independent(lambda rows: block.run(native, rows)[result], 41)


@DTYPES
def test_a_long_prefill_has_the_bits_of_short_ones(dtype: torch.dtype, native: Ops) -> None:
    """The long prefill has more tokens than one work item takes."""
    block = Block.random(dtype, (2, 128, 128, 512, 64))
    many = torch.arange(41).repeat(12)[:450]
    weight, slots = block.stored(native), torch.arange(450)

    def keys(rows: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
        pool = torch.zeros(450, 1, 576, dtype=dtype)
        inputs = (block.query[rows], block.latent[rows], block.norm, EPS, weight, block.heads, block.angles[rows])
        query = native.latent_query_store(*inputs, pool, slots)
        return [query, pool[slots], native.latent_values(block.means[rows], weight, block.heads, 128)]

    whole = keys(many, slots)
    for chunk in (1, 7, 64, 193):
        parts = [keys(rows, own) for rows, own in zip(many.split(chunk), slots.split(chunk), strict=True)]
        assert all(torch.equal(torch.cat(got), want) for got, want in zip(zip(*parts, strict=True), whole, strict=True))


@DTYPES
@SIZES
def test_what_is_written_is_read_back(dtype: torch.dtype, sizes: tuple[int, ...], native: Ops) -> None:
    block = Block.random(dtype, sizes)
    stored = block.stored(native)
    place = native.storage.latent_place(stored, block.sizes)
    assert isinstance(place, AbsorbedPlace) and place.num_bytes == block.weight.nbytes
    assert torch.equal(place.read(), block.weight)
    other = place.rebind(torch.zeros_like(stored))
    other.restore(place.read())
    assert torch.equal(other.storage, stored) and torch.equal(other.read(), block.weight)
    place.write(torch.zeros_like(block.weight).double())
    assert not stored.any()


def test_wrong_arguments_are_refused_before_anything_is_written(native: Ops) -> None:
    block = Block.random(torch.float32, (3, 8, 8, 16, 4))
    wrong = [
        replace(block, slots=torch.full_like(block.slots, 64)),
        replace(block, slots=block.slots - 64),
        replace(block, slots=block.slots.int()),
        replace(block, heads=2),
        replace(block, latent=block.latent[:, 1:].contiguous()),
        replace(block, angles=block.angles[:, :, :3].contiguous()),
        replace(block, norm=block.norm.double()),
        replace(block, query=block.query[:, ::2]),
    ]
    stored, pool = block.stored(native), torch.zeros(64, 1, 20)
    for b in wrong:
        with pytest.raises(RuntimeError):
            native.latent_query_store(b.query, b.latent, b.norm, EPS, stored, b.heads, b.angles, pool, b.slots)
    for heads, size in ((2, 8), (3, 80), (3, 0)):
        with pytest.raises(RuntimeError):
            native.latent_values(block.means, stored, heads, size)
    assert not pool.any()


def test_latent_operators_take_an_empty_batch(native: Ops) -> None:
    block = Block.random(torch.float32, (3, 8, 8, 16, 4))
    query, kept, values = block.run(native, slice(0, 0))
    assert query.shape == (0, 3, 20) and kept.shape == (0, 20) and values.shape == (0, 24)
