"""Fingerprint: against a pure Python reference, over shards, and what it must notice."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from weight_sync.errors import WeightRequestError
from weight_sync.fingerprint import BLOCK, combine, digest, fingerprint, fingerprint_hex, parse_fingerprint
from weight_sync.tensor_meta import DTYPES, TensorMeta

MASK = (1 << 64) - 1
FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


def mix(k: int) -> int:
    z = ((k + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference(tensor: torch.Tensor, offset: int = 0) -> int:
    size = tensor.dtype.itemsize
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = struct.unpack(f"<{len(raw) // size}{FORMATS[size]}", raw)
    total = 0
    for i, word in enumerate(words, start=offset):
        total += (mix(2 * (i // BLOCK)) | 1) * (mix(2 * (i % BLOCK) + 1) | 1) * (word + 1)
    return total & MASK


def random_tensor(dtype: torch.dtype, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        return raw > 127
    return raw.view(dtype)


def test_mix_gives_the_outputs_of_splitmix64() -> None:
    # First outputs of splitmix64 from state 0, as published with its reference implementation.
    assert [mix(k) for k in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("numel", [1, 5, BLOCK, 2 * BLOCK + 17])
def test_a_fingerprint_equals_the_reference(dtype: torch.dtype, numel: int) -> None:
    tensor = random_tensor(dtype, numel)
    before = tensor.clone()
    assert fingerprint(tensor) == reference(tensor)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


def test_more_blocks_than_one_chunk() -> None:
    tensor = random_tensor(torch.bfloat16, 130 * BLOCK + 3)
    parts = [fingerprint(part, offset=start) for start, part in shards(tensor, [BLOCK * 64, BLOCK * 129 + 5])]
    assert fingerprint(tensor) == combine(*parts) == reference(tensor)


def shards(tensor: torch.Tensor, cuts: list[int]) -> list[tuple[int, torch.Tensor]]:
    flat = tensor.view(-1)
    edges = [0, *sorted(cuts), flat.numel()]
    return [(start, flat[start:end]) for start, end in itertools.pairwise(edges)]


@settings(max_examples=examples(40), deadline=None)
@given(
    numel=st.integers(0, 3 * BLOCK),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8]),
    seed=st.integers(0, 99),
)
def test_fingerprints_of_shards_add_up(numel: int, cuts: list[float], dtype: torch.dtype, seed: int) -> None:
    tensor = random_tensor(dtype, numel, seed)
    parts = [fingerprint(part, offset=start) for start, part in shards(tensor, [int(cut * numel) for cut in cuts])]
    assert combine(*parts) == fingerprint(tensor)


def test_the_golden_values_never_change() -> None:
    """Trainer and engine may run different versions of this code, so that the values are fixed for good."""
    ramp = torch.arange(10_000, dtype=torch.int64)
    assert fingerprint_hex(fingerprint(ramp)) == "b24ff8a76372b24c"
    assert fingerprint_hex(fingerprint(ramp.to(torch.float32))) == "01bb4cc2d55157ce"
    assert fingerprint_hex(fingerprint(ramp.to(torch.bfloat16))) == "4915a8c478080224"
    assert fingerprint_hex(fingerprint(ramp.to(torch.uint8))) == "31b6e8668af7c24c"
    assert fingerprint_hex(fingerprint(torch.zeros(3, 5))) == "f0c3ebbedf1b8741"
    assert fingerprint(torch.empty(0)) == 0


def test_notices_what_must_not_pass() -> None:
    weight_ED = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    original = fingerprint(weight_ED)
    experts_swapped = weight_ED[[1, 0, 2, 3, 4, 5, 6, 7]]
    rows_swapped = weight_ED.clone()
    rows_swapped[0, [0, 1]] = weight_ED[0, [1, 0]]
    bit_flipped = weight_ED.clone()
    bit_flipped.view(torch.int16)[7, 2, 15] ^= 1
    changed = [experts_swapped, rows_swapped, bit_flipped, weight_ED + 0.5, weight_ED.transpose(1, 2), -weight_ED]
    values = [fingerprint(tensor) for tensor in changed]
    assert original not in values
    assert len(set(values)) == len(values)
    # Zeros count too: a tensor is not the same as a longer one that ends in zeros.
    assert fingerprint(torch.zeros(4)) != fingerprint(torch.zeros(5))


def test_every_single_bit_of_a_block_counts() -> None:
    tensor = torch.zeros(64, dtype=torch.int16)
    seen = {fingerprint(tensor)}
    for position in range(64):
        for bit in range(16):
            flipped = tensor.clone()
            flipped[position] ^= (1 << bit) - (1 << 16 if bit == 15 else 0)
            seen.add(fingerprint(flipped))
    assert len(seen) == 1 + 64 * 16


def test_a_plain_xor_would_pass_swapped_experts() -> None:
    """The check above can fail: a position-free sum does not see the swap that `fingerprint` sees."""
    weight = random_tensor(torch.int16, 64).view(8, 8)
    swapped = weight[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert int(weight.long().sum()) == int(swapped.long().sum())
    assert fingerprint(weight) != fingerprint(swapped)


def test_reads_row_major_whatever_the_strides() -> None:
    tensor = random_tensor(torch.float32, 12).view(3, 4)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous()) != fingerprint(tensor)
    assert fingerprint(tensor[:, 1:3]) == reference(tensor[:, 1:3])


def test_refuses_unknown_dtype_and_bad_hex() -> None:
    with pytest.raises(WeightRequestError, match="complex64"):
        fingerprint(torch.zeros(2, dtype=torch.complex64))
    assert parse_fingerprint(fingerprint_hex(12345)) == 12345
    for text in ("", "xyz", "0x00000000000001", "00000000000000001", "+000000000000001", "0000_0000_0000_0"):
        with pytest.raises(WeightRequestError):
            parse_fingerprint(text)


def test_digest_depends_on_everything_but_order() -> None:
    one = (TensorMeta("a", torch.float32, (2, 3)), 7)
    two = (TensorMeta("b", torch.float32, (6,)), 8)
    expected = hashlib.sha256(
        b"a\0float32\0" + b"2,3\0" + b"0000000000000007\nb\0float32\0" + b"6\0" + b"0000000000000008\n"
    ).hexdigest()
    assert digest([one, two]) == digest([two, one]) == expected
    others = [
        (TensorMeta("c", torch.float32, (2, 3)), 7),
        (TensorMeta("a", torch.bfloat16, (2, 3)), 7),
        (TensorMeta("a", torch.float32, (3, 2)), 7),
        (TensorMeta("a", torch.float32, (2, 3)), 9),
    ]
    assert len({digest([other, two]) for other in [one, *others]}) == 5
