"""Keys and values in FP8: every number on its way into the pool, and attention that equals that of widened pools.

Shapes: T tokens, S slots, H query heads, Hkv key/value heads, hd size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout.kernels.operators.qk_norm_rope_store import FP8_MAX, pool_rows, qk_norm_rope_store
from tests.interpreted import kernels
from tests.invariance import compute_threads
from tests.kernels import native_ops

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16)
FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "plain torch": qk_norm_rope_store.plain,
    "compiled": lambda *given: native_ops().qk_norm_rope_store(*given),
    "triton": kernels("qk_norm_rope_store").qk_norm_rope_store,
}


def numbers() -> torch.Tensor:
    """Return floats around every number of FP8: itself, the middle to the next and their neighbours; NaN, infinity."""
    finite = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = finite[finite.isfinite()].sort().values.double()
    middles = (finite[1:] + finite[:-1]) / 2
    exact = torch.cat((finite, middles, torch.tensor([464.0, 480.0, 1e4, 3e38]))).float()
    exact = torch.cat((exact, -exact))
    around = [torch.nextafter(exact, torch.full_like(exact, towards)) for towards in (-torch.inf, torch.inf)]
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-30, -1e-30])
    return torch.cat((exact, *around, special))


def stored(
    form: Callable[..., torch.Tensor], values: torch.Tensor, dtype: torch.dtype, scales: tuple[float, float]
) -> tuple[torch.Tensor, ...]:
    """Return the rows of both pools [S, 1, hd] for one query, key and value head; keys do not turn."""
    head_dim = 16
    rows = torch.nn.functional.pad(values, (0, -len(values) % head_dim)).view(-1, head_dim).to(dtype)
    count = len(rows)
    angles = torch.stack((torch.ones(count, 2), torch.zeros(count, 2)), 1).to(dtype)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    pools = [torch.zeros(count, 1, head_dim).to(FP8) for _ in range(2)]
    form(torch.cat((rows, rows, rows), 1), None, angles, *pools, slots, 1e-6, None, *scales)
    return tuple(pool_rows(pool, slots).view(torch.uint8) for pool in pools)


def rounds_all(
    form: Callable[..., torch.Tensor],
    values: torch.Tensor,
    dtype: torch.dtype,
    scales: tuple[float, float] = (1.0, 1.0),
) -> bool:
    """Return whether both pools hold the numbers nearest to `values` over their scale, at most 448."""
    wanted = [
        (values.to(dtype).float() / torch.tensor(scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() for scale in scales
    ]
    assert all(want.abs().nan_to_num(0).max() == FP8_MAX for want in wanted)
    keys, values_8 = (rows.view(FP8).float().flatten()[: len(values)] for rows in stored(form, values, dtype, scales))
    kept = torch.arange(len(values)) % 16 >= 2  # turned by zero, infinity would be NaN
    pairs = (keys[kept], wanted[0][kept]), (values_8, wanted[1])
    return all(((one == two) | (one.isnan() & two.isnan())).all() for one, two in pairs)


@pytest.mark.parametrize(
    ("form", "dtype"),
    # triton's interpreter computes bfloat16 wrongly
    [(form, dtype) for form in FORMS for dtype in DTYPES if (form, dtype) != ("triton", torch.bfloat16)],
    ids=str,
)
def test_every_number_is_rounded_and_saturated(form: str, dtype: torch.dtype) -> None:
    values = numbers()
    if form == "triton":  # its interpreter does not round as a device does: numbers between two are left out
        values = values[(values.clamp(-FP8_MAX, FP8_MAX).to(FP8).float() == values) | (values.abs() > FP8_MAX)]
    assert rounds_all(FORMS[form], values, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_quotients_are_rounded_and_saturated(form: str) -> None:
    """Plain torch and the compiled operator agree bit for bit; the interpreter divides by powers of two."""
    if form == "triton":
        exact = torch.arange(256, dtype=torch.uint8).view(FP8).float()
        assert rounds_all(FORMS[form], exact[exact.isfinite()] * 4, torch.float32, (4.0, 0.5))
        return
    for scales in ((0.0131, 3.0), (1e-3, 117.5)):
        values = torch.cat([numbers(), *(numbers() * scale for scale in scales)])
        for dtype in DTYPES:
            assert rounds_all(FORMS[form], values, dtype, scales)


def test_a_reciprocal_is_noticed() -> None:
    """To multiply by the scale's reciprocal, which is rounded, rounds some numbers otherwise."""

    def multiplies(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        *rest, k_scale, v_scale = rest
        assert k_scale == v_scale
        return qk_norm_rope_store.plain(qkv * (1 / torch.tensor(k_scale)), *rest)

    assert not rounds_all(multiplies, numbers() * 0.0131, torch.float32, (0.0131, 0.0131))


def test_other_roundings_are_noticed() -> None:
    def truncated(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        return qk_norm_rope_store.plain((qkv.view(torch.int32) & ~0xFFFFF).view(torch.float32), *rest)

    def wraps(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        return qk_norm_rope_store.plain(torch.where(qkv.abs() > FP8_MAX, torch.nan, qkv), *rest)

    assert not rounds_all(truncated, numbers(), torch.float32)
    assert not rounds_all(wraps, numbers(), torch.float32)


class Paged:
    """Sequences of these lengths whose keys and values are random numbers of FP8."""

    def __init__(self, lengths: list[int], dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(sum(lengths))
        self.lengths, count = lengths, len(lengths) * max(lengths)
        self.table = torch.randperm(count + 3, generator=generator)[:count].view(len(lengths), -1)
        shape = (count + 3, num_kv_heads, head_dim)
        self.pools = [(3 * torch.randn(shape, generator=generator)).to(FP8) for _ in range(2)]
        self.q = torch.randn(len(lengths), max(lengths), num_heads, head_dim, generator=generator).to(dtype)

    def attend(self, spans: list[tuple[int, int, int]], pools: list[torch.Tensor], **given: Any) -> torch.Tensor:
        rows, starts, stops = (torch.tensor(column) for column in zip(*spans, strict=True))
        q = torch.cat([self.q[row, start:stop] for row, start, stop in spans])
        scale = q.shape[2] ** -0.5
        out: torch.Tensor = torch.ops.lockstep.paged_attention(
            *(q, *pools, self.table, rows, stops - starts, stops, given.get("scale", scale)),
            *(given.get("window"), given.get("sinks"), given.get("value_scale", 1.0)),
        )
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 40), (2, 1, 256)], ids=str)
def test_attention_is_that_of_widened_pools(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Bit for bit: in prefill and decode, alone and together, with windows and sinks, by one thread and by two."""
    native_ops()
    paged = Paged([1, 127, 130, 520, 700], dtype, heads)
    widened = [pool.to(dtype) for pool in paged.pools]
    decodes = [(row, length - 1, length) for row, length in enumerate(paged.lengths)]
    chunks = [(row, length // 3, length) for row, length in enumerate(paged.lengths)]
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    for spans in (decodes, chunks):
        for given in ({}, {"window": 100}, {"window": 100, "sinks": sinks}):
            whole = paged.attend(spans, paged.pools, **given)
            assert torch.equal(whole, paged.attend(spans, widened, **given))
            parts = torch.cat([paged.attend([span], paged.pools, **given) for span in spans])
            with compute_threads(2):
                assert torch.equal(whole, paged.attend(spans, paged.pools, **given))
            assert torch.equal(whole, parts)
    last = torch.cumsum(torch.tensor([stop - start for _, start, stop in chunks]), 0) - 1
    assert torch.equal(paged.attend(chunks, paged.pools)[last], paged.attend(decodes, paged.pools))


def test_scales_of_powers_of_two_give_the_bits_of_scaled_pools() -> None:
    native_ops()
    for heads in ((8, 2, 64), (4, 4, 40)):
        paged = Paged([1, 130, 520], torch.bfloat16, heads)
        scaled = [pool.bfloat16() * factor for pool, factor in zip(paged.pools, (0.125, 4.0), strict=True)]
        spans = [(row, length // 3, length) for row, length in enumerate(paged.lengths)]
        usual = heads[2] ** -0.5
        for given in ({}, {"window": 100}):
            want = paged.attend(spans, scaled, **given)
            got = paged.attend(spans, paged.pools, scale=usual * 0.125, value_scale=4.0, **given)
            assert torch.equal(got, want)
            assert not torch.equal(paged.attend(spans, paged.pools, scale=usual * 0.125, **given), want)
            assert not torch.equal(paged.attend(spans, paged.pools, value_scale=4.0, **given), want)


def test_wrong_pools_fail_the_check() -> None:
    native_ops()
    paged = Paged([130], torch.bfloat16, (8, 2, 64))
    whole = paged.attend([(0, 129, 130)], paged.pools)
    other = paged.pools[1].clone()
    other.view(torch.uint8)[paged.table[0, 77], 1, 3] ^= 0x40
    assert not torch.equal(whole, paged.attend([(0, 129, 130)], [paged.pools[0], other]))
