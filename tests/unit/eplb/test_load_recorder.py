"""The load recorder against a slow independent count, over random passes, refreshes and moves; windows and drift."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from safetensors import safe_open
from safetensors.numpy import load

from eplb import load_recorder
from eplb.expert_location import ExpertLocationMetadata, trivial_location
from eplb.load_dump import METADATA_KEY, LoadDump
from eplb.load_history import expected_by_chance, total_variation
from eplb.load_recorder import LoadRecorder
from eplb.load_windows import LoadWindows
from eplb.placement import ExpertPlacement
from tests.tiers import examples

LAYERS, EXPERTS, SLOTS, TOP_K = 2, 6, 8, 2


@dataclass(frozen=True)
class Facts:
    weight_version: str
    weight_epoch: int


def routes(seed: int, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices


def random_placement(seed: int) -> ExpertPlacement:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.cat([torch.arange(EXPERTS), torch.randint(EXPERTS, (SLOTS - EXPERTS,), generator=generator)])]
    rows = [rows[0][torch.randperm(SLOTS, generator=generator)] for _ in range(LAYERS)]
    return ExpertPlacement(ExpertLocationMetadata(torch.stack(rows), EXPERTS))


def move(placement: ExpertPlacement, seed: int) -> None:
    """Adopt another map in the same object, as an engine does."""
    placement.adopt(random_placement(seed).metadata)


def slow_counts(passes: list[torch.Tensor]) -> np.ndarray:
    counts = np.zeros((LAYERS, EXPERTS), dtype=np.int64)
    for ids_TLK in passes:
        for layer, ids_TK in enumerate(ids_TLK.unbind(1)):
            for expert in ids_TK.flatten().tolist():
                counts[layer, expert] += 1
    return counts


class RecorderMachine(RuleBasedStateMachine):
    """A recorder must agree with the noted segments, passes and tokens, and its slots with the map at their time."""

    recorder_type = LoadRecorder

    def __init__(self) -> None:
        super().__init__()
        self.placement = random_placement(0)
        self.recorder = self.recorder_type(LAYERS, EXPERTS, self.placement, "per_token", num_ranks=2)
        self.facts = Facts("v0", 0)
        self.noted: list[tuple] = []
        self.slots = np.zeros((LAYERS, SLOTS), dtype=np.int64)

    @rule(seed=st.integers(0, 1000), num_tokens=st.integers(1, 5))
    def step(self, seed: int, num_tokens: int) -> None:
        ids, inputs = routes(seed, num_tokens), torch.arange(num_tokens) + seed
        positions = torch.arange(num_tokens)
        self.recorder.note(ids, self.facts, inputs, positions)
        self.noted.append((ids.clone(), self.facts, self.placement.epoch, inputs.clone()))
        for layer in range(LAYERS):
            for expert in ids[:, layer].flatten().tolist():
                self.slots[layer, self.placement.table(layer)[expert]] += 1
        ids.zero_()  # the buffer of the next step
        inputs += 1  # the engine's own arrays advance in place
        positions += 1

    @rule(seed=st.integers(0, 1000))
    def rebalance(self, seed: int) -> None:
        move(self.placement, seed)

    @rule()
    def refresh(self) -> None:
        self.facts = Facts(f"v{self.facts.weight_epoch + 1}", self.facts.weight_epoch + 1)

    @rule()
    def relabel(self) -> None:
        self.facts = Facts(self.facts.weight_version + "'", self.facts.weight_epoch)

    @rule()
    def reset(self) -> None:
        self.recorder.reset()
        self.noted.clear()
        self.slots[:] = 0

    @rule()
    def dump(self) -> None:
        dump = self.recorder.dump({})
        header, tensors = dump.header, dump.tensors
        assert header["num_passes"] == len(self.noted)
        assert np.array_equal(tensors["logical_count"], slow_counts([item[0] for item in self.noted]))
        groups: dict[int, list] = {}
        stamps: list[tuple] = []
        for ids, facts, epoch, _ in self.noted:
            stamp = (facts.weight_version, facts.weight_epoch, epoch)
            if not stamps or stamps[-1] != stamp:
                stamps.append(stamp)
            groups.setdefault(len(stamps) - 1, []).append(ids)
        named = [(s["weight_version"], s["weight_epoch"], s["placement_epoch"]) for s in header["segments"]]
        assert named == stamps[-load_recorder.SEGMENTS_KEPT :]
        if not self.noted:
            return
        for index, passes in groups.items():
            assert np.array_equal(tensors["segment_logical_count"][index], slow_counts(passes))
        assert np.array_equal(tensors["segment_physical_count"].sum(axis=0), self.slots)
        rank_loads = self.slots.reshape(LAYERS, 2, -1).sum(axis=2)
        assert header["windows"][2]["rank_loads"] == rank_loads.tolist()
        for index, (ids, facts, epoch, _) in enumerate(self.noted):
            assert np.array_equal(tensors["pass_logical_count"][index], slow_counts([ids]))
            assert tensors["pass_weight_epoch"][index] == facts.weight_epoch
            assert tensors["pass_placement_epoch"][index] == epoch
        rows = torch.cat([item[0] for item in self.noted])
        assert np.array_equal(tensors["token_experts"], rows.numpy())
        assert np.array_equal(tensors["token_id"], torch.cat([item[3] for item in self.noted]).numpy())


def run(machine: type[RecorderMachine], histories: int = examples(30)) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=histories, stateful_step_count=30, deadline=None))


def test_the_recorder_counts_what_was_chosen() -> None:
    run(RecorderMachine)


class UsesTheMapOfTheDump(LoadRecorder):
    """A wrong recorder: it converts to slots under the placement at the time of the dump."""

    def dump(self, model):
        self._count_noted()
        now = load_recorder._Placed(self._placement.metadata.physical_to_logical_map, self._placement.split())
        self._placed = dict.fromkeys(self._placed, now)
        return super().dump(model)


class StampsLate(LoadRecorder):
    """A wrong recorder: it counts some passes later, under the version at that time."""

    def note(self, ids_TLK, facts, input_ids, positions):
        super().note(ids_TLK, facts, input_ids, positions)
        self._noted = [(ids, replace(stamp, facts=facts)) for ids, stamp in self._noted]


class KeepsTheEnginesArrays(LoadRecorder):
    """A wrong recorder: it keeps ids of tokens that the engine changes in place."""

    def note(self, ids_TLK, facts, input_ids, positions):
        super().note(ids_TLK, facts, input_ids, positions)
        if self._noted:
            ids, stamp = self._noted[-1]
            self._noted[-1] = ids, replace(stamp, tokens=(input_ids, positions))


class KeepsTheStepsBuffer(LoadRecorder):
    """A wrong recorder: it keeps routes uncopied, in a buffer that the next step overwrites."""

    def note(self, ids_TLK, facts, input_ids, positions):
        super().note(ids_TLK, facts, input_ids, positions)
        if self._noted:
            self._noted[-1] = ids_TLK, self._noted[-1][1]


class MixesLayers(LoadRecorder):
    """A wrong recorder: it counts the choices of all layers in one place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._layer_offsets = self._layer_offsets * 0


