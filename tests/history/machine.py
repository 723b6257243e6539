"""Plays a history on a real engine and checks everything.

`play(history, zoo)` raises `HistoryFailed`, which shows the history and how to play it again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollout.core.messages.io_struct import (
    AbortReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ManifestEntry,
    UpdateWeightVersionReqInput,
)
from tests.announcements import manifest_of
from tests.faults import changes
from tests.faults.contents import HISTORY_SHAPE, Contents
from tests.faults.injections import FAILURES
from tests.faults.transports import Call, Damage, Named, Verb
from tests.history.actions import (
    DTYPES,
    Abort,
    AbortUpdate,
    AnyAction,
    Begin,
    Continue,
    End,
    Fault,
    Flush,
    History,
    Lapse,
    Pause,
    Refresh,
    Relabel,
    Steps,
    Submit,
    encode,
)
from tests.history.checker import Tally
from tests.history.driver import Driver
from tests.history.expected import (
    SentAbort,
    SentBegin,
    SentContinue,
    SentEnd,
    SentRelabel,
    SentTensors,
    Tensors,
    Violation,
)
from tests.history.transports import TRANSPORTS, Transport
from weight_sync.tensor_meta import parts_of
from weight_sync.waiting import DEFAULT_LEASE_S

NUM_CONTENTS = 4
_MAX_TICKS = 3000
# Faults that a version on disk, which is whole by nature, cannot have.
_NOT_IN_A_VERSION = ("renamed", "reshaped", "retyped", "halved", "repeated")
_CHANGES: dict[Fault | None, changes.Change] = {
    "nan": changes.with_nan,  # found where content is checked
    "flipped": changes.with_value(0.5),
    "renamed": changes.renamed,
    "reshaped": changes.reshaped,
    "retyped": changes.retyped,
    "halved": changes.halved,
    "missing": changes.missing,
}


class HistoryFailed(AssertionError):
    """A failure, and the history in which it occurred."""


class Zoo:
    """The contents by dtype, `NUM_CONTENTS` each, of one shape."""

    def __init__(self, folder: Path) -> None:
        self.by_dtype = {dtype: Contents(folder / dtype, HISTORY_SHAPE, dtype, NUM_CONTENTS) for dtype in DTYPES}


def play(history: History, zoo: Zoo) -> Tally:
    """Play a history and check it.  Raises `HistoryFailed`."""
    try:
        zoo_of_dtype = zoo.by_dtype[history.dtype]
        contents = zoo_of_dtype.contents
        with Driver(zoo_of_dtype.checkpoints[0], contents[0], history) as driver:
            machine = Machine(driver, contents)
            for action in history.actions:
                machine.play(action)
            machine.conclude()
            return driver.tally()
    except Exception as error:
        # Any exception, not only of the checker: an engine that raises has failed the history as well.
        raise HistoryFailed(
            f"{type(error).__name__}: {error}\n{history.text()}\n"
            f"again: python -m tests.history replay '{encode(history)}'"
        ) from error


class Machine:
    """Carries out actions.  Weight verbs that are sent while another is under way queue up behind it."""

    def __init__(self, driver: Driver, contents: Sequence[Tensors]) -> None:
        self.driver = driver
        self._contents = contents
        self._meanwhile: deque[AnyAction] = deque()
        self._num_labels = self._num_ids = 0
        self._update_id: str | None = None  # carried by the calls of the refresh under way
        self._num_calls = 0

    def play(self, action: AnyAction) -> None:
        driver = self.driver
        match action:
            case Submit():
                driver.start(action)
            case Steps():
                for _ in range(action.count):
                    driver.tick()
            case Pause():
                driver.control(PauseGenerationReqInput, mode=action.mode)
            case Flush():
                driver.control(FlushCacheReqInput)
            case Abort():
                rids = list(driver.results)
                chosen = rids[action.index % len(rids)] if rids and action.index >= 0 else ""
                driver.channel.inbox.append(AbortReqInput(rids=[chosen], abort_all=action.index < 0))
            case Lapse():
                driver.lapse()
            case Refresh():
                self._refresh(action)
            case _:
                self._post(action)
                self._finish()

    def conclude(self) -> None:
        """Require that after any history the engine goes on, answers everything, and takes a good refresh."""
        driver = self.driver
        self._resume()
        self._clear()
        driver.run(max_ticks=_MAX_TICKS)
        self._refresh(Refresh("distributed", content=1, calls=1))
        driver.start(Submit([1, 2, 3, 4], new=4))
        driver.run(max_ticks=_MAX_TICKS)
        driver.check_idle()
        expected = driver.expected.versions[driver.expected.current]
        weights = driver.scheduler.runner.state.model.weights
        wrong = [name for name in expected or () if not torch.equal(parts_of(weights, name)[0].content, expected[name])]  # type: ignore[index]
        if expected is None or wrong:
            raise Violation(f"tensors in memory that are not of {driver.expected.label}: {wrong}")

    # --- weight verbs ---------------------------------------------------------------------------------------------

    def _post(self, action: AnyAction) -> None:
        driver = self.driver
        match action:
            case Continue():
                labels = list(driver.expected.labels)
                below = labels[action.below % len(labels)] if action.below >= 0 else None
                sent = SentContinue(driver.expected.num_pauses, below)
                driver.post_weights(sent, ContinueGenerationReqInput, abort_below_weight_version=below)
            case Relabel():
                label = self._new_label()
                fields = {"new_version": label, "abort_all_requests": action.abort}
                driver.post_weights(SentRelabel(label), UpdateWeightVersionReqInput, **fields)
            case Begin():
                label = self._new_label()
                sent = SentBegin(label, frozenset(self._contents[0]))
                driver.post_weights(sent, BeginWeightUpdateReqInput, weight_version=label)
            case End():
                driver.post_weights(SentEnd(), EndWeightUpdateReqInput)
            case AbortUpdate():
                driver.post_weights(SentAbort(), AbortWeightUpdateReqInput)
            case _:
                raise AssertionError(f"{action} is no weight verb")

    def _finish(self) -> None:
        """Finish the weight verbs, unless an outer call is doing so, which will finish this one, too."""
        if not self.driver.executor.running and not self._in_seam:
            self.driver.finish_weights(self._seam)

    _in_seam = False

    def _seam(self) -> None:
        """Play one of the other actions while the engine waits for something outside."""
        if self._meanwhile and not self._in_seam:
            self._in_seam = True
            try:
                self.play(self._meanwhile.popleft())
            finally:
                self._in_seam = False

    def _resume(self) -> None:
        """Continue again and again until generation goes on.

        The engine may refuse the first call if it should have settled a refresh, and a pause may follow any call.
        """
        for _ in range(2 + len(self._meanwhile)):
            if self.driver.expected.paused:
                self.play(Continue())
        if self.driver.expected.paused:
            raise Violation("generation does not continue")

    def _clear(self) -> None:
        """Abort the update that is open, if any."""
        draft = self.driver.expected.draft
        if draft is not None:
            self.driver.post_weights(SentAbort(draft.update_id), AbortWeightUpdateReqInput, update_id=draft.update_id)
            self._finish()

    def _new_label(self) -> str:
        self._num_labels += 1
        return f"v{self._num_labels}"

    # --- a refresh ------------------------------------------------------------------------------------------------

    def _refresh(self, action: Refresh) -> None:
        driver = self.driver
        self._meanwhile = deque(action.meanwhile)
        if TRANSPORTS[action.transport].is_pull:
            action = msgspec.structs.replace(action, bracket=False)
        if action.pause is not None:
            self.play(Pause(action.pause))
        if action.bracket:
            self._clear()
        with FAILURES[action.fault](driver) if action.fault in FAILURES else nullcontext():
            goes_on = self._transfer(action) and action.fault != "no_end"
            if goes_on and action.bracket:
                for phase in ("verify", "commit") if action.phased else (None,):
                    sent = SentEnd(phase, self._update_id)  # type: ignore[arg-type]
                    driver.post_weights(sent, EndWeightUpdateReqInput, phase=phase, update_id=self._update_id)
                    self._finish()
            if action.fault != "no_end" and action.pause is not None:
                self._resume()
        while self._meanwhile:
            self.play(self._meanwhile.popleft())

    def _transfer(self, action: Refresh) -> bool:
        """Begin if the refresh has a bracket, and make the calls; return False if the sender gives up, refused."""
        names = sorted(self._contents[0])[action.order % action.part :: action.part]
        random.Random(action.order).shuffle(names)
        content = self._contents[action.content]
        label = self._new_label() if action.labelled else None
        self._update_id = None
        if action.bracket:
            self._begin(action, label, [(name, content[name]) for name in names])
            if action.fault == "wrong_base":
                return False
        transport = TRANSPORTS[action.transport]
        num_calls = 1 if transport.is_refresh and not action.bracket else action.calls
        cuts = [[(name, content[name]) for name in names[number::num_calls]] for number in range(num_calls)]
        for number, named in enumerate(cuts):
            if not action.bracket and label is not None and self.driver.expected.draft is None and action.order % 2:
                label = self._new_label()  # each call may become a version of its own, or a part of one
            self._send(transport, action if number == action.at % num_calls else None, named, cuts[0][0], label)
        return True

    def _send(
        self,
        transport: Transport,
        faulty: Refresh | None,
        named: Named,
        first: tuple[str, torch.Tensor],
        label: str | None,
    ) -> None:
        """Send one call.  `faulty`: the refresh whose fault hits this call; `first`: a tensor of the first call."""
        driver = self.driver
        self._num_calls += 1
        is_left_out = faulty is not None and (
            (transport.is_pull and faulty.fault in _NOT_IN_A_VERSION)
            or (transport.is_delta and faulty.fault == "halved")  # a delta builds on the held content
        )
        if faulty is not None and not is_left_out:
            named, refused = _with_fault(named, faulty.fault, first)
        else:
            refused = None
        verb, fields = self._make(transport, named, None if faulty is None else faulty.fault)
        tensors = driver.publisher.tensors if transport.is_pull else dict(named)
        tensors = {name: tensor.to(first[1].dtype) for name, tensor in tensors.items()}
        if refused is None and not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            refused = "a value is not finite"
        kind = {"is_refresh": transport.is_refresh, "is_pull": transport.is_pull, "is_delta": transport.is_delta}
        sent = SentTensors(tensors, label, refused, self._update_id, **kind)
        driver.post_weights(sent, verb, weight_version=label, update_id=self._update_id, **fields)
        self._finish()

    def _make(self, transport: Transport, named: Named, fault: Fault | None) -> Verb:
        driver = self.driver
        damage: dict[Fault | None, Damage] = {"died": transport.died, "cut": "truncated"}
        base = driver.expected.versions[driver.expected.current] or {}
        made = transport.make(driver, Call(self._num_calls, named, base, damage.get(fault), self._seam))
        assert made is not None, "histories go by what the engine answers"
        return made

    def _begin(self, action: Refresh, label: str | None, named: Named) -> None:
        fields: dict[str, Any] = {"weight_version": label, "coverage": "full" if action.part == 1 else "partial"}
        announced = frozenset(name for name, _ in named) if action.part == 1 or action.manifest else None
        if action.manifest:
            fields["manifest"] = [ManifestEntry(**entry) for entry in manifest_of(named)]
        stated = dict(named) if action.manifest else {}
        base = "nowhere" if action.fault == "wrong_base" else None
        if action.named or announced is None:
            self._num_ids += 1
            self._update_id = f"u{self._num_ids}"
        fields |= {"base_version": base, "lease_s": DEFAULT_LEASE_S, "update_id": self._update_id}
        sent = SentBegin(label, announced, base, self._update_id, stated)
        self.driver.post_weights(sent, BeginWeightUpdateReqInput, **fields)
        self._finish()


def _with_fault(named: Named, fault: Fault | None, first: tuple[str, torch.Tensor]) -> tuple[Named, str | None]:
    """Return the call as it is really sent, and why the engine must refuse it.

    `first`: a tensor of the first call.
    """
    name = named[0][0]
    refused: str | None = None
    match fault:
        case "renamed":
            refused = f"{name}.other is unknown"
        case "reshaped":
            refused = f"{name} has another shape"
        case "retyped":
            refused = f"{name} has another dtype"
        case "repeated":
            refused = f"{first[0]} comes twice" if any(first[0] == other for other, _ in named) else None
            return [*named, first], refused
        case "died" | "cut":
            refused = f"the transport {fault}"
    return _CHANGES[fault](named) if fault in _CHANGES else named, refused
