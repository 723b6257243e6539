"""Deltas on several ranks: no rank waits for one that failed, and a delta goes where its base lies.

Ranks are threads over real gloo groups; cases that once ended the process run in a process of their own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save

from rollout.control import weight_sources
from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness, control_of
from tests.scheduler_harness import Harness
from weight_sync.delta.encoder import DeltaEncoder, EncodedDelta
from weight_sync.delta.publisher import publish_encoded
from weight_sync.errors import StagingError
from weight_sync.in_model import JournalStaging
from weight_sync.receivers.base import BucketSource
from weight_sync.tensor_meta import Place, TensorMeta

pytestmark = pytest.mark.full

Tensors = dict[str, torch.Tensor]

EP2: dict[str, Any] = {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep": EP2,
    "split experts": {"tp_size": 2},
    "replicas": {"dp_size": 2},
}
EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
SHARDED = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("prints") / "model", seed=1)


@pytest.fixture
def engine(folder: Path) -> Iterator[ParallelHarness]:
    with ParallelHarness(folder, **EP2) as engine:
        yield engine


def content_of(folder: Path) -> Tensors:
    return {name: tensor.double() for name, tensor in logical_tensors(folder).items()}


def check(engine: Harness, action: str, **fields: Any) -> ControlReqOutput:
    return engine.control(WeightsCheckerReqInput, action=action, **fields)


def places(engine: ParallelHarness, rank: int, name: str) -> Sequence[Place]:
    return engine.schedulers[rank].runner.state.model.weights.places(name)


def scribble(place: Place, value: float = 1000.0) -> None:
    place.restore(torch.full_like(place.read(), value))


def send(engine: Harness, tensors: Tensors) -> ControlReqOutput:
    payload = bytearray(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    return engine.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors")


def apart(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in a process of its own, which a wrong engine would end."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, f"the engine's process ended with {process.exitcode}"


def fails_on(rank_weights: Any, kind: type, verb: str, at_call: int) -> Any:
    """Return a patch that lets call number `at_call` of `verb` of a staging raise on the rank of `rank_weights`."""
    inner, calls = getattr(kind, verb), []

    def faulty(staging: Any, *arguments: Any) -> Any:
        if staging._weights is rank_weights:
            calls.append(verb)
            if len(calls) == at_call:
                raise StagingError("it cannot be written to the journal: no space left on device")
        return inner(staging, *arguments)

    return mock.patch.object(kind, verb, faulty)


class Delivered(BucketSource):
    """A transport that delivers given bytes."""

    must_drain = True

    def __init__(self, payload: bytes) -> None:
        self._tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def announce(self, max_bytes: int) -> Sequence[TensorMeta]:
        return [TensorMeta(DELTA, torch.uint8, tuple(self._tensor.shape))]

    def receive(self) -> Iterator[Sequence[tuple[str, torch.Tensor]]]:
        yield [(DELTA, self._tensor)]


DELTA = "delta"


def send_delta(engine: ParallelHarness, delta: EncodedDelta) -> list[ControlReqOutput]:
    answers = []
    for payload in delta.payloads():
        with mock.patch.object(weight_sources, "DistributedSource", lambda *_, data=payload: Delivered(data)):
            verb = {"names": [DELTA], "dtypes": ["uint8"], "shapes": [[len(payload)]], "group_name": "g"}
            answers.append(engine.control(UpdateWeightsFromDistributedReqInput, load_format=DELTA, **verb))
    return answers


def refresh_by_delta(engine: ParallelHarness, delta: EncodedDelta, **begin: Any) -> list[ControlReqOutput]:
    assert engine.control(BeginWeightUpdateReqInput, weight_version="v1", **begin).success
    return [*send_delta(engine, delta), engine.control(EndWeightUpdateReqInput)]


def require_content(engine: ParallelHarness, content: Tensors) -> None:
    for rank in range(len(engine.schedulers)):
        for name, whole in content.items():
            for place in places(engine, rank, name):
                part = whole if place.region is None else place.region.of(whole)
                assert torch.equal(place.read(), part), f"{name} on rank {rank}"


def drifted(content: Tensors) -> Tensors:
    """Return a copy of the tensors in which a third of the elements has changed."""
    new = {name: tensor.clone() for name, tensor in content.items()}
    for tensor in new.values():
        tensor.view(-1)[::3] *= 1.25
    return new


def journal_full_on_rank_1(folder: Path, scratch: Path, is_published: bool) -> None:
    """Check a delta under journal staging where the disk of rank 1 is full at the third storage that it keeps."""
    old = content_of(folder) if not is_published else logical_tensors(folder)
    new = drifted(old)
    delta = DeltaEncoder(old.items()).encode(new.items())
    if is_published:
        publish_encoded(scratch / "source", 1, delta)

    def refresh() -> list[ControlReqOutput]:
        if not is_published:
            return refresh_by_delta(engine, delta)
        places = {"local_checkpoint_dir": str(scratch / "local"), "source_dir": str(scratch / "source")}
        return [engine.control(PullWeightsReqInput, target_version=1, update_memory=True, **places)]

    with ParallelHarness(folder, weight_staging="journal", dtype=str(old[ROUTER].dtype)[6:], **EP2) as engine:
        victim = engine.schedulers[1].runner.state.model.weights
        with fails_on(victim, JournalStaging, "_keep", 3):
            answers = refresh()
        assert not answers[0].success and "no space left" in answers[0].message, answers
        assert not answers[-1].success
        require_content(engine, old)
        assert all(answer.success for answer in refresh())
        require_content(engine, new)
        assert check(engine, "checksum").data["digest"] == delta.digest


@pytest.mark.parametrize("is_published", [False, True])
def test_w04_a_delta_that_one_rank_cannot_stage_changes_nothing(
    folder: Path, tmp_path: Path, is_published: bool
) -> None:
    apart(journal_full_on_rank_1, folder, tmp_path, is_published)


def alias_after_a_failed_write(folder: Path) -> None:
    """Send tensors under two names each, where rank 1 cannot stage the first and so never compares the two."""
    content = content_of(folder)
    layer = "model.layers.1.mlp.experts."
    experts = [name for name in content if name.startswith(layer) and "down" not in name]
    stack = [torch.cat([content[f"{layer}{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in range(8)]
    fused = {f"{layer}gate_up_proj": torch.stack(stack)}
    with ParallelHarness(folder, weight_staging="journal", **EP2) as engine:
        victim = engine.schedulers[1].runner.state.model.weights
        assert engine.control(BeginWeightUpdateReqInput, weight_version="v1").success
        with fails_on(victim, JournalStaging, "_keep", 1):
            failed = send(engine, fused | {name: content[name] for name in experts})
        assert not failed.success and "no space left" in failed.message
        assert not engine.control(EndWeightUpdateReqInput).success
        require_content(engine, content)
        assert engine.control(BeginWeightUpdateReqInput, weight_version="v1").success
        assert send(engine, fused).success
        other = {name: content[name] + (name == experts[0]) for name in experts}
        refused = send(engine, other)
        assert not refused.success and "with other content" in refused.message and experts[0] in refused.message
        assert not engine.control(EndWeightUpdateReqInput).success
        require_content(engine, content)


def test_w04_one_rank_that_fails_does_not_leave_the_others_comparing_aliases(folder: Path) -> None:
    apart(alias_after_a_failed_write, folder)


@pytest.mark.parametrize("staging", ["host", "in_place"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_w04_a_delta_is_applied_part_by_part(folder: Path, layout: str, staging: str) -> None:
    """A delta on another base is refused before anything is written, whichever rank differs."""
    old = content_of(folder)
    new = drifted(old)
    delta = DeltaEncoder(old.items()).encode(new.items())
    with ParallelHarness(folder, weight_staging=staging, **LAYOUTS[layout]) as engine:
        for rank, name in ((1, SHARDED), (1, ROUTER), (0, EXPERT), (1, EXPERT)):
            for place in places(engine, rank, name):
                kept = place.read().clone()
                scribble(place)
                answers = refresh_by_delta(engine, delta)
                refused = [answer for answer in answers if name in answer.message]
                assert refused and refused[0].status_code == 409, answers
                assert not answers[-1].success
                assert torch.equal(place.read(), torch.full_like(kept, 1000.0))
                place.restore(kept)
                if staging == "in_place" and engine.scheduler.serving.poisoned:
                    raise AssertionError("a refused delta was written")
        require_content(engine, old)
        answers = refresh_by_delta(engine, delta, base_digest=delta.base_digest)
        assert all(answer.success for answer in answers), answers
        require_content(engine, new)
        assert check(engine, "checksum").data["digest"] == delta.digest


def test_w04_a_delta_goes_where_its_base_lies(folder: Path) -> None:
    """It cannot go to a placement that the update adopts; a delta that starts from a digest adopts none."""
    old = content_of(folder)
    new = drifted(old)
    delta = DeltaEncoder(old.items()).encode(new.items())
    counts_LE = np.random.default_rng(0).zipf(1.5, size=(2, 8)).astype(float)
    with ParallelHarness(folder, enable_eplb=True, **EP2) as engine:
        for scheduler in engine.schedulers:
            control_of(scheduler)._adoption._loads = lambda: counts_LE  # type: ignore[method-assign]
        answers = refresh_by_delta(engine, delta)
        assert answers[0].status_code == 409 and "adopts a placement" in answers[0].message
        assert not answers[-1].success
        require_content(engine, old)
        answers = refresh_by_delta(engine, delta, base_digest=delta.base_digest)
        assert all(answer.success for answer in answers), answers
        assert not answers[-1].data["placement_adopted"]
        require_content(engine, new)
