"""`RebalanceManager`: the stages of a rebalance, as a state machine without I/O, threads or a clock of its own.

    idle --due / asked--> planning --decided: no-----------------------------------> idle
                             |                                                         ^
                             '-----decided: yes--> moving --chunk--> moving --last-----+
                                                      '--refresh, failure: the rest is dropped

After every chunk a complete map is in force, so there is always something to stop at.  A chunk is only given out while
weights and placement are the ones that it was planned for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from eplb.algorithms.types import ExpertLayout, Plan
from eplb.decision import Decision, RebalancePolicy, measured_balance
from eplb.errors import MapError, RebalanceRefused
from eplb.load_history import LoadHistory
from eplb.migration import MigrationChunk

ASSUMED_BYTES_PER_S = 5e8  # until a chunk was timed: two ranks over gloo on two cores do 4.6e8 to 6.8e8


_ENDS_REMEMBERED = 16
_MEASURED = "balancedness_measured"  # after a rebalance, at the next evaluation


class Stage(Enum):
    IDLE = "idle"
    PLANNING = "planning"
    MOVING = "moving"


@dataclass(frozen=True)
class Outcome:
    """The end of the last rebalance.  `dropped`: why not all of its chunks were moved."""

    num_chunks: int
    chunks_done: int
    seconds: float
    longest_chunk_s: float
    dropped: str | None = None

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class RebalanceManager:
    """`history`: the load to plan for.  `slot_bytes`: of one expert slot of a layer on a rank.

    `clock` is in seconds, the same on all ranks.
    """

    def __init__(
        self,
        policy: RebalancePolicy,
        layout: ExpertLayout,
        history: LoadHistory,
        slot_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.policy, self.layout, self.slot_bytes = policy, layout, slot_bytes
        self.history = history
        self.stage = Stage.IDLE
        self.decision: Decision | None = None  # the last one
        self.outcome: Outcome | None = None
        self.error: Exception | None = None  # that ended the rebalance under way, or the last one
        self._clock = clock
        self._progress_at = self._evaluated_at = clock()
        self._num_evaluations = 0
        self._chunks: list[MigrationChunk] = []
        self._epochs = (0, 0)  # weights, placement
        self._seconds: list[float] = []
        self._handled_bytes, self._handled_s = 0, 0.0
        self._ended: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_ENDS_REMEMBERED)  # and when they ended
        self._num_ended = 0

    # --- an evaluation ------------------------------------------------------------------------------------------------

    @property
    def num_chunks_done(self) -> int:
        """The number of chunks done in the rebalance under way."""
        return len(self._seconds)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.history.counts_LE.shape[0]

    def is_due(self, num_passes: int) -> bool:
        """Return whether an evaluation is due, `num_passes` after the last one."""
        return self.stage is Stage.IDLE and num_passes >= self.policy.every_steps

    @property
    def bytes_per_s(self) -> float:
        """The rate at which the busiest rank handled experts in the chunks so far."""
        return self._handled_bytes / self._handled_s if self._handled_s else ASSUMED_BYTES_PER_S

    # --- stages ---------------------------------------------------------------------------------------------------

    def note_loads(self, in_force: Plan) -> None:
        """Measure the last rebalance by the loads since the last evaluation, unless that is done already."""
        if self._ended and self._ended[-1][1][_MEASURED] is None:
            window_LE = self.history.window_LE.numpy()
            found = measured_balance(window_LE, in_force, self.policy.choices_per_expert)
            self._ended[-1][1][_MEASURED] = None if found is None else asdict(found)

    def start_planning(self) -> None:
        """Begin to plan a rebalance.  Raises `RebalanceRefused` while another one is under way."""
        if self.stage is not Stage.IDLE:
            raise RebalanceRefused(f"another rebalance is running ({self.stage.value}); wait for its end")
        self.error = None
        self._enter(Stage.PLANNING)

    def planned(self, decision: Decision, *, move: bool) -> None:
        """Take a decision.  `move` False: do not act on it, as in a dry run.

        Raises `MapError` for a plan of another layout.
        """
        assert self.stage is Stage.PLANNING
        if decision.plan is not None and decision.plan.layout != self.layout:
            raise MapError(f"the plan is for {decision.plan.layout}, but this rank has {self.layout}")
        self.decision = decision
        self._evaluated_at, self._num_evaluations = self._clock(), self._num_evaluations + 1
        if not (decision.rebalances and move):
            self._enter(Stage.IDLE)
            return
        assert decision.migration is not None
        self._chunks = list(decision.migration.chunks)
        self._epochs = (decision.weight_epoch, decision.placement_epoch)
        self._seconds = []
        self.outcome = None
        self._enter(Stage.MOVING)

    def planning_failed(self, error: Exception) -> None:
        assert self.stage is Stage.PLANNING
        self.error = error
        self._evaluated_at, self._num_evaluations = self._clock(), self._num_evaluations + 1
        self._enter(Stage.IDLE)

    def next_chunk(self, weight_epoch: int, placement_epoch: int, refresh: str | None) -> MigrationChunk | None:
        """Return the next chunk to move; None where the rest was dropped.  `refresh`: the weight update under way, if
        any.

        A refresh goes first: it writes slots by the current map, and replaces the weights that the plan was made for.
        """
        assert self.stage is Stage.MOVING
        if refresh is not None:
            self.drop(f"a weight update came first: {refresh}")
        elif weight_epoch != self._epochs[0]:
            self.drop(f"the plan is for weight epoch {self._epochs[0]}, {weight_epoch} is in force")
        elif placement_epoch != self._epochs[1]:
            self.drop(f"planned from placement epoch {self._epochs[1]}, {placement_epoch} is in force")
        return self._chunks[0] if self._chunks else None

    def chunk_done(self, seconds: float, placement_epoch: int) -> None:
        """Note that the first of the remaining chunks was moved in `seconds`, and its map published as
        `placement_epoch`.
        """
        assert self.stage is Stage.MOVING and self.decision is not None and self.decision.migration is not None
        handled = self.decision.migration.handled_bytes(self._chunks.pop(0))
        if handled:
            self._handled_bytes += handled
            self._handled_s += seconds
        self._seconds.append(seconds)
        self._epochs = (self._epochs[0], placement_epoch)
        self._progress_at = self._clock()
        if not self._chunks:
            self._end(None)

    def drop(self, reason: str | Exception) -> None:
        """Cancel the chunks that were not moved yet."""
        assert self.stage is Stage.MOVING
        self.error = reason if isinstance(reason, Exception) else None
        self._end(str(reason))

    def _end(self, dropped: str | None) -> None:
        done, left = len(self._seconds), len(self._chunks)
        self.outcome = Outcome(done + left, done, sum(self._seconds), max(self._seconds, default=0.0), dropped=dropped)
        self._chunks = []
        assert self.decision is not None
        self._num_ended += 1
        facts = {"number": self._num_ended, _MEASURED: None} | self.decision.facts() | self.outcome.facts()
        self._ended.append((self._clock(), facts))
        self._enter(Stage.IDLE)

    def _enter(self, stage: Stage) -> None:
        self.stage, self._progress_at = stage, self._clock()

    # --- liveness -------------------------------------------------------------------------------------------------

    @property
    def stuck(self) -> str | None:
        """The stage that has made no progress for longer than the deadline, in one line; None if all is well."""
        waited = self._clock() - self._progress_at
        if self.stage is Stage.IDLE or waited <= self.policy.deadline_s:
            return None
        return f"a rebalance is stuck: {self.stage.value} for {waited:.1f} s, at most {self.policy.deadline_s:g} s"

    def status(self) -> dict[str, Any]:
        """Return plain values for metrics and health."""
        drift = self.history.drift
        return {
            "stage": self.stage.value,
            "stuck": self.stuck,
            "num_evaluations": self._num_evaluations,
            "last_evaluation_age_s": self._clock() - self._evaluated_at,
            "stage_age_s": self._clock() - self._progress_at,
            "chunks_left": len(self._chunks),
            "decision": None if self.decision is None else self.decision.facts(),
            "outcome": None if self.outcome is None else self.outcome.facts(),
            "rebalances": [{"age_s": self._clock() - at} | facts for at, facts in self._ended],
            "choices_per_expert": self.history.choices_per_expert,
            "drift": None if drift is None else {n: getattr(drift, n) for n in drift.__dataclass_fields__},
        }
