"""What each weight verb must answer, and which version is in force: the contract of a refresh, in a page.

Told what was really sent and what was made to fail; never asks the engine.  Knows verbs, drafts and versions; does not
know requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from rollout.core.io_struct import ControlReqOutput
from weight_sync.staging import StagingMode

Tensors = Mapping[str, torch.Tensor]


class Violation(AssertionError):
    """The engine broke its contract."""


@dataclass(frozen=True)
class SentBegin:
    label: str | None
    names: frozenset[str] | None  # that must come; None: the set is what comes
    base: str | None = None  # the label that must be in force
    stated: Tensors = field(default_factory=dict)  # content that the manifest has fingerprints of


@dataclass(frozen=True)
class SentTensors:
    """One call.  `refused`: why the engine must refuse it.

    `is_refresh`: outside begin and end it is a full refresh of its own; `is_pull`: it is never anything else.
    `is_delta`: it needs the base to be in the model.
    """

    tensors: Tensors
    label: str | None
    refused: str | None = None
    is_refresh: bool = False
    is_pull: bool = False
    is_delta: bool = False


@dataclass(frozen=True)
class SentEnd:
    phase: Literal["verify", "commit"] | None = None


@dataclass(frozen=True)
class SentAbort:
    pass


@dataclass(frozen=True)
class SentContinue:
    below: str | None = None  # label: what began before it is to be aborted


@dataclass(frozen=True)
class SentRelabel:
    label: str


Sent = SentBegin | SentTensors | SentEnd | SentAbort | SentContinue | SentRelabel


@dataclass
class Draft:
    """An open transaction as it should be."""

    label: str | None
    names: frozenset[str] | None
    implicit: bool
    stated: Tensors = field(default_factory=dict)
    pause: int = 0  # the last pause before it was opened
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    broken: str | None = None  # known since a call: it can never be committed
    verified: bool = False

    def fault(self) -> str | None:
        if self.broken:
            return self.broken
        if not self.staged:
            return "nothing came"
        if self.names is not None and self.names - self.staged.keys():
            return f"{len(self.names - self.staged.keys())} tensors are missing"
        return None


class Expected:
    """`versions[i]`: the tensors of commit i, None where nobody can know them (written over poisoned weights).

    `labels`: every label that was ever in force, with its last version; `current`: the version in force.
    `staging`: the engine's mode; "journal" and "in_place" write into the model as tensors come.
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
        self._num_pauses = 0
        self._staging = staging
        self.draft: Draft | None = None
        self._all = frozenset(content)
        self._lost: set[str] = set()  # labels that were begun, and dropped
        self._untold = False  # one without a label was dropped, and nobody who meant to end it was told
        self._started: tuple[Sent, bool] | None = None  # and whether it settles a transaction

    @property
    def is_torn(self) -> bool:
        """Whether the model may hold a part of a refresh: nothing may be sampled."""
        writes_through = self._staging in ("journal", "in_place")
        return self.poisoned or (writes_through and self.draft is not None and bool(self.draft.staged))

    def is_name(self, label: str, version: int) -> bool:
        """Whether the version was ever in force under this label; a sender may give one label to several."""
        return (label, version) in self._names

    def pause(self) -> None:
        self.paused = True
        self._num_pauses += 1

    def lapse(self) -> None:
        """More time than a lease has passed without a verb."""
        self._untold |= self.draft is not None and not self.draft.implicit and self.draft.label is None
        self._drop()

    def start(self, sent: Sent, paused: bool) -> None:
        """The engine takes up a verb; what it means depends on the state now."""
        settles = False
        if isinstance(sent, SentTensors):
            settles = self._open_for(sent, paused)
        if isinstance(sent, SentContinue):
            settles = self.draft is not None and self.draft.implicit
        assert self._started is None, "one verb at a time"
        self._started = (sent, settles)

    def _open_for(self, sent: SentTensors, paused: bool) -> bool:
        """Open a draft for a call that needs one of its own; whether the call also settles it."""
        stale = self.draft is not None and self.draft.implicit and self.draft.pause != self._num_pauses
        if stale and not sent.is_refresh:
            self._drop()  # of a sender that never came to its end
        if self.draft is not None:
            return False
        settles = sent.is_refresh or not paused
        names = self._all if sent.is_refresh or not settles else None
        self.draft = Draft(None, names, implicit=True, pause=self._num_pauses)
        if settles and not sent.is_refresh and (self._untold if sent.label is None else sent.label in self._lost):
            self.draft.broken = "it is a part of a refresh that was dropped"
        return settles

    def finish(self, answer: ControlReqOutput, failed: str | None, poisoned: str | None) -> None:
        """The engine's answer to the verb taken up last, and why it says that its weights are poisoned.

        `failed`: what was made to fail while the verb was carried out.
        """
        assert self._started is not None
        (sent, settles), self._started = self._started, None
        healthy = not self.poisoned
        if isinstance(sent, SentTensors):
            reason = self._receive(sent, settles, answer, failed, poisoned is not None)
        else:
            reason = self._apply(sent, answer, failed)
        if settles:
            reason = self._verify(reason, failed) or self._commit(answer, failed)
        if answer.success == (reason is not None):
            verdict = f"succeeded although {reason}" if reason else f"was refused without need: {answer.message}"
            raise Violation(f"{type(sent).__name__} {verdict}")
        if self.poisoned != (poisoned is not None):
            raise Violation(f"after {type(sent).__name__} the weights are {'' if self.poisoned else 'not '}poisoned")
        self.num_refusals += not answer.success
        self.num_poisonings += healthy and self.poisoned
        if isinstance(sent, SentContinue) and answer.success:
            self.paused = False

    def _apply(self, sent: Sent, answer: ControlReqOutput, failed: str | None) -> str | None:
        """The verb's effect short of settling what it opened itself; why it must be refused."""
        draft = self.draft
        if isinstance(sent, SentBegin):
            if draft is not None:
                return "a refresh is open"
            if sent.base is not None and (self.poisoned or sent.base != self.label):
                return f"{sent.base} is not in force"
            self.draft = Draft(sent.label, sent.names, implicit=False, stated=sent.stated)
            self._found(sent.label)
        elif isinstance(sent, SentEnd):
            self._untold = self._untold and draft is not None
            reason = None if sent.phase == "commit" else self._verify(None, failed)
            return reason if reason or sent.phase == "verify" else self._commit(answer, failed)
        elif isinstance(sent, SentAbort):
            self._untold = self._untold and draft is not None
            self._drop()
            return None if draft else "no refresh is open"
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
            reason = "it is not complete"  # which is seen before a tensor is taken
        if reason is None and draft.staged.keys() & sent.tensors.keys():
            reason = "a tensor came before"
        if reason is None and draft.names is not None and sent.tensors.keys() - draft.names:
            reason = "a tensor was not announced"
        if reason is None and not all(torch.equal(draft.stated.get(n, t), t) for n, t in sent.tensors.items()):
            reason = "it has other fingerprints than were announced"
        if sent.is_delta and self.poisoned and not answer.success:
            reason = reason or "its base is not in the model"
        if reason is None and failed in ("write", "restore"):
            reason = "it could not be written"  # in the modes that write as tensors come
            self.poisoned |= self._staging == "in_place" or failed == "restore"
        if reason is not None:
            # Where tensors are written as they come, those before the wrong one are: only the engine can know.
            self.poisoned |= poisoned and self._staging == "in_place"
            self._break(draft, reason)
            return reason
        draft.label = sent.label or draft.label
        draft.staged.update(sent.tensors)
        return None

    def _break(self, draft: Draft, reason: str) -> None:
        """The draft can never be committed; where nothing was kept, the old content is gone."""
        self.poisoned |= self._staging == "in_place" and bool(draft.staged)
        draft.broken = reason
        draft.staged.clear()

    def _drop(self) -> None:
        if self.draft is not None:
            self._break(self.draft, "dropped")
            if not self.draft.implicit and self.draft.label is not None:
                self._lost.add(self.draft.label)
        self.draft = None

    def _found(self, label: str | None) -> None:
        """A refresh of this label is begun, or in force."""
        self._untold = False
        self._lost -= {label}

    def _verify(self, reason: str | None, failed: str | None) -> str | None:
        """Why the draft cannot be committed; it is dropped then."""
        draft = self.draft
        if draft is None:
            return "no refresh is open"
        if draft.verified:
            return "the refresh is verified"
        reason = reason or draft.fault() or (failed if failed == "vote_verify" else None)
        if reason is not None:
            self._drop()
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
            self._drop()
            return failed
        self.draft = None
        if answer.success:
            self._publish(draft, answer.data["weight_version"])
        return None

    def _publish(self, draft: Draft, label: str) -> None:
        if draft.label not in (None, label):
            raise Violation(f"{draft.label} was committed as {label}")
        if draft.label is None and label in self.labels:
            raise Violation(f"the engine made up {label}, which already names other content")
        self._found(draft.label)
        base = self.versions[self.current]
        if draft.staged.keys() == self._all:
            self.poisoned = False
            base = {}
        known = base is not None and not self.poisoned
        self.versions.append({**(base or {}), **draft.staged} if known else None)
        self.current = len(self.versions) - 1
        self._name(label)

    def _name(self, label: str) -> None:
        self.label = label
        self.labels[label] = self.current
        self._names.add((label, self.current))
