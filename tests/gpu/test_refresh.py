"""A refresh of an engine on the device: whole or nothing, in place, under captured graphs and while requests run.

Tensors are handed in where a transport would deliver them, from memory of the host or of the device; everything after
that is the engine's.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    WeightsCheckerReqInput,
)
from rollout.kernels.row_places import ROW_FORMS, RowsPlace
from rollout.model.weight_loading import weight_tensors
from tests.gpu.engines import checkpoint, engine
from tests.local_refresh import deliver, refresh
from tests.loopback_updater import layout_of, packed
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness
from tests.unit.weight_sync.test_take_pairs import NAME, OneMatrix, expected, in_a_bucket, matrix, planned, sent_as
from weight_sync import take_pairs
from weight_sync.content import TensorTable
from weight_sync.errors import CommitError, WeightSyncError
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.held_memory import Areas
from weight_sync.plan import Planner
from weight_sync.staging import StagingMode
from weight_sync.tensor_meta import TensorMeta
from weight_sync.transaction import WeightTransaction, new_staging

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8]]
PARAMS = {"max_new_tokens": 12}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    return [checkpoint(base / f"v{seed}", device, seed=seed) for seed in (1, 2)]


@pytest.fixture(params=["from the host", "from the device"])
def new(request: pytest.FixtureRequest, folders: list[Path], device: torch.device) -> Tensors:
    where = "cpu" if request.param == "from the host" else device
    return {name: tensor.to(where) for name, tensor in logical_tensors(folders[1]).items()}


def started(folders: list[Path], device: torch.device, version: int = 0, **settings: Any) -> Harness:
    return engine(folders[version], device, weight_version=f"v{version + 1}", **settings)


def said(harness: Harness) -> list[tuple[list[int], list[float], bytes]]:
    """Generate tokens, log-probabilities and rows of experts, without a match in the prefix cache."""
    results = harness.generate(PROMPTS, PARAMS, extra_key=f"k{harness._count}")
    return [(one.token_ids, one.logprobs, one.routes.tobytes()) for one in results]


def digest_of(tensors: Tensors) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t.cpu())) for n, t in tensors.items())


def addresses(harness: Harness) -> list[int]:
    return [tensor.data_ptr() for tensor in weight_tensors(harness.scheduler.runner.state.model)]


@pytest.mark.parametrize("staging", ["host", "device", "journal", "in_place"])
def test_a_refresh_is_a_fresh_start_with_the_new_weights(
    staging: str, folders: list[Path], new: Tensors, device: torch.device, facts: dict[str, Any]
) -> None:
    """The refreshed engine gives the bits of a fresh one, at the same addresses, with the graphs captured before."""
    harness = started(folders, device, weight_staging=staging)
    old_words, old_addresses = said(harness), addresses(harness)
    answer = refresh(harness, new, "v2")
    assert answer.success, answer.message
    facts["stall, ms"] = 1e3 * (answer.data.get("stall_seconds") or 0.0)
    assert harness.control(WeightsCheckerReqInput).data["digest"] == digest_of(new)
    assert addresses(harness) == old_addresses
    new_words = said(harness)
    assert new_words != old_words and new_words == said(started(folders, device, version=1))
    harness.check_idle()


@pytest.mark.parametrize("staging", ["host", "device", "journal", "in_place"])
def test_planned_buckets_leave_the_bits_that_were_sent(
    staging: StagingMode, folders: list[Path], new: Tensors, device: torch.device, facts: dict[str, Any]
) -> None:
    """Two buckets of half of the tensors each, replayed, with a vote that is lost between two that are won."""
    weights = started(folders, device).scheduler.runner.state.model.weights
    old = {name: tensor.to(new[name].device) for name, tensor in logical_tensors(folders[0]).items()}
    planner, memory = Planner(TensorTable(weights.metas()), {}), Areas(keep=True)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in new.items()]
    layouts = [layout_of(half) for half in (metas[::2], metas[1::2])]
    served = old
    for tensors, vote in ((new, True), (old, False), (old, True), (new, True)):
        if staging == "in_place" and not vote:
            continue
        stage = new_staging(weights, staging, memory=memory, device=device, homes=planner.homes(weights))
        transaction = WeightTransaction(weights, "v", staging=stage, planner=planner)
        transaction.announce(metas, layouts=layouts)
        for layout in layouts:
            transaction.receive(packed(layout, [(meta.name, tensors[meta.name]) for meta in layout.metas]))
        transaction.verify()
        with contextlib.suppress(CommitError):
            transaction.commit(lambda mine, vote=vote: mine and vote)
            transaction.close()
        assert transaction.torn is None
        served = tensors if vote else served
        for name, tensor in served.items():
            for place in weights.places(name):
                assert torch.equal(place.read().cpu(), tensor.cpu()), (name, vote)
        wanted = [fingerprint(tensors[name].cpu()) for name in weights.metas()]
        assert transaction.contents.held_values.tolist() == wanted
    facts["planned in each bucket"] = [len(plan.names) for plan in planner.plans(weights, layouts, cast=False)]
    assert sum(facts["planned in each bucket"]) == len(new), "a tensor came by itself"


FAULTS = ("nan", "shape", "missing", "unknown", "fingerprint")


def spoiled(new: Tensors, fault: str) -> Tensors:
    name = sorted(new)[3]
    if fault == "nan":
        return new | {name: torch.full_like(new[name], float("nan"))}
    if fault == "shape":
        return new | {name: new[name].repeat_interleave(2, -1)}
    if fault == "missing":
        return {key: tensor for key, tensor in new.items() if key != name}
    if fault == "unknown":
        return new | {"model.layers.9.nothing": new[name]}
    return new | {name: new[name] + 1e-3}


def manifest(tensors: Tensors) -> list[dict[str, Any]]:
    return [
        {"name": n, "dtype": str(t.dtype), "shape": list(t.shape), "fingerprint": fingerprint_hex(fingerprint(t.cpu()))}
        for n, t in tensors.items()
    ]


@pytest.mark.parametrize("staging", ["host", "device", "journal"])
def test_a_refused_refresh_changes_no_bit(
    staging: str, folders: list[Path], new: Tensors, device: torch.device
) -> None:
    harness = started(folders, device, weight_staging=staging)
    before = said(harness)
    for fault in FAULTS:
        stated = {"manifest": manifest(new)} if fault == "fingerprint" else {}
        begun = harness.control(BeginWeightUpdateReqInput, weight_version="v2", **stated)
        assert begun.success, begun.message
        with contextlib.suppress(WeightSyncError):
            deliver(harness, spoiled(new, fault))
        assert not harness.control(EndWeightUpdateReqInput).success, fault
        harness.control(AbortWeightUpdateReqInput)
        assert harness.control(GetStateReqInput).data["weight_version"] == "v1"
        assert said(harness) == before, fault
    assert refresh(harness, new, "v2").success, "what was refused spoils nothing"
    assert said(harness) == said(started(folders, device, version=1))


def test_running_requests_say_which_weights_made_each_token(
    folders: list[Path], new: Tensors, device: torch.device
) -> None:
    """The tokens before the commit match an engine that is never refreshed."""
    harness, undisturbed = started(folders, device), started(folders, device)
    params = {"max_new_tokens": 80}
    rids = [harness.submit(prompt, params=params) for prompt in PROMPTS]
    for _ in range(10):
        harness.tick()
    assert refresh(harness, new, "v2").success
    harness.run()
    for rid, want in zip(rids, undisturbed.generate(PROMPTS, params), strict=True):
        result = harness.results[rid]
        (first, start, changed), (second, again, end) = result.versions
        assert (first, start, second, end) == ("v1", 0, "v2", 80) and changed == again
        assert 0 < changed < 80
        assert result.token_ids[:changed] == want.token_ids[:changed]
        assert result.logprobs[:changed] == want.logprobs[:changed]
        assert result.logprobs[changed:] != want.logprobs[changed:]
    harness.check_idle()


def test_many_refreshes_one_after_another_leave_no_memory_behind(
    folders: list[Path], device: torch.device, facts: dict[str, Any]
) -> None:
    harness = started(folders, device, weight_staging="device")
    versions = [
        {name: tensor.to(device) for name, tensor in logical_tensors(folder).items()} for folder in folders[::-1]
    ]
    taken = []
    for turn in range(8):
        assert refresh(harness, versions[turn % 2], f"turn {turn}").success
        said(harness)
        taken.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    facts["bytes after each"] = taken
    assert taken[-1] <= taken[2], "memory grows with every refresh"
    assert said(harness) == said(started(folders, device))


@pytest.mark.parametrize("held", ["fp8", "int4"])
@pytest.mark.parametrize("sent_form", ["fp8 float32", "int4 32", "values bfloat16"])
def test_weights_with_scales_are_taken_by_tables_as_single_tensors_are(
    sent_form: str, held: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the storage, and the fingerprints of all parts; in a dry run by the interpreted kernel."""
    monkeypatch.setattr(take_pairs, "kernels_of", lambda device: import_module("weight_sync.pairs_gpu"))
    rows, (count, columns) = ROW_FORMS[held], (200, 352)
    sent = sent_as(sent_form, matrix(count, columns), torch.bfloat16)
    layout, content = in_a_bucket(sent.tensors, gap=4)
    live = RowsPlace(rows, rows.empty([count], columns, device), columns, torch.bfloat16)
    wanted = RowsPlace(rows, rows.empty([count], columns, "cpu"), columns, torch.bfloat16)
    plan = planned(OneMatrix(TensorMeta(NAME, torch.bfloat16, (count, columns)), live), layout, {NAME: rows.held})
    assert plan.pairs is not None and not plan.rest
    tables, storage = plan.pairs.tables, live.storage.view(torch.uint8).view(-1)
    found = tables.take(content.to(device), [storage])
    values, stored = expected(sent, rows.held)
    wanted.write(stored)
    assert torch.equal(live.storage.view(torch.uint8).cpu(), wanted.storage.view(torch.uint8))
    sums = [fingerprint(part) for part in sent.tensors.values()]
    assert found.sums[0].tolist() == [*sums, *[0] * (3 - len(sums)), fingerprint(values)]
    assert found.wrong.tolist() == [0]
