"""The load recorder and the expert map in a real scheduler: same rows as the capture, versions, replicas, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.load_dump import LoadDump
from rollout.core.errors import StartupError
from rollout.core.messages.experts import (
    DumpExpertDistributionReqInput,
    GetExpertLoadsReqInput,
    GetExpertLocationReqInput,
    StartExpertDistributionReqInput,
    StopExpertDistributionReqInput,
)
from rollout.core.messages.io_struct import GetStateReqInput
from tests.late_loop import loop  # noqa: F401
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.scheduler_harness import Harness, Result
from weight_sync.fingerprint import fingerprint
from weight_sync.tensor_meta import parts_of

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [40, 41, 42, 43]]
LAYERS, EXPERTS, TOP_K = 2, 8, 3
PERMUTED = [[7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 7], [1, 0, 3, 2, 5, 4, 7, 6, 3, 3, 3]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("experts") / "model", seed=3)


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return logical_tensors(tiny_checkpoint(tmp_path_factory.mktemp("experts") / "new", seed=4))


def start(harness: Harness, **fields: Any) -> None:
    answer = harness.control(StartExpertDistributionReqInput, **fields)
    assert answer.success, answer.message


def dump(harness: Harness, **fields: Any) -> LoadDump:
    answer = harness.control(DumpExpertDistributionReqInput, **fields)
    assert answer.success, answer.message
    return LoadDump.from_message(answer.data["dump"])


def counts_of(results: list[Result]) -> np.ndarray:
    """Count each expert in the rows that the capture returned, int64 [L, E]."""
    counts = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
    for result in results:
        for layer in range(LAYERS):
            counts[layer] += np.bincount(result.routes[:, layer].ravel(), minlength=EXPERTS)
    return counts


def outcome(results: list[Result]) -> list[tuple]:
    return [(result.token_ids, result.logprobs, result.routes.tolist()) for result in results]


def test_loads_by_expert_are_of_the_last_passes(folder: Path) -> None:
    harness = Harness(folder)
    assert "nothing was recorded" in harness.control(GetExpertLoadsReqInput, window=100).message
    start(harness)
    results = harness.generate(PROMPTS, params={"max_new_tokens": 7})
    whole = harness.control(GetExpertLoadsReqInput, window=100).data
    assert whole["expert_loads"] == counts_of(results).tolist() and whole["num_passes"] > 2
    last = harness.control(GetExpertLoadsReqInput, window=1).data
    assert last["num_passes"] == 1 and 0 < np.sum(last["expert_loads"]) < np.sum(whole["expert_loads"])


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [-1, 3])
@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_the_record_is_what_the_capture_returned(folder: Path, mode: str, chunk: int) -> None:
    harness = Harness(folder, chunked_prefill_size=chunk)
    harness.generate(PROMPTS)  # not recorded
    harness.scheduler.cache.flush()
    start(harness, mode=mode)
    results = harness.generate(PROMPTS, params={"max_new_tokens": 7})
    assert harness.control(StopExpertDistributionReqInput).success
    harness.generate([[100, 101]])  # not recorded either
    record = dump(harness)
    assert np.array_equal(record.tensors["logical_count"], counts_of(results))
    assert record.header["num_tokens"] == sum(len(result.routes) for result in results)
    if mode != "stat":
        by_pass = record.tensors["pass_logical_count"]
        assert np.array_equal(by_pass.sum(axis=0), counts_of(results))
        assert (by_pass.sum(axis=2) == record.tensors["pass_num_tokens"][:, None] * TOP_K).all()
    if mode == "per_token":
        tokens = record.tensors
        rows: dict[tuple[int, int], list] = {}
        for result in results:
            sequence = (result.prompt_ids + result.token_ids)[: len(result.routes)]
            for position, (token_id, row) in enumerate(zip(sequence, result.routes, strict=True)):
                rows.setdefault((token_id, position), []).append(row.tolist())
        listed = zip(
            tokens["token_id"].tolist(),
            tokens["token_position"].tolist(),
            tokens["token_experts"].tolist(),
            strict=True,
        )
        recorded: dict[tuple[int, int], list] = {}
        for token_id, position, row in listed:
            recorded.setdefault((token_id, position), []).append(row)
        assert {key: sorted(value) for key, value in recorded.items()} == {
            key: sorted(value) for key, value in rows.items()
        }


def test_recording_needs_no_capture_and_changes_nothing(folder: Path) -> None:
    plain = Harness(folder, enable_return_routed_experts=False)
    expected = [(r.token_ids, r.logprobs) for r in plain.generate(PROMPTS, params={"max_new_tokens": 6})]
    captured = counts_of(Harness(folder).generate(PROMPTS, params={"max_new_tokens": 6}))
    plain.scheduler.cache.flush()
    start(plain)
    results = plain.generate(PROMPTS, params={"max_new_tokens": 6})
    assert [(r.token_ids, r.logprobs) for r in results] == expected
    assert np.array_equal(dump(plain).tensors["logical_count"], captured)


def test_nothing_is_asked_of_routers_while_nothing_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(folder, enable_return_routed_experts=False)
    seen: list[int] = []
    capturer = harness.scheduler.runner._capturer
    monkeypatch.setattr(capturer, "record", lambda layer, ids: seen.append(layer))
    harness.generate(PROMPTS)
    assert not seen


def test_counts_are_stamped_and_drift_is_measured(folder: Path, new_weights: dict[str, torch.Tensor]) -> None:
    harness = Harness(folder, weight_version="v0")
    start(harness)
    prompts = [list(range(start, start + 30)) for start in range(0, 300, 30)]
    before = harness.generate(prompts)
    assert harness.control(GetStateReqInput).data["expert_distribution"]["drift"] is None
    assert refresh(harness, new_weights, "v1").success
    after = harness.generate(prompts)
    status = harness.control(GetStateReqInput).data["expert_distribution"]
    record = dump(harness)
    named = [(s["weight_version"], s["weight_epoch"], s["placement_epoch"]) for s in record.header["segments"]]
    assert named == [("v0", 0, 0), ("v1", 1, 0)]
    old, new = record.tensors["segment_logical_count"]
    assert np.array_equal(old, counts_of(before)) and np.array_equal(new, counts_of(after))
    (drift,) = record.header["drift"]
    assert status["drift"] == drift and (drift["from_weight_version"], drift["to_weight_version"]) == ("v0", "v1")
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (old, new)]
    assert np.allclose(drift["total_variation"], np.abs(shares[0] - shares[1]).sum(axis=1) / 2)
    assert all(m > 2 * c for m, c in zip(drift["total_variation"], drift["expected_by_chance"], strict=True))


# --- verbs ------------------------------------------------------------------------------------------------------------


def test_the_life_of_a_record(folder: Path) -> None:
    harness = Harness(folder, expert_distribution_recorder_mode="per_pass")
    for verb in (StopExpertDistributionReqInput, DumpExpertDistributionReqInput):
        refused = harness.control(verb)
        assert not refused.success and refused.status_code == 409
    assert harness.control(GetStateReqInput).data["expert_distribution"] is None
    assert harness.control(StartExpertDistributionReqInput).data == {"mode": "per_pass", "num_passes_dropped": 0}
    harness.generate(PROMPTS, params={"max_new_tokens": 4})
    again = harness.control(StartExpertDistributionReqInput)
    assert again.success and "Already" in again.message
    other = harness.control(StartExpertDistributionReqInput, mode="stat")
    assert not other.success and other.status_code == 409
    kept = dump(harness, reset=False)
    assert kept.header["num_passes"] == 4 and dump(harness).header == kept.header
    assert dump(harness).header["num_passes"] == 0
    harness.generate(PROMPTS, params={"max_new_tokens": 4})
    assert harness.control(StopExpertDistributionReqInput).data == {"mode": "per_pass", "num_passes": 4}
    too_long = harness.control(DumpExpertDistributionReqInput, max_numbers=10)
    assert not too_long.success and too_long.status_code == 413
    assert dump(harness, reset=False).header["num_passes"] == 4
    restarted = harness.control(StartExpertDistributionReqInput, mode="stat")
    assert restarted.data == {"mode": "stat", "num_passes_dropped": 4}


# --- redundant experts ------------------------------------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {"ep_num_redundant_experts": 5},
    {"ep_num_redundant_experts": 3, "init_expert_location": json.dumps({"physical_to_logical_map": PERMUTED})},
    {"ep_num_redundant_experts": 8, "init_expert_location": json.dumps({"logical_count": [[1, 9] * 4, [7, 1] * 4]})},
]


def slots_differ(harness: Harness) -> list[str]:
    """Return the names of tensors whose slots hold different bytes."""
    weights = harness.scheduler.runner.state.model.weights
    return [
        name for name in weights.metas() if len({fingerprint(part.content) for part in parts_of(weights, name)}) > 1
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"disable_native_kernels": True, "dtype": "float64"}])
def test_redundant_experts_change_no_bit(
    folder: Path, new_weights: dict[str, torch.Tensor], layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    plain, replicated = Harness(folder, **settings), Harness(folder, **settings | layout)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    incoming = {name: tensor.to(dtype) for name, tensor in new_weights.items()}
    params = {"max_new_tokens": 5}
    assert outcome(replicated.generate(PROMPTS, params)) == outcome(plain.generate(PROMPTS, params))
    assert not slots_differ(replicated)
    slots = EXPERTS + layout["ep_num_redundant_experts"]
    expert = "model.layers.1.mlp.experts.0.down_proj.weight"
    places = replicated.scheduler.runner.state.model.weights.places(expert)
    assert len(places) == replicated.scheduler.runner.state.placement.metadata.physical_to_logical_map[
        0
    ].tolist().count(0)
    before = places[-1].read().clone()
    for harness in (plain, replicated):
        assert refresh(harness, incoming, "v1").success
    assert outcome(replicated.generate(PROMPTS, params)) == outcome(plain.generate(PROMPTS, params))
    assert not slots_differ(replicated) and not torch.equal(places[-1].read(), before)
    assert replicated.scheduler.runner.state.placement.num_physical_experts == slots
    assert replicated.ready.model_bytes > plain.ready.model_bytes
    digests = [h.control(GetStateReqInput).data["content_digest"] for h in (plain, replicated)]
    assert digests[0] == digests[1]


def test_the_current_map_starts_another_engine(folder: Path, tmp_path: Path) -> None:
    first = Harness(folder, **LAYOUTS[1])
    answer = first.control(GetExpertLocationReqInput)
    located = answer.data
    assert located["physical_to_logical_map"] == PERMUTED and located["placement_epoch"] == 0
    assert located["moe_layer_ids"] == [1, 2] and located["num_physical_experts"] == 11
    for slots, experts in zip(located["physical_to_logical_map"], located["logical_to_physical_map"], strict=True):
        assert [slots[slot] for slot in experts] == list(range(EXPERTS))
    path = tmp_path / "location.json"
    path.write_text(json.dumps(located))
    second = Harness(folder, ep_num_redundant_experts=3, init_expert_location=str(path))
    assert second.control(GetExpertLocationReqInput).data == located


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"init_expert_location": "nowhere.json"}, "JSON text or a file"),
        (
            {"init_expert_location": json.dumps({"physical_to_logical_map": PERMUTED})},
            r"shape \[2, 11\].*need \[2, 8\]",
        ),
        ({"init_expert_location": '{"logical_count": [[1, 2]]}'}, r"needs \[2, 8\]"),
    ],
)
def test_what_does_not_fit_the_model_stops_the_start(folder: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError, match=f"--init-expert-location: .*{text}"):
        Harness(folder, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"init_expert_location": "{}"},
        {"ep_num_redundant_experts": 2},
        {"expert_distribution_recorder_mode": "stat"},
    ],
)
def test_a_dense_model_has_no_experts(tmp_path: Path, settings: dict[str, Any]) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", "dense")
    with pytest.raises(StartupError, match="Qwen3ForCausalLM has no experts"):
        Harness(dense, enable_return_routed_experts=False, **settings)
    harness = Harness(dense, enable_return_routed_experts=False)
    for verb in (
        StartExpertDistributionReqInput,
        StopExpertDistributionReqInput,
        DumpExpertDistributionReqInput,
        GetExpertLocationReqInput,
    ):
        refused = harness.control(verb)
        assert not refused.success and refused.status_code == 400 and "no experts" in refused.message
    assert harness.generate([[1, 2, 3]], params={"max_new_tokens": 2})[0].token_ids
