"""Plays a schedule on a real engine, and checks everything.

`play` raises `MixedFailed`, which shows the schedule and how to play it again.
"""

from __future__ import annotations

import uuid

import msgspec
import torch

from rollout.core.messages.io_struct import (
    FlushCacheReqInput,
    GetStateReqInput,
    GiveUpPauseReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.sessions import FinishSessionReqInput, GetSessionsReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightVersionReqInput,
)
from tests.local_refresh import deliver
from tests.mixed.checker import Checker, Tally
from tests.mixed.engine import Engine
from tests.mixed.schedule import (
    Abort,
    AnyAction,
    Ask,
    Commit,
    Continue,
    FinishSession,
    Flush,
    GiveUp,
    Lapse,
    Look,
    Pause,
    Release,
    Rename,
    Resume,
    Schedule,
    Steps,
    Submit,
)
from tests.mixed.violation import Violation
from tests.mixed.zoo import Model, Zoo

_MAX_TURNS = 4000
_NOBODY = "nobody"


class MixedFailed(AssertionError):
    """A failure, and the schedule in which it occurred."""

    def __init__(self, schedule: Schedule, number: int, error: BaseException) -> None:
        self.schedule, self.number = schedule, number
        super().__init__(
            f"{type(error).__name__}: {error}\nat action {number} of\n{schedule.text()}\n"
            f"again: python -m tests.mixed replay {schedule.seed}"
        )


def play(schedule: Schedule, zoo: Zoo) -> Tally:
    """Play a schedule and check it.  Raises `MixedFailed`."""
    num_played = 0
    try:
        settings = schedule.settings
        player = Player(zoo.model(settings.family, settings.dtype, settings.form), schedule)
        try:
            for action in schedule.actions:
                player.play(action)
                num_played += 1
            return player.conclude()
        finally:
            player.engine.close()
    except Exception as error:
        # Any exception, not only of the checker: an engine that raises has failed the schedule as well.
        raise MixedFailed(schedule, num_played, error) from error


