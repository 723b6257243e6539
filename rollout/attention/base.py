"""`AttentionBackend`: the interface between attention layers and what computes attention over paged KV.

Shapes: T tokens of the step, H query heads, Hkv key/value heads, hd head size, S slots of the KV pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from rollout.core.forward_batch import ForwardBatch
from rollout.core.specs.layer_specs import KVKind
from rollout.memory.kv_pool import KVPool

PROMPT_VOTES = 2
"""The ways to compute prompts by FlashAttention 3: its own module, and FlashInfer's."""


class PagedOperands(NamedTuple):
    """A step as the compiled attention operator takes it: N sequences whose last tokens are queries, all int64.

    `req_to_token` [max requests, max context]; `rows`, `query_lens`, `kv_lens` [N].
    """

    req_to_token: torch.Tensor
    rows: torch.Tensor
    query_lens: torch.Tensor
    kv_lens: torch.Tensor


class LatentForm(NamedTuple):
    """The sizes of latent attention with keys and values of heads, and the scale of its scores.

    A key has `nope` elements of its own and `rotary` ones that all heads share; `rank` and `rotary` are a latent's.
    """

    num_heads: int
    nope: int
    rotary: int
    value: int
    rank: int
    scale: float


# Makes keys [P, H, nope + rotary] and values [P, H, value] of P latents [P, rank + rotary].
Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class AttentionBackend(ABC):
    """Causal attention of a step's tokens over their sequences.

    `plan` is called once per step and does all index arithmetic; then, for each layer, keys and values of the step's
    tokens are stored in `kv` and `attend` is called.
    """

    # Whether a token's result has the same bits in every batch, chunking and number of threads.
    batch_invariant = False

    # The kernels of prompts, for /server_info, where there is a choice.
    prompts = ""

    # The tensors of the step planned last that a recorded forward is given anew; None: `attend` cannot be recorded.
    operands: PagedOperands | None = None

    def __init__(self, kv: KVPool) -> None:
        self.kv = kv

    @staticmethod
    @abstractmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        """Return why this backend cannot attend to such KV, or None where it can."""

    @staticmethod
    def partial_bytes(
        layers: Iterable[tuple[int, KVKind]], dtype: torch.dtype, counts: Iterable[int], longest: int
    ) -> int:
        """Return the most bytes of partial results that `attend` holds for tokens that decode; by default none.

        `layers`: query heads and KV of each layer on this rank.  `counts`: the numbers of decoding tokens that steps
        have.  `longest`: the tokens of the longest context.
        """
        return 0

    def settle(self, all_agree: Callable[[bool], bool]) -> None:
        """Choose, before the first step, what all ranks of the engine have to choose alike.

        `all_agree` returns whether all ranks vote yes.  All ranks vote on each way to compute prompts in turn, whatever
        backend they have, until all agree on one: `PROMPT_VOTES` times at most.
        """
        for _ in range(PROMPT_VOTES):
            all_agree(False)

    def for_graph(self, batch_size: int) -> AttentionBackend | None:
        """Return a backend over the same KV for captured steps of exactly `batch_size` decoding requests.

        Its `plan` is called before the capture and before every replay, outside of the capture.  It leaves all that the
        kernels read at the same addresses.  Its `attend` is captured.  None: `attend` cannot be captured.
        """
        return None

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for the layers of one step."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with q [T, H, hd] to what `kv` holds.  Returns [T, H * value size].

        Scores are scaled by `scale`, `hd ** -0.5` by default.  With a `window` a query sees itself and the `window - 1`
        positions before.  `sinks` [H] are one more logit for each head: it takes part in the softmax and has no value.
        Query head h reads key/value head `h // (H / Hkv)`.
        """

    def expanded_tokens(self, form: LatentForm) -> int:
        """Return how many tokens of the step go to `attend_expanded`: the tokens of all its prompts, or none.

        Called in every layer of latent attention; by default none.
        """
        return 0

    def attend_expanded(
        self, layer: int, form: LatentForm, prompts: torch.Tensor, decodes: torch.Tensor, expand: Expand
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with `prompts` [X, H, nope + rotary] to keys and values of heads, which `expand` makes of latents.

        `decodes` [B, H, rank + rotary] are the other tokens, which attend to latents.  Returns [X, H * value] and
        [B, H * rank].  Called where `expanded_tokens` is not 0.
        """
        raise NotImplementedError
