"""Cases of `sum_in_order`."""

from __future__ import annotations

from tests.operators import T, rand

CASES = {"": {"parts": rand(5, T, 12)}, "of one rank": {"parts": rand(1, T, 3)}}
COSTS_WHAT_IT_IS_GIVEN = True
TOKEN_AXIS = 1
