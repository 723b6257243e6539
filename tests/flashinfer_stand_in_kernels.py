"""The arithmetic of the stand-in's kernels, which read the memory of the device when they run.

plan in the int workspace, int32    | n | query rows of each of n sequences | KV read of each |
"""

from __future__ import annotations

import math

import torch


def write_plan(pinned: torch.Tensor, qo_indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
    """Write the plan into page-locked memory, a uint8 tensor."""
    numbers = torch.cat([torch.tensor([len(kv_lens)]), qo_indptr[1:] - qo_indptr[:-1], kv_lens]).to(torch.int32)
    pinned.view(torch.int32)[: len(numbers)].copy_(numbers)


def read_plan(workspace: torch.Tensor) -> list[tuple[int, int]]:
    """Return the numbers of query rows and of KV tokens of each sequence."""
    count, *numbers = workspace.view(torch.int32).tolist()
    return list(zip(numbers[:count], numbers[count : 2 * count]))


def merge(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    """Join two results of attention [T, H, size] by their sums of scores [T, H], to the base of 2, into the first."""
    both = torch.stack((s, s_other)).double()
    weights = (both * math.log(2)).softmax(0).unsqueeze(-1)
    v.copy_(weights[0] * v.double() + weights[1] * v_other.double())
    s.copy_((both * math.log(2)).logsumexp(0) / math.log(2))


def attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: list[tuple[int, int]],
    indptr: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend to paged KV: q [T, H, hd]; k, v [pages, page size, kv heads, size].

    Rows that no sequence has are left NaN.
    """
    out.fill_(math.nan)
    group, size = q.shape[1] // k.shape[2], k.shape[1]
    row = 0
    for number, (rows, length) in enumerate(lens):
        begin, end = indptr[number : number + 2].tolist()
        pages = indices[begin:end].long()
        keys, values = (x[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (k, v))
        length = min(length, size * len(pages))
        queries = q[row : row + rows].double()
        scores = torch.einsum("ihd,jhd->hij", queries, keys) * scale
        ago = (torch.arange(len(queries)) + length - rows)[:, None] - torch.arange(length)
        masked = torch.zeros_like(ago, dtype=torch.bool)
        if causal:
            masked |= ago < 0
        if window_left >= 0:
            masked |= ago > window_left
        scores = scores.masked_fill(masked, -math.inf)
        values = values.masked_fill(masked.all(0)[:, None, None], 0)  # values that no query reads may be NaN
        out[row : row + rows] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).to(out.dtype)
        if lse is not None:
            lse[row : row + rows] = (scores.logsumexp(-1).T / math.log(2)).float()
        row += rows