class Player:
    """Carries out actions on one engine."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.model = model
        self.checker = Checker(model)
        self.engine = self.checker.engine = Engine(model, schedule.settings, self.checker.check)
        self._waits: list[str] = []  # pauses that are answered once requests have ended
        self._num_labels = 0

    def play(self, action: AnyAction) -> None:
        self._act(action)
        self.engine.check_events()

    def conclude(self) -> Tally:
        """Require that the engine takes its memory back, goes on, answers everything, and holds nothing at the end."""
        engine, tally = self.engine, self.checker.tally
        engine.ask_for(ResumeMemoryOccupationReqInput)
        if engine.scheduler.serving.withheld is not None:
            self._commit(Commit(0, whole=True))
        engine.tick()
        engine.resume(None)
        engine.run(max_ticks=_MAX_TURNS)
        self._check_at_rest()
        tally.schedules, tally.commits = 1, len(engine.of_epoch) - 1
        events = engine.scheduler.kv_events
        tally.event_batches = 0 if events is None else events.num_batches
        runner = engine.scheduler.runner
        tally.held_weights = int(bool(runner.state.model.weights.held_formats()))
        tally.fp8_kv = int(runner.kv_pool.stored == torch.float8_e4m3fn)
        return tally

    def _act(self, action: AnyAction) -> None:
        engine = self.engine
        match action:
            case Submit():
                engine.start(self._ask(action))
            case Steps():
                self._steps(action.count)
            case Abort():
                rids = engine.open_rids
                chosen = [rids[pick % len(rids)] for pick in action.picks if rids]
                engine.abort([*chosen, _NOBODY] if action.picks else None)
            case Pause():
                self._pause(action)
            case GiveUp():
                engine.ask_for(GiveUpPauseReqInput, wait_id=f"w{len(self._waits) - 1}")
            case Continue():
                below = engine.labels[action.below % len(engine.labels)] if action.below >= 0 else None
                engine.resume(below)
            case Commit():
                self._commit(action)
            case Rename():
                self._rename(action)
            case Release():
                engine.ask_for(ReleaseMemoryOccupationReqInput, tags=action.tags or None)
            case Resume():
                engine.ask_for(ResumeMemoryOccupationReqInput, tags=action.tags or None)
            case Flush():
                engine.ask_for(FlushCacheReqInput, retract=action.retract)
            case FinishSession():
                engine.ask_for(FinishSessionReqInput, session_id=action.session)
            case Lapse():
                engine.clock.clock += action.seconds
            case Look():
                engine.ask_for(GetStateReqInput)
                engine.ask_for(GetSessionsReqInput)

    def _ask(self, action: Submit) -> Ask:
        """Return the ask, with the history of the request that it continues."""
        ask, results = action.ask, self.engine.results
        ended = [result for rid, result in results.items() if rid not in self.engine.open_rids and result.token_ids]
        if action.after < 0 or not ended:
            return ask
        before = ended[action.after % len(ended)]
        room = self.engine.longest - ask.new_tokens - len(ask.prompt)
        history = (before.prompt_ids + before.token_ids)[:room]
        return msgspec.structs.replace(ask, prompt=history + ask.prompt)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.tick()

    def _pause(self, action: Pause) -> None:
        engine = self.engine
        if action.mode == "wait":
            wait_id = f"w{len(self._waits)}"
            sent = engine.post(PauseGenerationReqInput, mode="wait", wait_s=action.wait_s, wait_id=wait_id)
            self._waits.append(sent)
            return
        if action.mode == "abort":
            engine.name(engine.open_rids)
        engine.ask_for(PauseGenerationReqInput, mode=action.mode)
        if engine.tick():
            raise Violation("a step ran in a pause")

    def _rename(self, action: Rename) -> None:
        engine, label = self.engine, self._new_label()
        if action.abort:
            engine.name(engine.open_rids)
        if engine.ask_for(UpdateWeightVersionReqInput, new_version=label, abort_all_requests=action.abort).success:
            engine.labels.append(label)

    def _commit(self, action: Commit) -> None:
        """Commit a content by begin, one bucket and end.  Weights that have lost their content get every tensor."""
        engine, label, update_id = self.engine, self._new_label(), uuid.uuid4().hex
        is_whole = action.whole or engine.scheduler.serving.content_lost
        content = self.model.contents[action.content]
        sent = content if is_whole else {name: content[name] for name in self.model.changed}
        self._steps(action.steps)
        coverage = "full" if is_whole else "partial"
        begun = engine.ask_for(BeginWeightUpdateReqInput, weight_version=label, coverage=coverage, update_id=update_id)
        if not begun.success:
            raise Violation(f"an update cannot begin: {begun.message}")
        self._steps(action.steps)
        deliver(engine, sent)
        self._steps(action.steps)
        engine.committing(action.content, label)
        ended = engine.ask_for(EndWeightUpdateReqInput, update_id=update_id)
        if not ended.success:
            raise Violation(f"a good update is not committed: {ended.message}")

    def _new_label(self) -> str:
        self._num_labels += 1
        return f"v{self._num_labels}"

    def _check_at_rest(self) -> None:
        engine = self.engine
        if engine.open_rids:
            raise Violation(f"{engine.open_rids} were never answered")
        for request_id in self._waits:
            answer = engine.answers.pop(request_id, None)
            if answer is None or not (answer.success or answer.status_code == 409):
                raise Violation(f"a pause that waits was answered {answer}")
        engine.check_events()
        cache = engine.scheduler.cache
        cache.pins.clear()
        engine.check_idle()
        if engine.answers:
            raise Violation(f"answers that nobody waits for: {engine.answers}")
        if not engine.ask_for(FlushCacheReqInput).success or cache.num_available != cache.allocator.num_slots:
            raise Violation("slots are not free after a flush")
        engine.check_events()
        if cache.states is not None and cache.states.num_used:
            raise Violation(f"{cache.states.num_used} rows of states or pages are in use at rest")
