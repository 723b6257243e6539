"""Adapters of layers that ranks split: the shares of all ranks together are the whole product."""

from __future__ import annotations

import torch

from rollout.layers.linear import AdaptedLinear, Linear, MergedLinear
from rollout.layers.lora import SlotSizes
from rollout.layers.shard import Shard
from tests.kernels import plain_build

DEPTH, RANK, TOKENS = 12, 3, 5
SIZES = SlotSizes(2, 4)
SLOTS = torch.tensor([1, -1, 0, 1, 1])
BUILD = plain_build(torch.float64)


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(
    layer: AdaptedLinear, hidden: torch.Tensor, writes: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Return the product with an adapter in slot 1, all parts side by side."""
    slots = layer.reserve_lora(SIZES)
    for part, (a_RD, b_OR) in enumerate(writes):
        slots.write(1, part, a_RD, b_OR)
    columns = slots._columns[-1]
    return slots.add(torch.zeros(TOKENS, columns, dtype=torch.float64), hidden, SLOTS)


def test_ranks_that_split_inputs_have_parts_of_the_sum() -> None:
    hidden, a_RD, b_OR = rand(TOKENS, DEPTH, seed=1), rand(RANK, DEPTH, seed=2), rand(7, RANK, seed=3)
    parts = [
        product(Linear(Shard.equal(DEPTH, rank, 2, "inputs"), 7, BUILD), hidden[:, 6 * rank :][:, :6], [(a_RD, b_OR)])
        for rank in range(2)
    ]
    want = (hidden @ a_RD.t() @ b_OR.t()) * (SLOTS == 1)[:, None]
    torch.testing.assert_close(parts[0] + parts[1], want, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(parts[0], want)


def test_ranks_that_split_outputs_have_their_rows_in_the_layers_order() -> None:
    """The first part has sections, of which each rank has the same share, and rows in another order."""
    hidden = rand(TOKENS, DEPTH, seed=1)
    writes = [(rand(RANK, DEPTH, seed=2), rand(12, RANK, seed=3)), (rand(2, DEPTH, seed=4), rand(6, 2, seed=5))]
    whole = [hidden @ a_RD.t() @ b_OR.t() * (SLOTS == 1)[:, None] for a_RD, b_OR in writes]
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    for rank in range(2):
        shards = {"qkv": Shard(2, rank, 1).of_sections((8, 4)), "z": Shard.equal(6, rank, 2, "rows")}
        layer = MergedLinear(DEPTH, shards, BUILD, orders={"qkv": order})
        got = product(layer, hidden, writes)
        mine = torch.cat([whole[0][:, 4 * rank :][:, :4], whole[0][:, 8 + 2 * rank :][:, :2]], dim=1)[:, order]
        want = torch.cat([mine, whole[1][:, 3 * rank :][:, :3]], dim=1)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
