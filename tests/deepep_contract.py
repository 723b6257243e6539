"""The contract of any DeepEP dispatcher: batches with every awkward shape, distinguishable experts, and the sum
that one rank alone would compute.

All numbers are small multiples of 1/4, which bfloat16 holds exactly at every step, so that results are compared bit for
bit whatever the order of a sum.

Shapes: T tokens of a rank, D hidden, K top-k, R rows, S slots of a row, P physical experts on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpShape
from tests.deepep_stand_in import stand_in
from tests.nccl_stand_in import stand_in_transport
from tests.ranks import run_ranks

NUM_EXPERTS, TOP_K = 8, 4
MAX_TOKENS, MAX_LOW_LATENCY_TOKENS = 40, 20
HIDDEN = {"normal": 64, "low_latency": 2048, "low_latency alone": 2048, "elastic": 512, "elastic fixed": 512}
GENERATION = {"normal": "normal", "low_latency": "1.2", "low_latency alone": "1.2"}  # else 2.1
MODE = {"normal": "normal", "low_latency alone": "low_latency", "elastic fixed": "low_latency"}  # else auto
APIS = tuple(HIDDEN)
RAGGED = (5, 0, 17, 1)


@dataclass
class Batch:
    """The batch of one rank."""

    hidden_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


def experts_of_rank(work: DispatchOutput, first_expert: int) -> torch.Tensor:
    """Compute the experts of a rank: expert p scales by p % 3 - 1, then adds 2 to channel p.

    Slots of id -1 give nothing, with any weight.
    """
    ids_RS = work.ids_RS
    assert work.has_holes or not (ids_RS < 0).any()
    assert ids_RS.dtype == torch.int64 and ids_RS.shape[0] == work.hidden_RD.shape[0]
    physical_RS = (ids_RS + first_expert).masked_fill(ids_RS < 0, NUM_EXPERTS)
    scale = torch.tensor([p % 3 - 1.0 for p in range(NUM_EXPERTS)] + [0.0])
    mark = 2 * torch.eye(NUM_EXPERTS + 1, work.hidden_RD.shape[1])
    mark[NUM_EXPERTS] = 0
    out_RSD = work.hidden_RD.float().unsqueeze(1) * scale[physical_RS].unsqueeze(2) + mark[physical_RS]
    out_RSD.masked_fill_((ids_RS < 0).unsqueeze(2), 0.0)  # whatever an empty row holds
    if work.weights_RS is None:
        return out_RSD.to(work.hidden_RD.dtype)
    assert work.weights_RS.dtype == work.hidden_RD.dtype
    weights_RS1 = work.weights_RS.float().masked_fill(ids_RS < 0, 0.0).unsqueeze(2)
    return (out_RSD * weights_RS1).sum(1).to(work.hidden_RD.dtype)


def expected(batch: Batch) -> torch.Tensor:
    """Return the sum on one rank that has all experts."""
    return experts_of_rank(DispatchOutput(batch.hidden_TD, batch.ids_TK, batch.weights_TK, None, has_holes=True), 0)


def batches(case: str, num_ranks: int, hidden_size: int) -> list[Batch]:
    """Return the batches by rank."""
    generator = torch.Generator().manual_seed(len(case) + num_ranks)
    counts = {
        "one token in all": [0] * (num_ranks - 1) + [1],
        "no token": [0] * num_ranks,
        "even": [6] * num_ranks,
    }.get(case, list(RAGGED[:num_ranks]))
    return [random_batch(count, hidden_size, num_ranks, case, generator) for count in counts]


def random_batch(count: int, hidden_size: int, num_ranks: int, case: str, generator: torch.Generator) -> Batch:
    """Draw `count` tokens of one rank."""
    scores = torch.rand(count, NUM_EXPERTS, generator=generator)
    if case == "expert 5 gets every token":
        scores[:, 5] = 2
    if case == "expert 3 gets none":
        scores[:, 3] = -1
    if case == "one rank gets all":  # as many choices on one rank as it has experts
        scores[:, : NUM_EXPERTS // num_ranks] += 2
    ids = scores.argsort(dim=1, descending=True)[:, :TOP_K].contiguous()
    if case == "some choose nothing":
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
        ids[:1] = -1
    hidden = torch.randint(-3, 4, (count, hidden_size), generator=generator).bfloat16()
    weights = torch.randint(1, 5, ids.shape, generator=generator).bfloat16() / 4
    return Batch(hidden, ids, weights)


CASES = (
    "even",
    "ragged",
    "one token in all",
    "no token",
    "expert 5 gets every token",
    "expert 3 gets none",
    "one rank gets all",
    "some choose nothing",
)


def shape_of(api: str, num_ranks: int) -> DeepEpShape:
    sizes = HIDDEN[api], NUM_EXPERTS, TOP_K, torch.bfloat16, num_ranks, MAX_TOKENS, MAX_LOW_LATENCY_TOKENS
    return DeepEpShape(*sizes, mode=MODE.get(api, "auto"))  # type: ignore[arg-type]


def with_dispatcher(
    api: str,
    num_ranks: int,
    work: Callable[[DeepEpDispatcher, Parallel], Any],
    variant: type[DeepEpDispatcher] = DeepEpDispatcher,
    seed: int = 0,
    timeout_s: float = 20.0,
) -> list[Any]:
    """Run `work` on every rank with a dispatcher over the stand-in; return the results by rank."""

    def one(parallel: Parallel) -> Any:
        library = stand_in(parallel.tp, GENERATION.get(api, "2.1"), seed)
        return work(variant(library, parallel.tp, shape_of(api, num_ranks), has_rdma=True), parallel)

    return run_ranks(ParallelLayout(tp_size=num_ranks), one, timeout_s, stand_in_transport)


def forward(dispatcher: DeepEpDispatcher, rank: int, batch: Batch) -> torch.Tensor:
    work = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK)
    return dispatcher.combine(experts_of_rank(work, rank * dispatcher.shape.slots_per_rank), work.handle)


def wrong_cases(
    api: str, num_ranks: int, variant: type[DeepEpDispatcher] = DeepEpDispatcher, cases: tuple[str, ...] = CASES
) -> list[str]:
    """Return the cases whose results differ in a bit from the results of one rank alone."""
    made = {case: batches(case, num_ranks, HIDDEN[api]) for case in cases}

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> list[torch.Tensor]:
        rank, out = parallel.tp.rank, []
        for case in cases:
            dispatcher.plan_step([batch.hidden_TD.shape[0] for batch in made[case]])
            out.append(forward(dispatcher, rank, made[case][rank]))
        dispatcher.close()
        return out

    by_rank = with_dispatcher(api, num_ranks, work, variant)
    return [
        case
        for index, case in enumerate(cases)
        if not all(torch.equal(out[index], expected(batch)) for out, batch in zip(by_rank, made[case], strict=True))
    ]
