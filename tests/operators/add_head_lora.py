"""Cases of `add_head_lora`: a matrix A for each head and a shared B, as for latent queries, and the reverse."""

from __future__ import annotations

import torch

from tests.operators import T, rand

HEADS = 3
SLOTS = torch.tensor([1, -1, 0, 2, 0, 1, 1, -1, 0])
RANKS = torch.tensor([[18], [3], [0]])
CASES = {
    "queries": {
        "out": rand(T, HEADS, 23),
        "hidden": rand(T, HEADS * 11),
        "slots": SLOTS,
        "a": rand(3, HEADS, 7, 18) / 4,
        "b": rand(3, 1, 18, 21) / 4,
        "ranks": RANKS,
        "num_heads": HEADS,
    },
    "values": {
        "out": rand(T, HEADS * 5),
        "hidden": rand(T, HEADS * 20),
        "slots": SLOTS,
        "a": rand(3, 1, 20, 18) / 4,
        "b": rand(3, HEADS, 18, 5) / 4,
        "ranks": RANKS,
        "num_heads": HEADS,
    },
}
