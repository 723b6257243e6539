"""Hidden states as values: their numbers are exact, records join, and parts that do not fit are refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from capture.errors import HiddenStatesError
from capture.hidden_states import HiddenStates

RANDOM = np.random.default_rng(3)


def states(count: int = 6, start: int = 2, spans: tuple[tuple[str, int, int], ...] = ()) -> HiddenStates:
    raw = np.arange(1000, 1000 + count * 2 * 4, dtype="<u2").reshape(count, 2, 4)
    return HiddenStates(raw, "bfloat16", (0, 3), start, spans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_no_bit_is_lost(dtype: torch.dtype) -> None:
    """Numbers are any bits: infinities and -0 too.  NaN has many forms, of which only the kind is compared."""
    bits = RANDOM.integers(0, 256, (5, 2, 8, dtype.itemsize), dtype=np.uint8)
    numbers = torch.from_numpy(bits).view(dtype)[..., 0]
    name = str(dtype).removeprefix("torch.")
    found = HiddenStates.of_text(base64.b64encode(bits.tobytes()).decode(), name, (5, 2, 8), (1, 2))
    wide = numbers.to(torch.float64 if dtype == torch.float64 else torch.float32).numpy()
    assert found.values.dtype == wide.dtype and found.raw_TLD.tobytes() == bits.tobytes()
    np.testing.assert_array_equal(found.values, wide)


def test_records_of_consecutive_tokens_join() -> None:
    whole = states(6, 2, (("a", 0, 4), ("b", 4, 6)))
    for at in range(7):
        spans = [[(v, max(a, lo) - lo, min(b, hi) - lo) for v, a, b in whole.weight_versions if max(a, lo) < min(b, hi)]
                 for lo, hi in ((0, at), (at, 6))]  # fmt: skip
        parts = [
            HiddenStates(whole.raw_TLD[:at], "bfloat16", (0, 3), 2, tuple(spans[0])),
            HiddenStates(whole.raw_TLD[at:], "bfloat16", (0, 3), 2 + at, tuple(spans[1])),
        ]
        joined = HiddenStates.joined(parts)
        assert joined.raw_TLD.tobytes() == whole.raw_TLD.tobytes()
        assert (joined.start, joined.weight_versions) == (2, whole.weight_versions)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [states(), states(start=9)],
        [states(), states(start=7)],
        [states(), HiddenStates(states().raw_TLD, "bfloat16", (0, 2), 8)],
        [states(), HiddenStates(states().raw_TLD[:, :, :3], "bfloat16", (0, 3), 8)],
        [states(), HiddenStates(states().raw_TLD.view("<f2"), "float16", (0, 3), 8)],
    ],
)
def test_other_records_do_not_join(parts: list[HiddenStates]) -> None:
    with pytest.raises(HiddenStatesError):
        HiddenStates.joined(parts)


def test_parts_that_do_not_fit_are_refused() -> None:
    for dtype, shape, layers in (
        ("bfloat16", (2, 1, 5), (3,)),
        ("float8", (2, 1, 4), (3,)),
        ("bfloat16", (2, 4), (3,)),
        ("bfloat16", (-2, -1, 4), (3,)),
        ("bfloat16", (2, 1, 4), (3, 4)),
    ):
        with pytest.raises(HiddenStatesError):
            HiddenStates.of_bytes(bytes(16), dtype, shape, layers)
    with pytest.raises(HiddenStatesError):
        HiddenStates.of_text("no base64!", "bfloat16", (2, 1, 4), (3,))
    with pytest.raises(HiddenStatesError):
        HiddenStates(np.zeros((2, 1, 4), "<f4"), "bfloat16", (3,))
    assert len(HiddenStates.of_bytes(bytes(16), "bfloat16", (2, 1, 4), (3,))) == 2
