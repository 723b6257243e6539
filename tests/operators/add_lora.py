"""Cases of `add_lora`: tokens of two adapters and of none, in one part and in several."""

from __future__ import annotations

import torch

from tests.operators import D, T, rand

SLOTS = torch.tensor([1, -1, 0, 2, 0, 1, 1, -1, 0])
CASES = {
    "": {
        "out": rand(T, 21),
        "hidden": rand(T, D),
        "slots": SLOTS,
        "a": rand(3, 2, D, 18) / 4,
        "b": rand(3, 18, 21) / 4,
        "ranks": torch.tensor([[18, 1], [3, 16], [17, 0]]),
        "columns": [0, 16, 21],
    },
    "one part": {
        "out": rand(T, 5),
        "hidden": rand(T, D),
        "slots": SLOTS,
        "a": rand(3, 1, D, 4) / 4,
        "b": rand(3, 4, 5) / 4,
        "ranks": torch.tensor([[4], [1], [2]]),
        "columns": [0, 5],
    },
}
