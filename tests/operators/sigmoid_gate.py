"""Cases of `sigmoid_gate`."""

from __future__ import annotations

from tests.operators import T, rand

CASES = {"": {"hidden": rand(T, 12), "gate": rand(T, 3)}}
COSTS_WHAT_IT_IS_GIVEN = True
