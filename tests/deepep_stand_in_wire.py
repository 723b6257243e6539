"""The base of the stand-in's buffers: rows between ranks over gloo, refusals, and the arithmetic of destinations.

Shapes: T tokens, H hidden, K top-k, G ranks, N rows.
"""

from __future__ import annotations

import zlib

import torch

from rollout.distributed.communicator import Communicator


class Wire:
    """The ranks of one stand-in: rows by destination, and calls that all ranks must make alike."""

    def __init__(self, communicator: Communicator, seed: int) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.generator = torch.Generator().manual_seed(1000 * seed + self.rank)

    def agree(self, verb: str, *settings: int) -> None:
        """Check that all ranks make the same call.

        With different calls a device would hang or mix up the ranks' memory; here all ranks get an error.
        """
        calls = self.communicator.gather_ints([zlib.crc32(verb.encode()), *settings, *[0] * (3 - len(settings))])
        assert calls == [calls[0]] * self.size, f"the ranks made different calls, this one {verb}{settings}"

    def exchange(self, to_N: torch.Tensor, *tensors: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        """Send row n of every tensor to rank `to_N[n]`; return how many rows came from each rank, and the rows.

        Received rows are in the order of source ranks, and of one rank in the order of its rows.
        """
        order = to_N.argsort(stable=True)
        send = torch.bincount(to_N, minlength=self.size).tolist()
        receive = [counts[self.rank] for counts in self.communicator.gather_ints(send)]
        return receive, [self.communicator.all_to_all(tensor[order], send, receive) for tensor in tensors]

    def shuffled(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator)


def garbage(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan).to(dtype)


def check_rows(x: torch.Tensor) -> None:
    assert x.dtype == torch.bfloat16, f"bfloat16 rows, not {x.dtype}"
    assert x.dim() == 2 and x.is_contiguous()
    assert x.shape[1] * 2 % 16 == 0


def check_choices(topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_experts: int, size: int) -> None:
    assert topk_idx.dtype == torch.int64, f"int64 ids, not {topk_idx.dtype}"
    assert topk_idx.is_contiguous() and topk_idx.shape[1] <= 32
    assert num_experts % size == 0
    assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
    if topk_weights is not None:
        assert topk_weights.dtype == torch.float32, f"float32 weights, not {topk_weights.dtype}"
        assert topk_weights.is_contiguous() and topk_weights.shape == topk_idx.shape


def ranks_of_tokens(topk_idx: torch.Tensor, num_experts: int, size: int) -> torch.Tensor:
    """Return a mask [T, G], true where a token goes to a rank."""
    ranks_TK = topk_idx.div(num_experts // size, rounding_mode="floor")
    return (ranks_TK.unsqueeze(2) == torch.arange(size)).any(dim=1)


def local_ids(topk_idx: torch.Tensor, rank: int, local_experts: int) -> torch.Tensor:
    shifted = topk_idx - rank * local_experts
    return shifted.masked_fill((shifted < 0) | (shifted >= local_experts), -1)


def align(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def sum_of_ranks(rows: torch.Tensor, tokens: torch.Tensor, in_rank_TG: torch.Tensor) -> torch.Tensor:
    """Sum rows in float32, rank after rank, and round the sums once: [T, H]."""
    total = torch.zeros(in_rank_TG.shape[0], rows.shape[1])
    for rank_rows, rank_tokens in zip(
        rows.split(in_rank_TG.sum(0).tolist()), tokens.split(in_rank_TG.sum(0).tolist()), strict=True
    ):
        total[rank_tokens.long()] += rank_rows.float()
    return total.bfloat16()
