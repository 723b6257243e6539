"""Cases of `gather_rows`."""

from __future__ import annotations

import torch

from tests.operators import D, rand

CASES = {"": {"table": rand(7, D), "ids": torch.tensor([1, 4, 1, 0, 6, 2, 2, 2, 5])}}
