"""`SeedSource`: the seed of a request, by which alone and the position each of its tokens is drawn."""

from __future__ import annotations

import secrets

import numpy as np
import torch

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.distributed.parallel import Parallel


class SeedSource:
    """Draws seeds for requests that bring none: the same on ranks that share requests, others on others.

    `random_seed` None: from the system, of one rank.  All ranks make theirs in the same turn, and ask for the same
    requests in the same order.
    """

    def __init__(self, random_seed: int | None, parallel: Parallel) -> None:
        drawn = torch.tensor([secrets.randbits(62)])
        seed = int(parallel.tp.broadcast(drawn)) if random_seed is None else random_seed % 2**64
        stream = parallel.position.dp_rank
        self._generator = np.random.default_rng([seed, stream] if stream else seed)

    def seed_for(self, source: TokenizedGenerateReqInput) -> int:
        """Return the seed of a request as an unsigned number of 64 bits."""
        seed = source.sampling_params.sampling_seed
        return int(self._generator.integers(2**63)) if seed is None else seed % 2**64