@pytest.mark.mutant
@pytest.mark.parametrize(
    "wrong", [UsesTheMapOfTheDump, StampsLate, KeepsTheEnginesArrays, KeepsTheStepsBuffer, MixesLayers]
)
def test_wrong_recorders_are_caught(wrong: type[LoadRecorder]) -> None:
    class Wrong(RecorderMachine):
        recorder_type = wrong

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run(Wrong, histories=500)  # until the first that catches it


# --- bounds -----------------------------------------------------------------------------------------------------------


def record(
    recorder: LoadRecorder, num_passes: int, num_tokens: int, facts: Facts = Facts("v", 0), seed: int = 0
) -> None:
    inputs = torch.zeros(num_tokens, dtype=torch.int64)
    for index in range(num_passes):
        recorder.note(routes(seed + index, num_tokens), facts, inputs, inputs)


def trivial(mode: load_recorder.RecorderMode, num_ranks: int = 1) -> LoadRecorder:
    return LoadRecorder(LAYERS, EXPERTS, ExpertPlacement(trivial_location(LAYERS, EXPERTS)), mode, num_ranks)


def test_what_is_dropped_is_reported() -> None:
    recorder = trivial("per_token")
    record(recorder, 1010, 1)
    record(recorder, 40, 2000)
    header, tensors = (dump := recorder.dump({})).header, dump.tensors
    assert header["num_passes"] == 1050 and header["num_passes_dropped"] == 50
    assert len(tensors["pass_number"]) == 1000 and tensors["pass_number"][0] == 50
    kept = header["num_tokens"] - header["num_tokens_dropped"]
    assert kept == len(tensors["token_id"]) == 32 * 2000 <= load_recorder.TOKENS_KEPT
    assert tensors["logical_count"].sum() == (1010 + 80_000) * LAYERS * TOP_K
    for epoch in range(70):
        record(recorder, 1, 1, Facts("v", epoch + 1))
    header = recorder.dump({}).header
    assert len(header["segments"]) == 64 and header["num_segments_dropped"] == 7
    assert header["segments"][-1]["weight_epoch"] == 70


