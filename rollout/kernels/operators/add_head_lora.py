"""`add_head_lora`: products with adapters by head, added to a result: out + (hidden @ A) @ B in each head of a token.

`out` [T, H, W] or [T, H W] and `hidden` [T, H V] have a row for each token and head.  The first D elements of a row of
`hidden` are multiplied, and the first O elements of a row of `out` get the product; the others stay.  `slots` [T] int64
is the adapter of each token, -1 for none.  `a` [S, H, D, R] and `b` [S, H, R, O] hold S adapters; either may have 1 in
the place of H, for a matrix that all heads share.  `ranks` [S] or [S, 1] int64 counts the columns of A and rows of B;
the others are not read.  Numbers are rounded as in `add_lora`.
"""

from __future__ import annotations

import torch

from rollout.kernels.operator import Gradient, operator


@operator(
    "(Tensor out, Tensor hidden, Tensor slots, Tensor a, Tensor b, Tensor ranks, int num_heads) -> Tensor",
    Gradient(flows=("out", "hidden"), weights=("a", "b"), copied=("ranks",)),
)
def add_head_lora(
    out: torch.Tensor,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    wide, (depth, most), width = torch.promote_types(hidden.dtype, torch.float32), a.shape[2:], b.shape[3]
    x_HTD = hidden.unflatten(1, (num_heads, -1))[..., :depth].transpose(0, 1).to(wide)
    out_THW = out.flatten(1).unflatten(1, (num_heads, -1)).to(wide)
    total_THO, rest = out_THW.split([width, out_THW.shape[2] - width], dim=2)
    counts_SR = torch.arange(most, device=a.device) < ranks.reshape(-1, 1)
    for slot in range(a.shape[0]):
        shrunk_HTR = (x_HTD @ a[slot].to(wide)).masked_fill(~counts_SR[slot], 0.0)
        delta_THO = (shrunk_HTR @ b[slot].to(wide)).transpose(0, 1)
        has_it_T11 = ((slots == slot) & counts_SR[slot, 0]).view(-1, 1, 1)
        total_THO = torch.where(has_it_T11, total_THO + delta_THO, total_THO)
    return torch.cat((total_THO, rest), dim=2).to(out.dtype).reshape(out.shape)
