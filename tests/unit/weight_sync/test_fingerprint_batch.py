"""Fingerprints of many tensors together: equal to each one's alone, and as few products as their bytes need."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.kernels.build import load_kernels
from tests.gathered import Gathered
from weight_sync import fingerprint_batch
from weight_sync.block_sums import row_sums, shard_sums
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import BLOCK, fingerprint
from weight_sync.fingerprint_batch import FingerprintPlan, Form, Shard, fingerprints_of
from weight_sync.fingerprint_words import UNSIGNED, multipliers
from weight_sync.sender.plan import plan_tensors
from weight_sync.tensor_meta import DTYPES


class Products(TorchDispatchMode):
    """Counts the products that fingerprints ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.words = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weight_sync":
            self.count += 1
            self.words += sum(one.numel() for one in (args[0] if isinstance(args[0], list) else args[:1]))
        return func(*args, **kwargs or {})


def some_shard(rng: random.Random) -> Shard:
    """Make a shard of any dtype, size, strides, offset and cast."""
    dtype = rng.choice(list(DTYPES.values()))
    size = rng.choice([0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, rng.randrange(5 * BLOCK)])
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw > 127 if dtype is torch.bool else raw.view(dtype)
    offset = rng.choice([0, 1, BLOCK - 1, BLOCK, rng.randrange(1 << 30)])
    if dtype.itemsize > 1 and size % 6 == 0:
        tensor = tensor.view(2, -1).T if rng.random() < 0.5 else tensor.view(-1, 3).T.contiguous().T
    if dtype is torch.float32 and rng.random() < 0.5:
        return torch.randn(tensor.shape).to(tensor), torch.bfloat16, offset  # torch casts a NaN in more than one way
    return tensor, dtype, offset


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    assert load_kernels().available


@pytest.mark.parametrize("way", ["where they lie", "joined"])
@pytest.mark.parametrize("seed", range(6))
def test_many_together_are_what_each_is_alone(seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are some thousand blocks, so that the scratch area is used again."""
    if way == "joined":
        monkeypatch.setattr(fingerprint_batch, "sums_where_they_lie", lambda device: False)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shards = [some_shard(rng) for _ in range(600)]
    shards.insert(300, (torch.randn(257 * BLOCK + 5).bfloat16(), torch.bfloat16, 3 * BLOCK + 7))
    assert fingerprints_of(shards) == [fingerprint(tensor.to(dtype), offset) for tensor, dtype, offset in shards]


def test_a_plan_serves_any_content_of_its_forms() -> None:
    """A plan made once; each time other tensors, of which none is kept."""
    cpu = torch.device("cpu")
    sizes = [3, 3, BLOCK, 2 * BLOCK + 9, 3, 2 * BLOCK + 9, BLOCK, 0]
    plan = FingerprintPlan([Form((size,), torch.float32, torch.bfloat16, 5 * i, cpu) for i, size in enumerate(sizes)])
    for _ in range(3):
        tensors = [torch.randn(size) for size in sizes]
        expected = [fingerprint(tensor.bfloat16(), 5 * i) for i, tensor in enumerate(tensors)]
        assert plan.values(tensors).tolist() == expected


@pytest.mark.parametrize("offset", [0, 5])
def test_equal_sizes_are_summed_together_without_padding(offset: int) -> None:
    """Two thousand tensors of 64 words are one product of their own words, not 2,000 blocks of zeros."""
    tensors = [torch.full((64,), float(i)).bfloat16() for i in range(2000)]
    with Products() as products:
        found = fingerprints_of((tensor, tensor.dtype, offset) for tensor in tensors)
    assert found[::999] == [fingerprint(tensor, offset) for tensor in tensors[::999]]
    assert products.count == 1 and products.words == 64 * 2000


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]),
    count=st.integers(1, 11),
    size=st.sampled_from([1, 7, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]),
    first=st.sampled_from([0, 1, 8, BLOCK - 8, BLOCK - 1]),
    ragged=st.booleans(),
)
def test_compiled_and_plain_sums_of_shards_agree(
    dtype: torch.dtype, count: int, size: int, first: int, ragged: bool
) -> None:
    """`ragged`: the shards lie apart, each at another address modulo a vector."""
    raw = torch.randint(0, 256, (count, (size + 3 * ragged) * dtype.itemsize), dtype=torch.uint8)
    raw[0] = 255  # products that wrap
    shards = [row[: size * dtype.itemsize].view(dtype) for row in raw]
    expected = row_sums(torch.stack(shards).view(UNSIGNED[dtype.itemsize]), first)
    assert torch.equal(shard_sums(shards, first), expected)
    wrong = shard_sums(shards, (first + 1) % BLOCK)
    assert wrong.shape != expected.shape or not torch.equal(wrong, expected)


@pytest.mark.parametrize(
    ("shards", "first", "reason"),
    [
        ([], 0, "there must be a shard"),
        ([torch.ones(3), torch.ones(4)], 0, "equally long"),
        ([torch.ones(3), torch.ones(3).double()], 0, "of one width"),
        ([torch.ones(6)[::2]], 0, "contiguous"),
        ([torch.ones(3)], BLOCK, "the first multiplier"),
        ([torch.ones(3)], -1, "the first multiplier"),
        ([torch.ones(3, dtype=torch.complex128)], 0, "1, 2, 4 or 8 bytes"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards: list[torch.Tensor], first: int, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        torch.ops.weight_sync.shard_sums(shards, multipliers("cpu"), first)


def test_a_large_shard_on_a_device_need_not_be_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        @staticmethod
        def gpu_sum(words: torch.Tensor, offset: int) -> torch.Tensor:
            assert words.is_contiguous(), "the kernel reads word after word"
            return torch.from_numpy(np.array([fingerprint(words.view(torch.int16), offset)], np.uint64).view(np.int64))

    monkeypatch.setattr(fingerprint_batch, "kernels_of", lambda device: Kernels)
    tensor = torch.arange(256 * BLOCK, dtype=torch.int16).view(256, -1).t()
    plan = FingerprintPlan([Form(tuple(tensor.shape), tensor.dtype, tensor.dtype, 0, tensor.device)])
    assert plan.values([tensor]).tolist() == [fingerprint(tensor)]


def test_nothing_and_no_fingerprint() -> None:
    assert fingerprints_of([]) == []
    assert fingerprints_of([(torch.empty(0), torch.float32, 5)]) == [0]
    with pytest.raises(WeightRequestError, match="no fingerprint for dtype"):
        fingerprints_of([(torch.ones(2), torch.complex64, 0)])


def test_a_model_of_many_small_tensors_takes_a_few_products_n23a() -> None:
    """N23a: 93 % of a refresh of 29 MB were products of one tensor each, and every one waited for a thread."""
    named = [(f"layers.{i}.w", torch.randn(64, 128)) for i in range(400)]
    plan = plan_tensors(named, torch.bfloat16)
    with Products() as products:
        found = Gathered(plan).fingerprints()
    assert found == {name: fingerprint(tensor.bfloat16()) for name, tensor in named}
    assert products.count <= 2, products.count
