"""The interface between attention layers and whatever computes attention over paged KV.

Knows what a backend is given and must return.  Does not know any backend.

Shapes: T tokens of the step, H query heads, Hkv key/value heads, hd head size, S slots of the KV pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from rollout.core.forward_batch import ForwardBatch


class KVStore(Protocol):
    """What a backend uses of the KV pool.  `k[layer]` and `v[layer]` are [S, Hkv, hd] and keep their addresses."""

    @property
    def k(self) -> Sequence[torch.Tensor]: ...

    @property
    def v(self) -> Sequence[torch.Tensor]: ...

    def write(self, layer: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [T, Hkv, hd] in the slots `out_cache_loc` [T]."""


class PagedOperands(NamedTuple):
    """A step as the compiled attention operator takes it: N sequences whose last tokens are queries, all int64.

    `req_to_token` [max requests, max context]; `rows`, `query_lens`, `kv_lens` [N].
    """

    req_to_token: torch.Tensor
    rows: torch.Tensor
    query_lens: torch.Tensor
    kv_lens: torch.Tensor


class AttentionBackend(ABC):
    """Causal attention of a step's tokens over their sequences.

    `plan` is called once per step and does all index arithmetic; then, for each layer, keys and values of the step's
    tokens are stored in `kv` and `attend` is called.
    """

    # Whether a token's result has the same bits in every batch, chunking and number of threads.
    batch_invariant = False

    # Of the step planned last, where the backend is the compiled operator: layers may then call that by themselves.
    operands: PagedOperands | None = None

    def __init__(self, kv: KVStore) -> None:
        self.kv = kv

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for the layers of one step."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [T, H, hd] to what `kv` holds.  Returns [T, H * hd].

        Scores are scaled by `hd ** -0.5`.  Query head h reads key/value head `h // (H / Hkv)`.
        """
