"""`get_weights_by_name` while an update per rank has come to some ranks: it shows one version, and names it right."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.control.weight_sources import SOURCES
from rollout.core.messages.io_struct import PauseGenerationReqInput
from rollout.core.messages.weight_parts import WeightPartsReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from tests.family_zoo import in_dtype
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.rank_updates import RankSource, Sent, own
from weight_sync.rank_boxes import RankBoxes


def test_a_tensor_on_its_way_is_shown_as_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has its rows of one matrix, and rank 1 all of its experts."""
    checkpoint = tiny_checkpoint(tmp_path / "old", "moe_dense_first", seed=1)
    old = in_dtype(logical_tensors(checkpoint), torch.float64)
    new = in_dtype(logical_tensors(tiny_checkpoint(tmp_path / "new", "moe_dense_first", seed=2)), torch.float64)
    sent: list[Sent] = []
    transport = {UpdateWeightsFromDistributedReqInput: lambda _, updater: RankSource(sent[updater.rank])}
    monkeypatch.setitem(SOURCES, *transport.popitem())
    lists: dict[str, Any] = {
        "names": list(new),
        "dtypes": [str(tensor.dtype) for tensor in new.values()],
        "shapes": [list(tensor.shape) for tensor in new.values()],
    }
    split = next(name for name in new if name.endswith("q_proj.weight"))
    first, *_, last = (name for name in new if ".experts." in name)
    with ParallelHarness(checkpoint, tp_size=2, ep_size=2) as engine:
        parts = engine.control(WeightPartsReqInput, **lists).data
        stated = RankBoxes.parsed(parts, len(new))
        rows, experts = own(stated, 0, new), own(stated, 1, new)
        sent += [[it for it in rows if it[0].name == split], [it for it in experts if ".experts." in it[0].name]]
        update = {"update_id": uuid.uuid4().hex}
        begin = {"per_rank": True, "placement_epoch": parts["placement_epoch"]}
        assert engine.control(BeginWeightUpdateReqInput, **begin, **update).success
        assert engine.control(PauseGenerationReqInput).success
        assert engine.control(UpdateWeightsFromDistributedReqInput, names=[], dtypes=[], shapes=[], **update).success
        for name, is_staged in ((split, False), (first, False), (last, True)):
            shown = engine.control(GetWeightsByNameReqInput, name=name, truncate_size=1000).data
            expected = (new if is_staged else old)[name]
            assert torch.equal(torch.tensor(shown["parameter"], dtype=torch.float64), expected), name
            assert shown["staged"] == is_staged, name
