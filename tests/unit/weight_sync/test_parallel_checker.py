"""The content of every place on every rank is compared and added up; ranks are threads over real gloo groups."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save

from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from rollout.kernels.places import ShardPlace, ViewPlace
from rollout.kernels.slot_places import SlotPlace
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from weight_sync.fingerprint import digest, fingerprint
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


def digest_of(tensors: Tensors) -> str:
    return digest((TensorMeta(name, t.dtype, tuple(t.shape)), fingerprint(t)) for name, t in tensors.items())


def check(engine: Harness, action: str, **fields: Any) -> ControlReqOutput:
    return engine.control(WeightsCheckerReqInput, action=action, **fields)


def places(engine: ParallelHarness, rank: int, name: str) -> Sequence[Place]:
    return engine.schedulers[rank].runner.state.model.weights.places(name)


def scribble(place: Place, value: float = 1000.0) -> None:
    place.restore(torch.full_like(place.read(), value))


def replicated(engine: ParallelHarness) -> str:
    """Return the name of an expert's matrix that both ranks hold."""
    names = (f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(8))
    return next(name for name in names if places(engine, 0, name) and places(engine, 1, name))


def send(engine: Harness, tensors: Tensors) -> ControlReqOutput:
    payload = bytearray(save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    return engine.control(UpdateWeightsFromTensorReqInput, payload=payload, format="safetensors")


@pytest.mark.parametrize("what", ["replica of an expert", "router", "shard"])
@pytest.mark.parametrize("keep_content", [False, True])
def test_w06_a_wrong_copy_on_another_rank_shows(
    engine: ParallelHarness, folder: Path, what: str, keep_content: bool
) -> None:
    name = {"replica of an expert": replicated(engine), "router": ROUTER, "shard": SHARDED}[what]
    old = content_of(folder)
    assert check(engine, "checksum").data["digest"] == digest_of(old)
    assert check(engine, "snapshot", keep_content=keep_content).success
    (place,) = places(engine, 1, name)
    scribble(place)
    compared = check(engine, "compare")
    (difference,) = compared.data["differing"]
    assert difference["name"] == name and name in compared.message and "rank 1" in compared.message
    assert difference["places"] == (("copy 0 on rank 1",))
    if keep_content:
        part = old[name] if place.region is None else place.region.of(old[name])
        assert difference["num_elements"] == part.numel()
        assert difference["max_abs_difference"] == (1000.0 - part).abs().max().item()
    else:
        assert difference["num_elements"] is difference["max_abs_difference"] is None
    found = check(engine, "checksum")
    if what == "shard":  # no other rank holds the same
        assert found.success and found.data["digest"] != digest_of(old) == found.data["expected_digest"]
    else:
        assert not found.success and found.status_code == 409
        assert name in found.message and "rank 1" in found.message
    assert check(engine, "compare", skip_tensor_list=[name]).data["equal"]
    assert check(engine, "snapshot").success is (what == "shard")


def test_w06_a_wrong_copy_on_the_same_rank_shows(folder: Path) -> None:
    engine = Harness(folder, dtype="float64", ep_num_redundant_experts=4)
    weights = engine.scheduler.runner.state.model.weights
    name = next(name for name in weights.metas() if len(weights.places(name)) == 2)
    assert check(engine, "snapshot").success
    scribble(weights.places(name)[1])
    (difference,) = check(engine, "compare").data["differing"]
    assert (difference["name"], difference["places"]) == (name, ("copy 1 on rank 0",))
    found = check(engine, "checksum")
    assert not found.success and name in found.message and "copy 1 on rank 0" in found.message


def test_w06_a_base_digest_is_of_every_copy(engine: ParallelHarness, folder: Path) -> None:
    stated = digest_of(content_of(folder))
    scribble(places(engine, 1, ROUTER)[0])
    refused = engine.control(BeginWeightUpdateReqInput, base_digest=stated)
    assert not refused.success and refused.status_code == 409
    assert ROUTER in refused.message and "rank 1" in refused.message
    places(engine, 1, ROUTER)[0].restore(places(engine, 0, ROUTER)[0].read())
    assert engine.control(BeginWeightUpdateReqInput, base_digest=stated).success


@pytest.mark.parametrize("layout", LAYOUTS)
def test_w06_a_refresh_that_misses_a_place_is_found(folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After reset_tensors a refresh leaves out one place of the second rank, and compare finds it."""
    with ParallelHarness(folder, weight_staging="in_place", **LAYOUTS[layout]) as engine:
        content = content_of(folder)
        assert check(engine, "snapshot").success
        name = replicated(engine) if layout == "ep" else EXPERT
        missed = places(engine, 1, name)[0]
        missed_at = missed.read().data_ptr()
        write, moves = ViewPlace.write, SlotPlace.moves

        def forgets(place: ViewPlace, source: torch.Tensor) -> None:
            if place.read().data_ptr() != missed_at:
                write(place, source)

        def planned_elsewhere(place: SlotPlace, *of: Any) -> Any:
            return None if place.read().data_ptr() == missed_at else moves(place, *of)

        monkeypatch.setattr(SlotPlace, "moves", planned_elsewhere)  # so that this place is written by `write`
        for is_wrong in (True, False):
            assert check(engine, "reset_tensors").success
            assert engine.control(BeginWeightUpdateReqInput, weight_version="v1").success
            with mock.patch.object(ViewPlace, "write", forgets if is_wrong else write):
                assert send(engine, content).success
                assert engine.control(EndWeightUpdateReqInput).success
            found = check(engine, "compare").data
            assert found["equal"] is not is_wrong
            assert [entry["name"] for entry in found["differing"]] == [name] * is_wrong


def test_w06_a_checksum_is_one_exchange_of_numbers(engine: ParallelHarness, folder: Path) -> None:
    """This holds for any number of tensors; the largest of them would not fit into the exchange."""
    io = [scheduler.parallel.weight_io for scheduler in engine.schedulers]
    assert check(engine, "checksum").success
    for communicator in io:
        communicator.reset_counts()
    assert check(engine, "checksum").success
    for communicator in io:
        gathers = communicator.counts.pop("all_gather")
        assert gathers.calls <= 4 and not communicator.counts  # shares and the outcome, each with its sizes
        assert gathers.num_bytes < 100 * 2 * len(content_of(folder))


def apart(work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in a process of its own, which a wrong engine would end."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, f"the engine's process ended with {process.exitcode}"


def one_rank_cannot_read(folder: Path) -> None:
    content = content_of(folder)
    name = "model.layers.0.self_attn.k_proj.weight"
    with ParallelHarness(folder, **EP2) as engine:
        storage = places(engine, 1, name)[0].storage.data_ptr()
        read = ShardPlace.read

        def faulty(place: ShardPlace) -> torch.Tensor:
            if place.storage.data_ptr() == storage:
                raise OSError("a fault of one rank")
            return read(place)

        calls: list[tuple[type, dict[str, Any]]] = [
            (GetWeightsByNameReqInput, {"name": name, "truncate_size": 100}),
            (WeightsCheckerReqInput, {"action": "checksum"}),
            (WeightsCheckerReqInput, {"action": "snapshot", "keep_content": True}),
            (BeginWeightUpdateReqInput, {"base_digest": digest_of(content)}),
        ]
        for verb, fields in calls:
            with mock.patch.object(ShardPlace, "read", faulty):
                answer = engine.control(verb, **fields)
            assert not answer.success and "a fault of one rank" in answer.message, (verb, answer)
        for rows in (0, 3, 20, 1000):
            answer = engine.control(GetWeightsByNameReqInput, name=name, truncate_size=rows)
            assert answer.data["parameter"] == content[name][:rows].tolist()
        assert check(engine, "checksum").data["digest"] == digest_of(content)


def test_w04_one_rank_that_cannot_read_is_told_and_nobody_waits(folder: Path) -> None:
    apart(one_rank_cannot_read, folder)
