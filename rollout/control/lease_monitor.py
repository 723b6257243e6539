"""`LeaseMonitor`: ends a weight update or a pause whose lease expired, and reports torn weights.

    its lease expired                -> the transaction is dropped
    a pause that no call continued   -> the transaction is dropped, generation goes on (`--pause-timeout`)
    an update wrote into the model   -> no step runs until it is over; requests wait
    weights neither old nor new      -> poisoned: requests end with 503 and the reason

The weights of a draft that are neither are shown in the state, and stop nothing.

Checked between steps before and after each weight verb, when generation is paused or goes on, and when a lease runs
out.  An update may end without a verb.  So `check`, which alone lets steps run after writes, first asks all ranks
whether weights are torn.

Only its sender's calls renew a lease:

    a call                                                   renews
    of the open update, also one refused for its content     the lease of the update, and of the pause
    that opens an update                                     the lease of the update, and of the pause
    of a trainer, carried out while no update is open        the lease of the pause
    any other                                                nothing

Ranks open an update at different times.  So its lease starts anew at the end of that call, which all ranks find in the
same turn: from then on it ends on all of them at once.

A call of the open update that came in time keeps the lease alive, as its turn may come after the lease's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rollout.control.draft_target import DraftTarget
from rollout.core.console import say
from rollout.core.messages.io_struct import (
    ContinueGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from rollout.core.messages.message import ControlReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    DestroyWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqInput,
    OfUpdateReqInput,
    PullWeightsReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsReqInput,
)
from rollout.scheduler.scheduler import Scheduler
from weight_sync.update import WeightUpdate
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import Lease

_TRAINERS_CALLS = (
    OfUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
"""The calls of a trainer in a pause.  Monitors read weights and fingerprints, too."""


class LeaseMonitor:
    """`pause_timeout_s`: None for never.  `draft` None: no model drafts."""

    def __init__(
        self,
        scheduler: Scheduler,
        updater: WeightUpdater,
        pause_timeout_s: float | None,
        draft: DraftTarget | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._pause_timeout_s = pause_timeout_s
        self._draft = draft
        self.num_pauses = 0  # that were asked for
        self._starts_anew = False  # a pause has come, and the loss before it is not forgotten yet
        self._pause: Lease | None = None
        self._is_checked = True  # no verb has run since the last check
        self._checked: WeightUpdate | None = None  # open at the last check
        self._torn: str | None = None
        self._open_before: WeightUpdate | None = None  # open when the current verb began
        self._is_own = False  # whether the current verb is a call of that update

    @property
    def pause_left_s(self) -> float | None:
        """The seconds until the pause ends by itself; None if it does not."""
        return None if self._pause is None or not self._scheduler.serving.is_paused else self._pause.left_s

    def on_pause_call(self, *, now: bool) -> None:
        """Note that a pause was asked for: a new start, which forgets a loss.

        Not `now` in a verb, but after it, as ranks lose an update at different times.
        """
        self.num_pauses += 1
        self._starts_anew = True
        if now:
            self._forget_loss()

    def _forget_loss(self) -> None:
        if self._starts_anew:
            self._updater.book.clear_loss()
        self._starts_anew = False

    def on_pause(self) -> None:
        """Note that generation is paused, perhaps once more."""
        if self._pause_timeout_s is not None:
            self._pause = Lease(self._pause_timeout_s, lambda: self._scheduler.now)

    def on_start(self, verb: ControlReqInput[Any]) -> None:
        """Note that a weight verb begins."""
        self._open_before, self._is_own = self._updater.update, self._is_of_update(verb)

    def on_verb(self, verb: ControlReqInput[Any], succeeded: bool) -> None:
        """Note the end of the weight verb that began last, and renew its leases."""
        self._forget_loss()
        self._is_checked = False
        has_opened = self._updater.is_open and self._updater.update is not self._open_before
        if self._is_own or has_opened:
            self._updater.renew_lease()
        is_work = succeeded and self._open_before is None and isinstance(verb, _TRAINERS_CALLS)
        if self._pause is not None and (self._is_own or has_opened or is_work):
            self._pause.renew()

    def check(self, waiting: Iterable[tuple[float, ControlReqInput[Any]]] = ()) -> float:
        """Drop an update or a pause whose lease has expired, and report torn weights.

        Returns the time at which the next lease runs out.  `waiting`: the verbs whose turn has not come, with the times
        at which they came.
        """
        self._await_own(waiting)
        self._updater.expire()
        ended = self._end_pause()
        if not self._is_checked or self._updater.update is not self._checked:  # an update ended, by whatever way
            self._find_torn()
        if self._torn is not None and self._scheduler.serving.poisoned is None:
            self._scheduler.poison(self._torn)
        self._scheduler.serving.write(self._updater.is_dirty)
        if ended is not None:
            is_whole = self._scheduler.serving.poisoned is None
            say(f"{ended}; {'serving again' if is_whole else 'the weights are poisoned'}", "WARNING")
        return min(self._updater.lease_deadline, math.inf if self._pause is None else self._pause.deadline)

    def abort_message(self) -> str:
        """Return the answer to an abort, and which weights serve now; all ranks call it together, between steps."""
        serving, draft = self._scheduler.serving, self._draft
        self._find_torn()
        found = "the previous weights serve"
        poisoned = serving.poisoned or self._torn
        if poisoned is not None:
            found = f"the weights are poisoned: {poisoned}; send a complete refresh"
        elif serving.withheld is not None:
            found = f"nothing serves: {serving.withheld}"
        torn = None if draft is None else draft.version().torn
        beside = "" if torn is None else f"; the draft has the content of no version: {torn}"
        return f"Weight update aborted; {found}{beside}."

    def _find_torn(self) -> None:
        """Find out with all ranks whether weights are neither old nor new."""
        self._torn = self._torn_anywhere(self._updater.torn)
        if self._draft is not None:
            self._draft.torn_elsewhere = self._torn_anywhere(self._draft.torn)
        self._is_checked, self._checked = True, self._updater.update

    def _await_own(self, waiting: Iterable[tuple[float, ControlReqInput[Any]]]) -> None:
        """Renew the leases for the sender's calls that came in time and wait for their turn."""
        for came, verb in waiting:
            is_own = self._is_of_update(verb)
            if is_own:
                self._updater.renew_lease(came)
            if self._pause is not None and (is_own or isinstance(verb, ContinueGenerationReqInput)):
                self._pause.renew(came)

    def _is_of_update(self, verb: ControlReqInput[Any]) -> bool:
        """Return whether `verb` is a call of the open update."""
        update = self._updater.update
        if update is None:
            return False
        if not isinstance(verb, OfUpdateReqInput):
            return update.is_implicit and isinstance(verb, ContinueGenerationReqInput)
        if isinstance(verb, (BeginWeightUpdateReqInput, PullWeightsReqInput)):
            return verb.update_id == update.id  # without an id they are of no other update
        if isinstance(verb, UpdateWeightsFromDiskReqInput) and update.is_implicit:
            return False
        version = verb.weight_version if isinstance(verb, UpdateWeightsReqInput) else None
        return self._updater.foreign(verb.update_id, version) is None

    def _torn_anywhere(self, own: str | None) -> str | None:
        """Return why some rank's weights are neither old nor new; None if no rank's are torn.  `own`: this rank's."""
        reasons = self._scheduler.parallel.tp.gather_bytes((own or "").encode())
        return next((text.decode() for text in reasons if text), None)

    def _end_pause(self) -> str | None:
        """End the pause if its lease expired, and return that as a reason; None if it did not."""
        if not self._scheduler.serving.is_paused:
            self._pause = None
        if self._pause is None or not self._pause.expired:
            return None
        reason = f"the pause was not continued within {self._pause.seconds:g} s (--pause-timeout)"
        if self._updater.is_open:
            self._updater.drop(reason)
        else:
            self._updater.book.record_loss(reason, reported=False)
        self._pause = None
        self._scheduler.serving.resume()
        return reason
