"""Cases of `add_gated`: rows with a gate, and the sum alone."""

from __future__ import annotations

from tests.operators import D, T, rand

TERMS = {"hidden": rand(T, D), "added": rand(T, D, seed=1)}
CASES = {"": {**TERMS, "gate": rand(T, 1)}, "no gate": TERMS}
COSTS_WHAT_IT_IS_GIVEN = True