def test_stat_keeps_no_passes_and_per_pass_no_tokens() -> None:
    for mode, absent in (("stat", ("pass_", "token_")), ("per_pass", ("token_",)), ("per_token", ())):
        recorder = trivial(mode)
        record(recorder, 3, 2)
        names = recorder.dump({}).tensors
        assert not [name for name in names if name.startswith(absent)] if absent else "token_experts" in names
    assert all(tensor.size for tensor in names.values())


def test_a_dump_of_nothing() -> None:
    for mode in load_recorder.MODES:
        dump = trivial(mode).dump({})
        assert not dump.tensors["logical_count"].any() and dump.header["segments"] == []
        assert dump.header["windows"][0]["rank_balancedness"] == [None, None]
        json.dumps(dump.to_json(), allow_nan=False)


# --- windows and drift ------------------------------------------------------------------------------------------------


def test_windows_hold_the_last_passes() -> None:
    windows, generator = LoadWindows(LAYERS, 2), torch.Generator().manual_seed(3)
    loads = torch.randint(0, 9, (1500, LAYERS, 4), generator=generator)
    for part in loads.split([1, 7, 992, 300, 200]):
        windows.add(part)
    for window in (10, 100, 1000):
        last = loads[-window:].double()
        ranks = last.view(window, LAYERS, 2, 2).sum(dim=3)
        assert torch.equal(windows.rank_loads(window), ranks.sum(dim=0).long())
        expected = ranks.mean(dim=2).sum(dim=0) / ranks.amax(dim=2).sum(dim=0)
        torch.testing.assert_close(windows.rank_balancedness(window), expected)
        slots = last.mean(dim=2).sum(dim=0) / last.amax(dim=2).sum(dim=0)
        torch.testing.assert_close(windows.slot_balancedness(window), slots)
    assert windows.num_passes(1000) == 1000


def test_balancedness_is_the_time_of_even_load_over_the_time_taken() -> None:
    windows = LoadWindows(1, 2)
    windows.add(torch.tensor([[[4, 0]], [[0, 12]]]))  # even in sum, but no rank ever waits less than half the time
    assert windows.rank_balancedness(10).item() == 0.5
    windows.add(torch.tensor([[[8, 8]]]))
    assert windows.rank_balancedness(10).item() == 16 / 24


def test_drift_follows_the_refresh() -> None:
    recorder = trivial("stat")
    record(recorder, 200, 20, Facts("v0", 0), seed=0)
    record(recorder, 100, 20, Facts("v1", 1), seed=1000)
    record(recorder, 100, 20, Facts("v1-renamed", 1), seed=2000)
    same = torch.zeros(20, LAYERS, TOP_K, dtype=torch.int64)
    inputs = torch.zeros(20, dtype=torch.int64)
    for _ in range(200):
        recorder.note(same, Facts("v2", 2), inputs, inputs)
    steady, collapsed = recorder.dump({}).header["drift"]
    assert (steady["from_weight_version"], steady["to_weight_version"]) == ("v0", "v1-renamed")
    assert steady["from_num_tokens"] == steady["to_num_tokens"] == 4000
    for measured, chance in zip(steady["total_variation"], steady["expected_by_chance"], strict=True):
        assert measured < 3 * chance < 0.05
    assert all(value > 0.8 for value in collapsed["total_variation"])
    assert recorder.status()["drift"] == collapsed


