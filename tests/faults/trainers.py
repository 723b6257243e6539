"""A refresh as a trainer does it, with a fault in it.

    begin (manifest, fingerprints)  ->  first, middle, last bucket  ->  end: verify  ->  end: commit

All its calls carry the id of its update; a second trainer's calls carry none.
A trainer whose calls are refused goes on regardless: an engine must not rely on its manners.  Only one that was killed
sends nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from rollout.core.messages.io_struct import ControlReqOutput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ManifestEntry,
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
)
from tests.announcements import manifest_of
from tests.faults.contents import Tensors, Version
from tests.faults.engines import Engine, Wrong
from tests.faults.pulls import Publisher
from tests.faults.transports import SENDS, Call, Damage, Named
from tests.scheduler_harness import Result

Point = Literal["first", "middle", "last", "between", "verify", "commit"]
"""A bucket, the gap between the two halves of end, or one of these halves."""
BUCKETS: tuple[Point, ...] = ("first", "middle", "last")

PULL = "pull_weights"
TRANSPORTS = (*SENDS, PULL)


@dataclass(frozen=True)
class Sabotage:
    """The fault at `point`.

    `change` alters the tensors that are sent, and with `announced` the manifest as well.  `damage` alters their bytes.
    `twice`: the bucket comes once more.  `inject` makes the engine fail during the call.  `event` happens after the
    call, or in the middle of a pull.  `dies`: the trainer sends nothing more.
    """

    point: Point
    change: Callable[[Named], Named] | None = None
    announced: bool = False
    damage: Damage | None = None
    twice: bool = False
    inject: Callable[[Engine, Point], AbstractContextManager[Any]] | None = None
    event: Callable[[Trainer], None] | None = None
    dies: bool = False

    @property
    def is_of_content(self) -> bool:
        return self.change is not None or self.damage is not None or self.twice


class Trainer:
    """One trainer of one engine over one transport, for as long as the engine lives.

    `request` runs while the fault comes.  `is_dead`: the trainer sends nothing more.
    """

    def __init__(self, engine: Engine, transport: str) -> None:
        self.engine = engine
        self.transport = transport
        self.request: Result | None = None
        self.is_dead = False
        self._publisher = Publisher(engine.scratch, engine.zoo.contents[0]) if transport == PULL else None
        self._base: Tensors = {}

    # --- a good one -----------------------------------------------------------------------------------------------

    def refresh(self, target: Version) -> None:
        """Refresh without a fault.  Raises `Wrong` when it is refused."""
        self.is_dead, self.request = False, None
        self._base = self.engine.zoo.contents[self.engine.in_force.content]
        if self.transport == PULL:
            answers = [self._pull(target, None)]
        elif self.transport == "disk":
            path = str(self.engine.zoo.checkpoints[target.content])
            fields = {"model_path": path, "weight_version": target.label}
            answers = [self.engine.call(UpdateWeightsFromDiskReqInput, **fields)]
        else:
            answers = self._transaction(target, None)
        refused = [answer.message for answer in answers if not answer.success]
        if refused:
            raise Wrong(f"a good refresh is refused: {refused[0]}")

    # --- a bad one ------------------------------------------------------------------------------------------------

    def fail(self, target: Version, sabotage: Sabotage) -> list[ControlReqOutput]:
        """Refresh with a fault, and return the engine's answers."""
        self.is_dead, self.request = False, None
        self._base = self.engine.zoo.contents[self.engine.in_force.content]
        if self.transport == PULL:
            return [self._pull(target, sabotage)]
        return self._transaction(target, sabotage)

    # --- begin, buckets, end --------------------------------------------------------------------------------------

    def _transaction(self, target: Version, sabotage: Sabotage | None) -> list[ControlReqOutput]:
        self._update_id = f"update {self.engine.number()}"
        content = self.engine.zoo.contents[target.content]
        names = sorted(content)
        buckets = [[(name, content[name]) for name in names[start :: len(BUCKETS)]] for start in range(len(BUCKETS))]
        answers = [self._begin(target, [item for bucket in self._announced(buckets, sabotage) for item in bucket])]
        for point, bucket in zip(BUCKETS, buckets, strict=True):
            with self._at(point, sabotage) as hit:
                answers += self._send(bucket, target, hit)
        with self._at("verify", sabotage):
            answers += self._end("verify")
        with self._at("between", sabotage) as hit:
            if hit is not None and hit.is_of_content:
                answers += self._send(buckets[0], target, hit)
        with self._at("commit", sabotage):
            answers += self._end("commit")
        return answers

    def _announced(self, buckets: list[Named], sabotage: Sabotage | None) -> list[Named]:
        if sabotage is None or sabotage.change is None or not sabotage.announced or sabotage.point not in BUCKETS:
            return buckets
        hit = BUCKETS.index(sabotage.point)
        return [sabotage.change(bucket) if number == hit else bucket for number, bucket in enumerate(buckets)]

    def _begin(self, target: Version, named: Named) -> ControlReqOutput:
        return self.engine.call(
            BeginWeightUpdateReqInput,
            update_id=self._update_id,
            weight_version=target.label,
            manifest=[ManifestEntry(**entry) for entry in manifest_of(named)],
        )

    def _send(self, bucket: Named, target: Version, sabotage: Sabotage | None) -> list[ControlReqOutput]:
        answers: list[ControlReqOutput] = []
        for time in range(2 if sabotage is not None and sabotage.twice else 1):
            if not self.is_dead:
                sent = bucket if sabotage is None or sabotage.change is None else sabotage.change(bucket)
                damage = sabotage.damage if sabotage is not None and time == 0 else None
                self.is_dead = self.is_dead or (damage == "killed")
                answers += self.send(sent, target.label, damage, self._update_id)
        return answers

    def send(
        self, named: Named, label: str, damage: Damage | None = None, update_id: str | None = None
    ) -> list[ControlReqOutput]:
        """Send one bucket, and return its answer; no answer when the sender died before it could call."""
        sent = SENDS[self.transport](self.engine, Call(self.engine.number(), named, self._base, damage))
        if sent is None:
            return []
        verb, fields = sent
        return [self.engine.call(verb, weight_version=label, update_id=update_id, **fields)]

    def _end(self, phase: Literal["verify", "commit"]) -> list[ControlReqOutput]:
        if self.is_dead:
            return []
        return [self.engine.call(EndWeightUpdateReqInput, phase=phase, update_id=self._update_id)]

    @contextmanager
    def _at(self, point: Point, sabotage: Sabotage | None) -> Iterator[Sabotage | None]:
        """Apply the fault if it is at this point: its injection lasts meanwhile, and its event follows."""
        if sabotage is None or sabotage.point != point or self.is_dead:
            yield None
            return
        self.request = self.engine.start_request(1)
        with nullcontext() if sabotage.inject is None else sabotage.inject(self.engine, point):
            yield sabotage
        if sabotage.event is not None:
            sabotage.event(self)
        self.is_dead = self.is_dead or sabotage.dies

    # --- pull_weights ---------------------------------------------------------------------------------------------

    def _pull(self, target: Version, sabotage: Sabotage | None) -> ControlReqOutput:
        engine, publisher = self.engine, self._publisher
        assert publisher is not None
        content = engine.zoo.contents[target.content]
        change = None if sabotage is None else sabotage.change
        names = sorted(content)
        part = 0.0 if sabotage is None or sabotage.point not in BUCKETS else BUCKETS.index(sabotage.point) / 2
        if change is None:
            folder = publisher.publish(content)
        else:
            near = names[int(part * (len(names) - 2)) :]
            changed = dict(change([(name, content[name]) for name in near]))
            kept = {name: content[name] for name in names if name not in near}
            folder = publisher.publish(kept | changed)
        if sabotage is not None and sabotage.damage is not None:
            publisher.damage(folder, sabotage.damage, part)
        answer = self._pull_now(target, sabotage)
        if sabotage is not None and (sabotage.damage is not None or (change is not None and not sabotage.announced)):
            publisher.retract()
        return answer

    def _pull_now(self, target: Version, sabotage: Sabotage | None) -> ControlReqOutput:
        engine, publisher = self.engine, self._publisher
        assert publisher is not None
        verb, fields = PullWeightsReqInput, publisher.fields
        if sabotage is None:
            return engine.call(verb, weight_version=target.label, **fields)
        self.request = engine.start_request(1)
        with nullcontext() if sabotage.inject is None else sabotage.inject(engine, sabotage.point):
            request_id = engine.post(verb, weight_version=target.label, **fields)
            if sabotage.event is not None:
                engine.tick()
                sabotage.event(self)
            answer = engine.answer_to(request_id, verb.__name__)
        if sabotage.twice:
            answer = engine.call(verb, weight_version=target.label, **fields)
        return answer
