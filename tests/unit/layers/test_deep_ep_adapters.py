"""Slots of adapters that travel through DeepEP: each row brings that of its token, over the stand-in of the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.distributed.parallel import Parallel
from rollout.layers.moe.dispatchers.base import DispatchOutput
from rollout.layers.moe.dispatchers.deep_ep import DeepEpDispatcher
from rollout.layers.moe.dispatchers.deep_ep_library import DeepEpApi
from rollout.layers.moe.dispatchers.deep_ep_modes import LowLatencyMode, NormalMode
from tests.deepep_contract import APIS, HIDDEN, batches, expected, experts_of_rank, with_dispatcher

CASES = ("even", "ragged", "some choose nothing", "one token in all", "no token")
FEW = pytest.mark.parametrize(
    "api", [api if api in ("normal", "low_latency") else pytest.param(api, marks=pytest.mark.full) for api in APIS]
)


def mistakes(api: str, variant: type[DeepEpDispatcher] = DeepEpDispatcher) -> set[str]:
    """Return what went wrong: rows with the slot of another token, and sums that differ from one rank's.

    Channel 63 of a token is its slot.
    """
    made = {case: batches(case, 2, HIDDEN[api]) for case in CASES}
    generator = torch.Generator().manual_seed(0)
    for batch in (each for of_ranks in made.values() for each in of_ranks):
        batch.hidden_TD[:, 63] = torch.randint(-1, 200, batch.hidden_TD.shape[:1], generator=generator).bfloat16()

    def work(dispatcher: DeepEpDispatcher, parallel: Parallel) -> set[str]:
        rank, found = parallel.tp.rank, set()
        for of_ranks in made.values():
            batch = of_ranks[rank]
            dispatcher.plan_step([len(each.hidden_TD) for each in of_ranks])
            slots_T = batch.hidden_TD[:, 63].long()
            sent = dispatcher.dispatch(batch.hidden_TD, batch.ids_TK, batch.weights_TK, slots_T)
            is_row_R = (sent.ids_RS >= 0).any(dim=1)
            assert sent.adapters_R is not None and sent.adapters_R.dtype == torch.int64
            if not torch.equal(sent.adapters_R, sent.hidden_RD[:, 63].masked_fill(~is_row_R, -1).long()):
                found.add("slots")
            out = dispatcher.combine(experts_of_rank(sent, rank * dispatcher.shape.slots_per_rank), sent.handle)
            out[:, 63] = 0  # its products have more digits than bfloat16
            wanted = expected(batch)
            wanted[:, 63] = 0
            if not torch.equal(out, wanted):
                found.add("sums")
        return found

    return set().union(*with_dispatcher(api, 2, work, variant))


@FEW
def test_rows_bring_the_slots_of_their_tokens(api: str) -> None:
    assert mistakes(api) == set()


class TakesSlotsOfItsOwnTokens(LowLatencyMode):
    """A wrong mode: it forgets the rank that a row came from."""

    def dispatch_adapted(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, adapters_T: torch.Tensor
    ) -> DispatchOutput:
        work = super().dispatch_adapted(hidden_TD, ids_TK, weights_TK, adapters_T)
        mine_M = torch.full((self.shape.low_latency_tokens,), -1)
        mine_M[: len(adapters_T)] = adapters_T
        tokens_R = work.handle[0][0].flatten().long()
        work.adapters_R = mine_M[tokens_R.clamp(min=0)].masked_fill(work.ids_RS.squeeze(1) < 0, -1)
        return work


class AddsSlotsToWeights(NormalMode):
    """A wrong mode: the slot is in bits that bfloat16 keeps."""

    def dispatch_adapted(
        self, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, adapters_T: torch.Tensor
    ) -> DispatchOutput:
        return super().dispatch_adapted(hidden_TD, ids_TK, weights_TK, adapters_T + (1 << 15))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("api", "modes", "mistake"),
    [
        ("low_latency", (NormalMode, TakesSlotsOfItsOwnTokens), "slots"),
        ("normal", (AddsSlotsToWeights, None), "sums"),
    ],
)
def test_a_wrong_mode_is_noticed(api: str, modes: tuple[Any, Any], mistake: str) -> None:
    kept = {"normal": DeepEpApi.NORMAL, "low_latency": DeepEpApi.NORMAL_AND_LOW_LATENCY}
    variant = type("Variant", (DeepEpDispatcher,), {"modes": DeepEpDispatcher.modes | {kept[api]: modes}})
    assert mistake in mistakes(api, variant)
