"""The rule for calls that bring tensors, row by row on a real scheduler; and that the table of the rule is complete.

Tensors are handed in where a process group would deliver them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rollout.control import weight_control
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ControlReqOutput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
)
from tests.local_refresh import control_of, updater_of
from tests.loopback_refresh import LoopbackTrainer
from tests.scheduler_harness import Harness
from weight_sync.update import WeightUpdate
from weight_sync.update_rule import (
    ALONE,
    JOIN,
    JOIN_SUM,
    OPEN,
    OPEN_SUM,
    REFUSE,
    RULE,
    Deed,
    Engine,
    Relation,
)

DOC = Path(__file__).resolve().parents[3] / "docs" / "reference" / "weights" / "index.md"


class Case:
    """An engine of one state, and an update that is open there, or not."""

    def __init__(self, folder: Path, trainer: LoopbackTrainer, engine: Engine, relation: Relation) -> None:
        self.harness = Harness(folder, weight_version="v1", enable_memory_saver=True)
        self.trainer = trainer
        names = sorted(trainer.tensors)
        self.parts = [names[first::3] for first in range(3)]
        self.update_id: str | None = None
        if engine is Engine.EMPTY:
            self.ok(ReleaseMemoryOccupationReqInput, tags=["weights"])
            self.ok(ResumeMemoryOccupationReqInput, tags=["weights"])
        if relation in (Relation.NEW_PAUSE, Relation.JOINED, Relation.SAME):
            self._leave_a_part(engine, relation)
        elif engine is Engine.PAUSED:
            self.ok(PauseGenerationReqInput)
        if relation is Relation.LOST:
            self.ok(BeginWeightUpdateReqInput)
            self.ok(AbortWeightUpdateReqInput)
        if relation in (Relation.BEGUN, Relation.FOREIGN):
            self.update_id = self.ok(BeginWeightUpdateReqInput, update_id="own")["update_id"]
            assert self.send(self.parts[0]).success
        if relation is Relation.FOREIGN:
            self.update_id = "another's"

    def _leave_a_part(self, engine: Engine, relation: Relation) -> None:
        """Send one part without begin; afterwards the engine is in the state."""
        if engine is not Engine.EMPTY:
            self.ok(PauseGenerationReqInput)
        opened = self.send(self.parts[0])
        assert opened.success
        if relation is Relation.SAME:
            self.update_id = opened.data["weight_update"]["update_id"]
        if relation is Relation.NEW_PAUSE:
            self.ok(PauseGenerationReqInput)
        if engine is not Engine.PAUSED:
            self.harness.scheduler.serving.resume()  # no call does that with an update open; a pause given up may

    def ok(self, verb: type, **fields: Any) -> dict[str, Any]:
        answer = self.harness.control(verb, **fields)
        assert answer.success, answer.message
        return answer.data

    def send(self, names: list[str]) -> ControlReqOutput:
        return self.trainer.send(self.harness, names, "v2", self.update_id)

    @property
    def open(self) -> WeightUpdate | None:
        return updater_of(self.harness).update

    @property
    def label(self) -> str:
        return self.harness.scheduler.runner.state.epoch.weight_version


# --- what each deed is -----------------------------------------------------------------------------------------------


def refuses(case: Case) -> None:
    before, received = case.open, case.open and case.open.num_received
    answer = case.send(case.parts[1])
    assert answer.status_code == 409
    assert case.open is before and (before is None or before.num_received == received) and case.label == "v1"
    assert before is None or before.transaction.failure is None


def joins(case: Case) -> None:
    before = case.open
    assert before is not None and case.send(case.parts[1]).success
    assert case.open is before and before.num_received == len(case.parts[0]) + len(case.parts[1])
    assert case.send(case.parts[2]).success and case.open is before and case.label == "v1", "another call settles it"
    assert case.send(case.parts[0]).status_code == 400
    assert case.open is before and before.transaction.failure is not None, "a failure spoils it"


def opens(case: Case) -> None:
    before = case.open
    assert case.send(case.parts[0]).success
    opened = case.open
    assert opened is not None and opened is not before and opened.transaction.coverage == "full"
    assert opened.num_received == len(case.parts[0]) and opened.is_implicit and case.label == "v1"
    if before is not None and before.id is not None:
        assert updater_of(case.harness).outcome(before.id).kind == "lost"
    for part in case.parts[1:]:
        assert case.send(part).success and case.open is opened and case.label == "v1"
    case.ok(ContinueGenerationReqInput)
    assert case.label == "v2" and case.open is None


def is_alone(case: Case) -> None:
    label = f"v2~{len(case.parts[1])}of{len(case.trainer.tensors)}"
    had_none = case.open is None
    assert case.send(case.parts[1]).success
    assert case.open is None and case.label == label
    case.trainer.failure = RuntimeError("the peer is gone")
    assert not case.send(case.parts[2]).success
    assert case.open is None and case.label == label, "a failure drops it"
    after = case.send(case.parts[2])
    assert after.success == had_none and case.open is None
    assert had_none or "an earlier weight update was dropped" in after.message, "the one that was left is a loss"


def opens_a_sum(case: Case) -> None:
    assert case.send(case.parts[0]).success
    opened = case.open
    assert opened is not None and opened.transaction.coverage == "full" and opened.num_received == len(case.parts[0])
    adds_to_a_sum(case)


def adds_to_a_sum(case: Case) -> None:
    before = case.open
    assert before is not None and case.send(case.parts[1]).success
    assert case.open is before and case.label == "v1"
    assert case.send(case.parts[2]).success
    assert case.open is None and case.label == "v2", "the call that completes it settles it"


CHECKS: Mapping[Deed, Callable[[Case], None]] = {
    REFUSE: refuses,
    JOIN: joins,
    OPEN: opens,
    ALONE: is_alone,
    OPEN_SUM: opens_a_sum,
    JOIN_SUM: adds_to_a_sum,
}
EVERY = list(product(Engine, Relation))
IDS = [f"{engine.name}-{relation.name}" for engine, relation in EVERY]


@pytest.mark.parametrize(("engine", "relation"), EVERY, ids=IDS)
def test_each_row_of_the_rule_is_what_the_engine_does(
    folders: list[Path], trainer: LoopbackTrainer, engine: Engine, relation: Relation
) -> None:
    case = Case(folders[0], trainer, engine, relation)
    updater, weights = updater_of(case.harness), control_of(case.harness)._weights
    assert weight_control._engine_state(case.harness.scheduler.serving) is engine
    assert updater.relation(case.update_id, "v2", weights._leases.num_pauses) is relation
    CHECKS[RULE[engine, relation]](case)


@pytest.mark.parametrize("relation", [Relation.FIRST, Relation.JOINED], ids=lambda relation: relation.name)
def test_a_failed_call_drops_a_sum_and_the_next_is_refused(
    folders: list[Path], trainer: LoopbackTrainer, relation: Relation
) -> None:
    case = Case(folders[0], trainer, Engine.EMPTY, relation)
    trainer.failure = RuntimeError("the peer is gone")
    assert not case.send(case.parts[1]).success
    assert case.open is None and case.label == "v1"
    assert case.send(case.parts[1]).status_code == 409


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_rule_covers_every_combination_and_every_effect() -> None:
    assert set(RULE) == set(EVERY) and len(EVERY) == 21
    assert set(RULE.values()) == set(CHECKS)


def test_the_reference_shows_the_rule() -> None:
    """The page has one row a relation, and the effect in each state of the engine."""
    text = DOC.read_text()
    effects = dict(re.findall(r"^\* \*\*([a-z ]+)\*\*: (.+?)\.$", text, re.MULTILINE))
    found = {}
    for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE):
        cells = row.split(" | ")
        relation = next((one for one in Relation if one.value == cells[0]), None)
        for engine, effect in zip(Engine, cells[1:]) if relation is not None else ():
            found[engine, relation] = effects[effect]
    assert found == {key: deed.effect for key, deed in RULE.items()}


def test_an_update_with_begin_is_settled_by_end_in_every_state(folders: list[Path], trainer: LoopbackTrainer) -> None:
    for engine in Engine:
        case = Case(folders[0], trainer, engine, Relation.BEGUN)
        for part in case.parts[1:]:
            assert case.send(part).success
        assert case.open is not None and case.label == "v1"
        case.ok(EndWeightUpdateReqInput, update_id="own")
        assert case.label == "v2"
