"""The contract of a refresh: the answer that each weight verb must give, and the version that is in force.

Both follow from the calls that were really sent and from the injected faults; the engine is never asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from rollout.core.messages.io_struct import ControlReqOutput
from weight_sync.staging import StagingMode

Tensors = Mapping[str, torch.Tensor]


class Violation(AssertionError):
    """The engine broke its contract."""


@dataclass(frozen=True)
class SentBegin:
    label: str | None
    names: frozenset[str] | None  # tensors that must come; None: any
    base: str | None = None  # the label that must be in force
    update_id: str | None = None  # which all calls of the update must carry, then
    stated: Tensors = field(default_factory=dict)  # content whose fingerprints are in the manifest


@dataclass(frozen=True)
class SentTensors:
    """One call.  `refused`: why the engine must refuse it.

    `is_refresh`: outside begin and end it is a full refresh of its own; `is_pull`: it is never anything else.
    `is_delta`: it needs the base to be in the model.
    """

    tensors: Tensors
    label: str | None
    refused: str | None = None
    update_id: str | None = None
    is_refresh: bool = False
    is_pull: bool = False
    is_delta: bool = False


@dataclass(frozen=True)
class SentEnd:
    phase: Literal["verify", "commit"] | None = None
    update_id: str | None = None


@dataclass(frozen=True)
class SentAbort:
    update_id: str | None = None


@dataclass(frozen=True)
class SentContinue:
    """`pauses`: the number of pauses before it."""

    pauses: int
    below: str | None = None  # a label: requests that began before it are to be aborted


@dataclass(frozen=True)
class SentRelabel:
    label: str
    update_id: str | None = None


Sent = SentBegin | SentTensors | SentEnd | SentAbort | SentContinue | SentRelabel


@dataclass
class Draft:
    """An open transaction as it should be.  Only calls with its `update_id` belong to it; `alone`: it has one call."""

    label: str | None
    names: frozenset[str] | None
    implicit: bool
    update_id: str | None = None
    alone: bool = False
    stated: Tensors = field(default_factory=dict)
    pause: int = 0  # the last pause before it was opened
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    broken: str | None = None  # the reason, once a call has made a commit impossible
    verified: bool = False

    def fault(self) -> str | None:
        if self.broken:
            return self.broken
        if self.names is not None and self.names - self.staged.keys():
            return f"{len(self.names - self.staged.keys())} tensors are missing"
        return None


class Expected:
    """`versions[i]`: the tensors of commit i, None where they cannot be known (written over poisoned weights).

    `labels`: every label that was ever in force, with its last version; `current`: the version in force.
    `staging`: the engine's mode; "journal" and "in_place" write tensors into the model as they come.
    """

    def __init__(self, content: Tensors, label: str, staging: StagingMode) -> None:
        self.versions: list[Tensors | None] = [content]
        self.current = 0
        self.label = label
        self.labels = {label: 0}
        self._names = {(label, 0)}
        self.paused = False
        self.poisoned = False
        self.num_refusals = 0
        self.num_poisonings = 0
        self.num_pauses = 0
        self._staging = staging
        self.draft: Draft | None = None
        self._all = frozenset(content)
        self._is_lost = False  # an update was dropped by no call of its sender, and no sender has started anew
        self._unreported = False  # no answer has reported the loss
        self._part: tuple[str, int, frozenset[str]] = ("", -1, frozenset())  # label, version, tensors of lone calls
        self._started: tuple[Sent, bool, str | None, int] | None = None  # verb, settles, refusal, pauses

    @property
    def is_torn(self) -> bool:
        """True while the model may hold a part of a refresh: nothing may be sampled."""
        writes_through = self._staging in ("journal", "in_place")
        return self.poisoned or (writes_through and self.draft is not None and bool(self.draft.staged))

    def is_name(self, label: str, version: int) -> bool:
        """Return whether the version was ever in force under this label; a sender may give one label to several."""
        return (label, version) in self._names

    def pause(self) -> None:
        self.paused = True
        self.num_pauses += 1
        self._is_lost = self._unreported = False

    def lapse(self) -> None:
        """Drop the draft: more time than a lease has passed without a verb."""
        self._drop(unreported=True)

    def start(self, sent: Sent, paused: bool) -> None:
        """Note that the engine takes up a verb; its meaning depends on the present state."""
        settles, refused = False, None
        if isinstance(sent, SentContinue):
            settles = self.draft is not None and self.draft.implicit
            if not settles and self._unreported:
                refused, self._unreported = "a loss was not reported yet", False
        elif not isinstance(sent, SentBegin):
            refused = self._foreign(sent)
        if isinstance(sent, SentTensors) and refused is None:
            settles, refused = self._open_for(sent, paused)
        assert self._started is None, "one verb at a time"
        self._started = (sent, settles, refused, self.num_pauses)

    def _is_stale(self, sent: SentTensors) -> bool:
        """Return whether the call drops a draft whose sender never came to its end."""
        draft = self.draft
        return draft is not None and draft.implicit and draft.pause != self.num_pauses and not sent.is_refresh

    def _foreign(self, sent: SentTensors | SentEnd | SentAbort | SentRelabel) -> str | None:
        """Return why a call does not belong to the draft and must change nothing, or None."""
        draft = self.draft
        if sent.update_id is not None:
            return None if draft is not None and draft.update_id == sent.update_id else "its refresh is not open"
        if draft is None or (isinstance(sent, SentTensors) and (sent.is_pull or self._is_stale(sent))):
            return None
        if draft.update_id is not None:
            return "it does not say that it is of the refresh"
        if isinstance(sent, SentTensors) and None not in (draft.label, sent.label) and draft.label != sent.label:
            return f"it is of {sent.label}, the refresh of {draft.label}"
        return None

    def _open_for(self, sent: SentTensors, paused: bool) -> tuple[bool, str | None]:
        """Open a draft for a call that needs one; return whether the call settles it, and why it must be refused."""
        if self._is_stale(sent):
            self._drop(unreported=True)
        if self.draft is not None:
            return False, None
        settles = sent.is_refresh or not paused
        if settles and not sent.is_refresh and self._is_lost:
            self._unreported = False
            return False, "it may be a part of a refresh that was lost"
        names = self._all if sent.is_refresh or not settles else None
        self.draft = Draft(None, names, implicit=True, alone=settles and not sent.is_refresh, pause=self.num_pauses)
        return settles, None

    def finish(self, answer: ControlReqOutput, failed: str | None, poisoned: str | None) -> None:
        """Judge the answer to the verb taken up last, and the reason for which the engine calls its weights poisoned.

        `failed` names the step that was made to fail while the verb was carried out.
        """
        assert self._started is not None
        (sent, settles, refused, pauses), self._started = self._started, None
        healthy = not self.poisoned
        if refused is not None:
            reason: str | None = refused
        elif isinstance(sent, SentTensors):
            reason = self._receive(sent, settles, answer, failed, poisoned is not None)
        else:
            reason = self._apply(sent, answer, failed)
        if settles:
            reason = self._verify(reason, failed, sent) or self._commit(answer, failed)
        if answer.success == (reason is not None):
            verdict = f"succeeded although {reason}" if reason else f"was refused without need: {answer.message}"
            raise Violation(f"{type(sent).__name__} {verdict}")
        if self.poisoned != (poisoned is not None):
            raise Violation(f"after {type(sent).__name__} the weights are {'' if self.poisoned else 'not '}poisoned")
        if pauses != self.num_pauses:
            self._is_lost = self._unreported = False  # a pause that came meanwhile is a new start
        self.num_refusals += not answer.success
        self.num_poisonings += healthy and self.poisoned
        if isinstance(sent, SentContinue) and answer.success:
            self.paused = self.paused and sent.pauses != self.num_pauses
            if answer.data["paused"] != self.paused:
                raise Violation(f"continue says paused={answer.data['paused']}")

    def _apply(self, sent: Sent, answer: ControlReqOutput, failed: str | None) -> str | None:
        """Apply a verb, without settling a draft that it opened; return why it must be refused, or None."""
        draft = self.draft
        if isinstance(sent, SentBegin):
            if draft is not None:
                return "a refresh is open"
            if sent.base is not None and (self.poisoned or sent.base != self.label):
                return f"{sent.base} is not in force"
            self.draft = Draft(sent.label, sent.names, False, sent.update_id, stated=sent.stated)
            self._is_lost = self._unreported = False
        elif isinstance(sent, SentEnd):
            self._unreported = self._unreported and draft is not None
            reason = None if sent.phase == "commit" else self._verify(None, failed, sent)
            return reason if reason or sent.phase == "verify" else self._commit(answer, failed)
        elif isinstance(sent, SentAbort):
            if draft is None:
                self._is_lost = self._unreported = False
                return "no refresh is open"
            self._drop(lost=sent.update_id is None)
        elif isinstance(sent, SentRelabel):
            if draft is not None:
                draft.label = sent.label
            else:
                self._name(sent.label)
        return None

    def _receive(
        self, sent: SentTensors, settles: bool, answer: ControlReqOutput, failed: str | None, poisoned: bool
    ) -> str | None:
        draft = self.draft
        assert draft is not None
        if not settles and (sent.is_pull or (sent.is_refresh and draft.implicit)):
            return "another refresh is open"
        if draft.verified:
            return "the refresh is verified"
        reason = draft.broken or sent.refused
        if reason is None and None not in (draft.label, sent.label) and draft.label != sent.label:
            reason = f"it is of {sent.label}, the refresh of {draft.label}"
        if reason is None and settles and sent.is_refresh and self._all - sent.tensors.keys():
            reason = "it is not complete"  # the engine sees this before it takes a tensor
        if reason is None and draft.staged.keys() & sent.tensors.keys():
            reason = "a tensor came before"
        if reason is None and draft.names is not None and sent.tensors.keys() - draft.names:
            reason = "a tensor was not announced"
        if reason is None and not all(torch.equal(draft.stated.get(n, t), t) for n, t in sent.tensors.items()):
            reason = "it has other fingerprints than were announced"
        if sent.is_delta and self.poisoned and not answer.success:
            reason = reason or "its base is not in the model"
        if reason is None and failed in ("write", "restore"):
            reason = "it could not be written"  # in the modes that write tensors as they come
            self.poisoned |= self._staging == "in_place" or failed == "restore"
        if reason is not None:
            # In place, the tensors before the wrong one may be written: only the engine can know.
            self.poisoned |= poisoned and self._staging == "in_place"
            self._break(draft, reason)
            return reason
        draft.label = sent.label or draft.label
        draft.staged.update(sent.tensors)
        return None

    def _break(self, draft: Draft, reason: str) -> None:
        """Mark the draft as broken, so that it can never be committed; in mode in_place the old content is lost."""
        self.poisoned |= self._staging == "in_place" and bool(draft.staged)
        draft.broken = reason
        draft.staged.clear()

    def _drop(self, *, lost: bool = True, unreported: bool = False) -> None:
        """Drop the draft; it is `lost` unless a call that certainly is its sender's ended it."""
        if self.draft is not None:
            self._break(self.draft, "dropped")
            if lost:
                self._is_lost, self._unreported = True, unreported
        self.draft = None

    def _verify(self, reason: str | None, failed: str | None, sent: Sent) -> str | None:
        """Verify the draft, and return why it cannot be committed; it is dropped then."""
        draft = self.draft
        if draft is None:
            return "no refresh is open"
        if draft.verified:
            return "the refresh is verified"
        reason = reason or draft.fault() or (failed if failed == "vote_verify" else None)
        if reason is not None:
            is_its_own = isinstance(sent, SentTensors) or (isinstance(sent, SentEnd) and sent.update_id is not None)
            self._drop(lost=not is_its_own)
        draft.verified = True
        return reason

    def _commit(self, answer: ControlReqOutput, failed: str | None) -> str | None:
        draft = self.draft
        if draft is None:
            return "no refresh is open"
        if not draft.verified:
            return "the refresh is not verified"
        if failed is not None:
            self.poisoned |= failed == "restore"
            self._drop(lost=False)
            return failed
        self.draft = None
        if answer.success:
            self._publish(draft, answer.data["weight_version"])
        return None

    def _publish(self, draft: Draft, label: str) -> None:
        if not draft.staged:
            if label != (self.label if draft.alone else draft.label or self.label):
                raise Violation(f"nothing came for {draft.label}, and {self.label} became {label}")
            self._name(label)
            return
        if draft.label is not None and label != self._label_of(draft):
            raise Violation(f"{self._label_of(draft)} was committed as {label}")
        if draft.label is None and label in self.labels:
            raise Violation(f"the engine made up {label}, which already names other content")
        if draft.alone and draft.label is not None:
            self._part = (draft.label, len(self.versions), self._names_so_far(draft))
        base = self.versions[self.current]
        if draft.staged.keys() == self._all:
            self.poisoned = False
            base = {}
        known = base is not None and not self.poisoned
        self.versions.append({**(base or {}), **draft.staged} if known else None)
        self.current = len(self.versions) - 1
        self._name(label)

    def _names_so_far(self, draft: Draft) -> frozenset[str]:
        """Return the names that came under the draft's label by calls of their own, right after each other."""
        label, version, names = self._part
        goes_on = (label, version) == (draft.label, self.current) and names.isdisjoint(draft.staged)
        return (names if goes_on else frozenset()) | draft.staged.keys()

    def _label_of(self, draft: Draft) -> str | None:
        count = len(self._names_so_far(draft)) if draft.alone else len(self._all)
        return draft.label if count == len(self._all) else f"{draft.label}~{count}of{len(self._all)}"

    def _name(self, label: str) -> None:
        self.label = label
        self.labels[label] = self.current
        self._names.add((label, self.current))
