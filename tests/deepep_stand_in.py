"""A stand-in for the `deep_ep` package over gloo on a CPU: what its buffers promise of the calls in use, with traps.

    arrival     normal: by source rank, then by token; low-latency: rows of an expert in any order, source ranks too;
                elastic: by source rank, in each in any order unless the buffer is deterministic
    once        normal and elastic send a token once to each rank that has any of its experts, low-latency once to each
                expert; an elastic token that names an expert twice is refused
    ids         local to the rank, -1 where another rank's expert was chosen
    weights     normal: 0 where the id is -1; elastic: as given, whatever the id; low-latency: combine multiplies
    places      low-latency results have G * M places for each expert, garbage (NaN) past the count, and are overwritten
                by the second next dispatch, from when on their handle is refused; normal mode dirties what low-latency
                needs clean; elastic results without a wait have G * M rows, garbage past the count, ids too
    handles     of another mode are refused
    captures    low-latency dispatch and combine do their work again at each replay, in the memory of the capture
    refusals    dtypes, contiguity, hidden sizes, rank counts, more tokens than were announced, ranks that disagree

Expanded rows, cached handles, bias, events and several NVLink domains are not here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rollout.distributed.communicator import Communicator
from tests.deepep_stand_in_buffer import Buffer, NormalBuffer
from tests.deepep_stand_in_elastic import ElasticBuffer
from tests.deepep_stand_in_wire import Wire

GENERATIONS: dict[str, dict[str, type]] = {
    "normal": {"Buffer": NormalBuffer},
    "1.2": {"Buffer": Buffer},
    "2.1": {"Buffer": Buffer, "ElasticBuffer": ElasticBuffer},
}


def stand_in(communicator: Communicator, generation: str = "2.1", seed: int = 0) -> Any:
    """Return what `import deep_ep` gives on one rank: a build without low-latency kernels, release 1.2 or 2.1."""
    wire = Wire(communicator, seed)
    library = SimpleNamespace(
        **{name: type(name, (buffer,), {"wire": wire}) for name, buffer in GENERATIONS[generation].items()}
    )
    if generation == "2.1":
        library.topk_idx_t = torch.int64
    return library
