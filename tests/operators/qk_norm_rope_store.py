"""Cases of `qk_norm_rope_store`."""

from __future__ import annotations

import torch

from tests.kernels import angles
from tests.operators import Arguments, T, rand


def case(*, weight: torch.Tensor | None, offset: float | None, rotary_dim: int) -> Arguments:
    pools = {name: torch.zeros(T, 2, 8, dtype=torch.float64) for name in ("k_pool", "v_pool")}
    return {
        "qkv": rand(T, (4 + 2 * 2) * 8),
        "weight": weight,
        "angles": angles(rotary_dim, 32, torch.float64, torch.arange(T)),
        **pools,
        "slots": torch.arange(T),
        "eps": 1e-6,
        "weight_offset": offset,
    }


CASES = {
    "": case(weight=rand(6, 8), offset=None, rotary_dim=8),
    "part": case(weight=rand(6, 8), offset=1.0, rotary_dim=4),
    "no norm": case(weight=None, offset=None, rotary_dim=8),
}
