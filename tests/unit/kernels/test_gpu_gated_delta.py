"""The gated delta rule for CUDA, interpreted: against float64, and steps, chunks, batches and snapshots change no bit.

bfloat16 is left out: triton's interpreter computes it wrongly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.kernels.ops import plain_ops
from tests.delta_rule import Operator, Sequences, Sizes
from tests.interpreted import kernels, mutated
from tests.kernels import error

module = kernels("gated_delta")
plain = plain_ops().gated_delta
SIZES = [Sizes(1, 1, 1, 1, 1), Sizes(2, 4, 12, 10, 4), Sizes(3, 3, 9, 17, 2)]
SIZE = Sizes(1, 2, 8, 12, 4)
LENS = (1, 11, 3, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_are_as_exact_as_in_plain_torch(dtype: torch.dtype, sizes: Sizes) -> None:
    mine = Sequences(sizes, LENS, dtype)
    got, near = (mine.run(operator, mine.chunks(4)) for operator in (module.gated_delta, plain))
    exact = mine.to(torch.float64)
    want = exact.run(plain, exact.at_once())
    assert [part.dtype for part in (got.read[0], got.state[0], got.conv[0])] == [dtype, torch.float32, dtype]
    assert all(torch.equal(one, two.to(dtype)) for one, two in zip(got.conv, want.conv, strict=True))
    for ours, theirs, right in ((got.read, near.read, want.read), (got.state, near.state, want.state)):
        one, two, three = (torch.cat([part.flatten() for part in parts]) for parts in (ours, theirs, right))
        assert error(one, three) <= 1.3 * error(two, three) + 1e-6


def same_bits(operator: Operator) -> bool:
    """Return whether sequences get the same bits at once, alone and in chunks, and go on from snapshots."""
    sequences, one = Sequences(SIZE, LENS, torch.float32), Sequences(SIZE, (14,), torch.float32)
    whole = sequences.run(operator, sequences.at_once())
    ways = [sequences.alone(), sequences.chunks(1), sequences.chunks(3)]
    if not all(sequences.run(operator, steps).equals(whole) for steps in ways):
        return False
    try:
        return one.through_snapshots(operator, [1, 2, 5, 9]).equals(one.run(operator, one.at_once()))
    except AssertionError:
        return False


def test_steps_chunks_batches_and_snapshots_change_no_bit() -> None:
    assert same_bits(module.gated_delta)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state *= tl.exp(-rate * softplus)", "state *= tl.exp(-rate * softplus) * (1.0 - 1e-6 * (t > 3))"),
        ("is_row(source, channel) & ~is_new", "is_row(source, channel) & ~is_new & is_row(start - 1, channel)"),
        ("copy_after == t + 1", "copy_after == t"),
    ],
)
def test_kernels_that_depend_on_the_chunk_are_noticed(tmp_path: Path, old: str, new: str) -> None:
    assert not same_bits(mutated(module, tmp_path, (old, new)).gated_delta)


def test_padding_rows_keep_nothing() -> None:
    """A captured step has negative numbers in place of rows and snapshots that are not there."""
    sequences = Sequences(SIZE, (1, 1, 1), torch.float32)
    pools = sequences.pools(5)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))
    before, again = [pool.clone() for pool in pools], tuple(pool.clone() for pool in pools)
    projected = torch.cat(sequences.projected)
    copies = [(0, 1, 4), (-1, -1, -1), (-1, -1, -1)]
    got = sequences.call(module.gated_delta, projected, pools, [1, 1, 1], [2, -1, 0], [2, -1, 0], copies)
    rows = [0, 2]
    want = sequences.call(module.gated_delta, projected[rows], again, [1, 1], [2, 0], [2, 0], [(0, 1, 4)])
    assert torch.equal(got[rows], want)
    for pool, alone, old in zip(pools, again, before, strict=True):
        assert torch.equal(pool, alone) and torch.equal(pool[[1, 3]], old[[1, 3]])
        assert torch.equal(pool[4], pool[2])
