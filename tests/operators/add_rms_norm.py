"""Cases of `add_rms_norm`."""

from __future__ import annotations

from tests.operators import D, T, rand

NORM = {"residual": rand(T, D), "hidden": None, "weight": rand(D), "eps": 1e-6}
CASES = {"": NORM, "offset": {**NORM, "weight_offset": 1.0}}
COSTS_WHAT_IT_IS_GIVEN = True
