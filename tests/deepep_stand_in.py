"""A stand-in for the `deep_ep` package over gloo on a CPU: what `Buffer` promises of the calls in use, traps included.

    arrival     normal: by source rank, then by token; low-latency: the rows of an expert in any order, source ranks too
    once        normal sends a token once to each rank that has any of its experts, low-latency once to each expert
    ids         local to the rank, -1 where another rank's expert was chosen
    weights     normal: 0 where the id is -1; low-latency: not sent, combine multiplies
    places      low-latency results have G * M places for each expert, garbage (NaN) past the count, and are overwritten
                by the second next dispatch; normal mode dirties what low-latency needs clean
    refusals    dtypes, contiguity, hidden sizes, rank counts, more tokens than were announced, ranks that disagree

`ElasticBuffer`, cached handles, bias, events and several NVLink domains are not here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rollout.distributed.communicator import Communicator
from tests.deepep_stand_in_buffer import Buffer, NormalBuffer
from tests.deepep_stand_in_wire import Wire

GENERATIONS: dict[str, dict[str, type]] = {
    "normal": {"Buffer": NormalBuffer},
    "1.2": {"Buffer": Buffer},
    "2.1": {"Buffer": Buffer},
}


def stand_in(communicator: Communicator, generation: str = "2.1", seed: int = 0) -> Any:
    """What `import deep_ep` gives on one rank: a build without low-latency kernels, release 1.2 or 2.1."""
    wire = Wire(communicator, seed)
    library = SimpleNamespace(
        **{name: type(name, (buffer,), {"wire": wire}) for name, buffer in GENERATIONS[generation].items()}
    )
    if generation == "2.1":
        library.topk_idx_t = torch.int64
    return library
