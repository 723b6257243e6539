"""Random histories of an engine of several ranks: steps, rebalances, refreshes, pauses, and errors of one rank.

After every operation the ranks are looked at from inside (`World.check`), and at the end they generate what one rank
generates with the content that was last committed.  Engines that are wrong on purpose must be caught by the same look.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from eplb.placement import ExpertPlacement
from eplb.transfer import ExpertTransfer
from rollout.control.weight_control import WeightControl
from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import PullWeightsReqInput, UpdateWeightsFromDiskReqInput
from rollout.layers.moe.router import TopKRouter
from rollout.model.weight_loading import WeightIndex
from tests.model_zoo import tiny_checkpoint
from tests.parallel_world import World
from tests.published_versions import write_checkpoint
from tests.tiers import examples
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_encoded
from weight_sync.homes import Homes
from weight_sync.shadow import ShadowStaging
from weight_sync.tensor_meta import Place

EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 ranks": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4},
    "2 ranks, dp": {
        "tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2, "ep_num_redundant_experts": 4,
        "moe_a2a_backend": "all_to_all",
    },
    "4 ranks": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4, "ep_num_redundant_experts": 4},
    "4 ranks, split experts": {"tp_size": 4, "ep_size": 2, "ep_num_redundant_experts": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    return tiny_checkpoint(path, "moe_dense_first", seed=5, dtype="float64")


class Ranks(RuleBasedStateMachine):
    """`open`: the content of the weight update under way, None while there is none."""

    folder: ClassVar[Path]
    scratch: ClassVar[Path]
    layout: ClassVar[dict[str, Any]]

    @initialize()
    def start(self) -> None:
        self.world = World(self.folder, **self.layout)
        self.first = self.world.content  # what published deltas start from
        self.open: dict[str, torch.Tensor] | None = None
        self.paused = False
        self.rids: list[str] = []
        self.patches = pytest.MonkeyPatch()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.open is not None:
                self.end_or_abort(False)
            if self.paused:
                self.go_on()
            self.world.engine.run()
            self.world.compare()
            self.check_requests()
            self.world.engine.check_idle()
        finally:
            self.patches.undo()
            self.world.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    @rule(length=st.integers(1, 40), new=st.integers(1, 30), rank=st.integers(0, 1))
    def submit(self, length: int, new: int, rank: int) -> None:
        rank %= self.world.engine.num_dp_ranks
        prompt = [(length * 7 + i) % 300 for i in range(length)]
        self.rids.append(self.world.engine.submit(prompt, params={"max_new_tokens": new}, dp_rank=rank))

    @rule(turns=st.integers(1, 5))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.world.engine.tick()

    @precondition(lambda self: not self.paused and self.open is None)
    @rule(mode=st.sampled_from(("retract", "in_place")))
    def pause(self, mode: str) -> None:
        assert self.world.engine.control(PauseGenerationReqInput, mode=mode).success
        self.paused = True

    @precondition(lambda self: self.paused and self.open is None)
    @rule()
    def go_on(self) -> None:
        assert self.world.engine.control(ContinueGenerationReqInput).success
        self.paused = False

    # --- refreshes --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.open is None)
    @rule(adopt=st.booleans(), partial=st.booleans())
    def begin(self, adopt: bool, partial: bool) -> None:
        names = [EXPERT, "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"] if partial else None
        self.open = self.world.drifted(names)
        if adopt:
            _give_loads(self.world, len(self.rids))
        begun = self.world.begin(coverage="partial" if partial else "full", adopt_placement=adopt)
        assert begun.success, begun.message

    @precondition(lambda self: self.open is not None)
    @rule(commit=st.booleans())
    def end_or_abort(self, commit: bool) -> None:
        tensors, self.open = self.open, None
        assert tensors is not None
        if not commit:
            assert self.world.abort().success
            return
        for answer in self.world.send(tensors):
            assert answer.success, answer.message
        ended = self.world.end(tensors)
        assert ended.success, ended.message

    @precondition(lambda self: self.open is not None)
    @rule(fault=st.sampled_from(("nan", "missing", "write", "prepare", "commit")), victim=st.integers(0, 3))
    def end_badly(self, fault: str, victim: int) -> None:
        tensors, self.open = self.open, None
        assert tensors is not None
        sent = dict(tensors)
        if fault == "nan":
            sent[EXPERT] = sent[EXPERT] * float("nan")
        elif fault == "missing":
            del sent[EXPERT]
        else:
            self.break_staging(fault, victim)
        answers = self.world.send(sent)
        ended = self.world.end(sent)
        self.patches.undo()
        if fault == "missing" and len(tensors) < len(self.world.content):
            assert ended.success  # a partial update: what came is the whole of it
            return
        assert not ended.success, (fault, [answer.message for answer in answers])

    @precondition(lambda self: self.open is None)
    @rule(delta=st.booleans())
    def from_disk(self, delta: bool) -> None:
        tensors = self.world.drifted()
        place = Path(tempfile.mkdtemp(dir=self.scratch))
        version = place.name
        if delta:
            publish_encoded(place / "source", 1, DeltaEncoder(self.first.items()).encode(tensors.items()))
            verb = {"local_checkpoint_dir": f"{place}/local", "source_dir": f"{place}/source", "target_version": 1}
            answer = self.world.engine.control(PullWeightsReqInput, **verb, update_memory=True, weight_version=version)
        else:
            path = write_checkpoint(place / "checkpoint", tensors, (tuple(tensors),))
            (path / "config.json").unlink()
            answer = self.world.engine.control(
                UpdateWeightsFromDiskReqInput, model_path=str(path), weight_version=version
            )
        assert answer.success, answer.message
        self.world.committed(tensors, version)

    # --- placements -------------------------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 10**6), chunked=st.booleans())
    def rebalance(self, seed: int, chunked: bool) -> None:
        fields = {"layers_per_chunk": 1} if chunked else {}
        answer = self.world.rebalance(self.world.random_map(seed), **fields)
        if self.open is not None:
            assert not answer.success and answer.status_code == 409 and "weight update" in answer.message
        else:
            assert answer.success, answer.message

    @precondition(lambda self: self.open is None)
    @rule(seed=st.integers(0, 10**6), point=st.sampled_from(("stage", "check", "write")), victim=st.integers(0, 3))
    def rebalance_badly(self, seed: int, point: str, victim: int) -> None:
        self.break_transfer(point, victim)
        answer = self.world.rebalance(self.world.random_map(seed), layers_per_chunk=1)
        self.patches.undo()
        assert not answer.success or answer.data["decision"]["num_changed_slots"] == 0, answer.message

    @precondition(lambda self: self.open is None)
    @rule(seed=st.integers(0, 10**6), turns=st.integers(0, 3))
    def refresh_between_chunks(self, seed: int, turns: int) -> None:
        wanted = self.world.random_map(seed).tolist()
        request_id = self.world.engine.post(EplbRebalanceReqInput, physical_to_logical_map=wanted, layers_per_chunk=1)
        for _ in range(turns):
            self.world.engine.tick()
        self.open = self.world.drifted()
        begun = self.world.begin()
        assert begun.success, begun.message
        answer = self.world.engine.wait(request_id)
        assert answer.success or "weight" in answer.message, answer.message
        self.end_or_abort(True)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def check_requests(self) -> None:
        """Check that each token has one version, in order, and each token but the last a row of routes."""
        for rid in self.rids:
            result = self.world.engine.results[rid]
            assert result.finished is not None and result.finished.reason.type == "length"
            ends = [end for _, _, end in result.versions]
            starts = [start for _, start, _ in result.versions]
            assert starts == [0, *ends[:-1]] and ends[-1] == len(result.token_ids)
            assert len(result.routes) == len(result.prompt_ids) + len(result.token_ids) - 1

    # --- faults -----------------------------------------------------------------------------------------------------

    def break_staging(self, point: str, victim: int) -> None:
        engine = self.world.engine
        model = engine.schedulers[victim % len(engine.schedulers)].runner.state.model
        for name in ("write", "write_spans") if point == "write" else (point,):  # planned buckets, and others
            inner = getattr(ShadowStaging, name)

            def faulty(staging: ShadowStaging, *arguments: Any, inner: Any = inner) -> Any:
                if staging._weights._entries is model.weights._entries:  # type: ignore[attr-defined]
                    raise OSError("a fault of one rank")
                return inner(staging, *arguments)

            self.patches.setattr(ShadowStaging, name, faulty)

    def break_transfer(self, point: str, victim: int) -> None:
        name = {"stage": "stage_local", "check": "check", "write": "write_new"}[point]
        chunk_class = ExpertTransfer.run.__globals__["_ChunkOnRank"]
        inner = getattr(chunk_class, name)
        ep_rank = victim % self.world.engine.scheduler.parallel.layout.ep_size

        def faulty(chunk: Any) -> Any:
            if chunk._ep_rank == ep_rank:
                raise OSError("a fault of one rank")
            return inner(chunk)

        self.patches.setattr(chunk_class, name, faulty)


def _give_loads(world: World, seed: int) -> None:
    """Set the loads that a full refresh plans for when it adopts a placement."""
    counts_LE = np.random.default_rng(seed).zipf(1.5, size=(2, 8)).astype(float)
    for scheduler in world.engine.schedulers:
        _control_of(scheduler)._adoption._loads = lambda: counts_LE


def _control_of(scheduler: Any) -> WeightControl:
    return scheduler._verbs[PauseGenerationReqInput].__self__._weights


@pytest.mark.full(but="2 ranks, dp")
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_histories_keep_the_ranks_consistent(name: str, folder: Path, tmp_path: Path) -> None:
    machine = type("Machine", (Ranks,), {"folder": folder, "scratch": tmp_path, "layout": LAYOUTS[name]})
    histories = 8 if name.startswith("2") else 5
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(histories, gate=4),
            stateful_step_count=14,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        ),
    )


# --- engines that are wrong on purpose ------------------------------------------------------------------------------


def _initial_map_in_the_loader(patches: pytest.MonkeyPatch, world: World) -> None:
    """Find places by the map that was in force when the model was built."""
    first = [s.runner.state.placement.metadata for s in world.engine.schedulers]
    placements = [s.runner.state.placement for s in world.engine.schedulers]
    inner = ExpertPlacement._local_slots

    def stale(self: ExpertPlacement, metadata: Any, layer: int, expert: int) -> list[int]:
        return inner(self, first[placements.index(self)], layer, expert)

    patches.setattr(ExpertPlacement, "_local_slots", stale)


def _stale_staged_buffer(patches: pytest.MonkeyPatch, world: World) -> None:
    """Stage weights for the map in force although another one comes into force with them."""
    patches.setattr(WeightIndex, "under_proposed_placement", lambda self: self)


def _constant_places_key(patches: pytest.MonkeyPatch, world: World) -> None:
    """Keep the places of a refresh, and the plans for them, although experts have moved since."""
    patches.setattr(WeightIndex, "places_key", lambda self: self._is_proposed)


def _no_fence(patches: pytest.MonkeyPatch, world: World) -> None:
    """Move experts although a weight update is open."""
    patches.setattr(WeightControl, "under_way", None)
    for scheduler in world.engine.schedulers:
        for hook in scheduler.agenda.order:
            owner = getattr(hook, "__self__", None)
            if type(owner).__name__ == "EplbControl":
                patches.setattr(owner, "_weight_update", lambda: None)


def _only_the_first_replica_written(patches: pytest.MonkeyPatch, world: World) -> None:
    """Give the new weights only to the first slot of an expert in several."""
    states = [scheduler.runner.state for scheduler in world.engine.schedulers]
    inner = Homes.places

    def places(self: Homes, name: str) -> Sequence[Place]:
        weights: Any = self._weights
        placement = next((s.placement for s in states if s.model.weights._entries is weights._entries), None)
        if ".experts." in name and placement is not None:
            layer, expert = int(name.split(".")[2]) - 1, int(name.split(".")[5])
            first = placement.metadata.slots_of(layer, expert)[0]
            if first // placement.num_local_experts != placement.ep_rank:
                return ()
        return inner(self, name)

    patches.setattr(Homes, "places", places)


def _physical_ids_returned(patches: pytest.MonkeyPatch, world: World) -> None:
    inner = TopKRouter.show

    def show(self: TopKRouter, logical_ids_TK: torch.Tensor, hooks: Any) -> None:
        inner(self, self.placement.logical_to_physical(self.moe_layer, logical_ids_TK), hooks)

    patches.setattr(TopKRouter, "show", show)


def _replica_picked_per_rank(patches: pytest.MonkeyPatch, world: World) -> None:
    inner = ExpertPlacement.logical_to_physical

    def pick(self: ExpertPlacement, layer: int, logical_ids_TK: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        return inner(self, layer, logical_ids_TK, first_row + 7 * self.ep_rank)

    patches.setattr(ExpertPlacement, "logical_to_physical", pick)


WRONG = {
    "initial map in the loader": _initial_map_in_the_loader,
    "stale staged buffer": _stale_staged_buffer,
    "constant key of places": _constant_places_key,
    "no fence": _no_fence,
    "only the first replica written": _only_the_first_replica_written,
    "physical ids returned": _physical_ids_returned,
    "replica picked per rank": _replica_picked_per_rank,
}


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder, **LAYOUTS["2 ranks"])
    yield made
    made.close()


def story(world: World) -> None:
    """Run a rebalance and a full refresh, the same again, and a refresh that adopts a placement.

    Another rebalance is requested while each refresh is open.
    """
    world.compare()
    for seed, adopt in ((1, False), (4, False), (4, True)):
        assert world.rebalance(world.random_map(seed)).success
        world.check()
        world.compare()
        tensors = world.drifted()
        _give_loads(world, 3)
        assert world.begin(adopt_placement=adopt).success
        assert all(answer.success for answer in world.send(tensors))
        world.rebalance(world.random_map(2))
        ended = world.end(tensors)
        assert ended.success and ended.data["placement_adopted"] is adopt
        world.check()
        world.compare()


def test_the_right_engine_passes_the_story(world: World) -> None:
    story(world)


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_is_caught(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[name](monkeypatch, world)
    with pytest.raises(AssertionError):
        story(world)
