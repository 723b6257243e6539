"""`SeedSource`: the seed of a request.  Each of its tokens is drawn by this seed and the token's position alone."""

from __future__ import annotations

import secrets

import numpy as np
import torch

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.distributed.parallel import Parallel


class SeedSource:
    """Draws seeds for requests that bring none.  Ranks that share requests draw equal seeds, other ranks others.

    `random_seed` None: one rank takes it from the system.  All ranks make their sources in the same turn.  Ranks that
    share requests ask for the same requests in the same order.
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
