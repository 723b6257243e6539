"""Cases of `gated_delta` of three sequences that begin from zeros."""

from __future__ import annotations

import torch

from tests.operators import T, rand

KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 2, 4, 6, 3, 3
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
CASES = {
    "": {
        "projected": rand(T, CHANNELS + HEADS * VALUE + 2 * HEADS),
        "conv_weight": rand(WIDTH, CHANNELS),
        "a_log": rand(HEADS) - 1,
        "dt_bias": rand(HEADS, seed=1),
        "norm_weight": rand(VALUE),
        "eps": 1e-6,
        "conv_pool": torch.zeros(3, WIDTH - 1, CHANNELS, dtype=torch.float64),
        "state_pool": torch.zeros(3, HEADS, KEY, VALUE, dtype=torch.float64),
        "query_lens": torch.tensor([4, 1, T - 5]),
        "rows": torch.arange(3),
        "sources": torch.full((3,), -1),
        "snapshots": torch.empty((0, 3), dtype=torch.int64),
    }
}