def test_chance_is_what_two_samples_of_one_distribution_differ_by() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(32))
    pairs = [(rng.multinomial(5000, shares), rng.multinomial(2000, shares)) for _ in range(400)]
    befores, afters = (torch.from_numpy(np.stack(side)) for side in zip(*pairs, strict=True))
    measured = total_variation(befores, afters).mean()
    expected = expected_by_chance(befores, afters).mean()
    assert abs(measured / expected - 1) < 0.05


def test_total_variation_is_half_the_summed_differences_of_shares() -> None:
    before, after = torch.tensor([[1, 1], [3, 1], [4, 0], [1, 0]]), torch.tensor([[5, 5], [1, 3], [0, 9], [0, 0]])
    distance = total_variation(before, after)
    assert distance[:3].tolist() == [0.0, 0.5, 1.0] and distance[3].isnan()


# --- forms ------------------------------------------------------------------------------------------------------------


def test_the_forms_say_the_same(tmp_path) -> None:
    recorder = trivial("per_token")
    record(recorder, 3, 4)
    dump = recorder.dump({"num_experts": EXPERTS})
    again = LoadDump.from_message(dump.to_message())
    assert again.header == dump.header and again.tensors.keys() == dump.tensors.keys()
    file = tmp_path / "dump.safetensors"
    file.write_bytes(again.to_safetensors())
    with safe_open(file, framework="numpy") as opened:
        assert json.loads(opened.metadata()[METADATA_KEY]) == dump.header
    stored, spelled = load(file.read_bytes()), dump.to_json()
    for name, tensor in dump.tensors.items():
        assert np.array_equal(stored[name], tensor) and stored[name].dtype == tensor.dtype
        assert spelled[name] == tensor.tolist()
    assert dump.num_numbers == sum(tensor.size for tensor in stored.values())
    assert not dump.header.keys() & dump.tensors.keys()


class SumsLayersFirst(LoadWindows):
    """A wrong recorder: it sums loads over layers, so that layers with opposite skews look even."""

    def rank_balancedness(self, window: int) -> torch.Tensor:
        loads_G = self._rank_loads[self._last(window)].double().sum(dim=(0, 1))
        return (loads_G.mean() / loads_G.max()).expand(self._rank_loads.shape[1])


class MeansOverLayers(LoadWindows):
    """A wrong recorder: it takes mean and maximum over layers, rank by rank."""

    def rank_balancedness(self, window: int) -> torch.Tensor:
        loads_SLG = self._rank_loads[self._last(window)].double()
        return loads_SLG.mean(dim=1).sum(dim=0) / loads_SLG.amax(dim=1).sum(dim=0)


def balancedness_is_right(windows_type: type[LoadWindows]) -> bool:
    windows = windows_type(2, 2)
    windows.add(torch.tensor([[[6, 0, 1, 1], [1, 2, 3, 2]]]))  # 6 : 2 in one layer, 3 : 5 in the other
    return windows.rank_balancedness(10).tolist() == pytest.approx([4 / 6, 4 / 5])


def test_75_balancedness_is_over_ranks_within_a_layer() -> None:
    assert balancedness_is_right(LoadWindows)
    assert not balancedness_is_right(SumsLayersFirst)
    assert not balancedness_is_right(MeansOverLayers)


class OneVersion:
    weight_version, weight_epoch = "v", 0


def test_counts_before_a_move_are_not_read_with_the_map_after_it() -> None:
    placement = ExpertPlacement(ExpertLocationMetadata(torch.tensor([[0, 1, 2, 3]]), 4))
    recorder = LoadRecorder(1, 4, placement, num_ranks=2)
    hot = torch.tensor([[[0]], [[0]], [[1]]])  # both experts on rank 0
    recorder.note(hot, OneVersion(), hot[:, 0, 0], hot[:, 0, 0])
    placement.adopt(ExpertLocationMetadata(torch.tensor([[0, 2, 1, 3]]), 4))
    recorder.note(hot, OneVersion(), hot[:, 0, 0], hot[:, 0, 0])
    dump = recorder.dump({})
    assert dump.tensors["segment_physical_count"].tolist() == [[[2, 1, 0, 0]], [[2, 0, 1, 0]]]
    assert dump.header["windows"][0]["rank_loads"] == [[5, 1]]
    assert dump.header["windows"][0]["rank_balancedness"] == [pytest.approx(3 / 5)]
