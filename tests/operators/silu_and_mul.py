"""Cases of `silu_and_mul`."""

from __future__ import annotations

from tests.operators import T, rand

CASES = {"": {"gate_up": rand(T, 10)}}
COSTS_WHAT_IT_IS_GIVEN = True
