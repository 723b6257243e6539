"""`WeightCommit`: writes and publishes a verified transaction between two steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from rollout.control.adapter_target import AdapterTarget
from rollout.control.draft_target import DraftTarget
from rollout.control.placement_adoption import PlacementAdoption
from rollout.core.console import say
from rollout.core.errors import AdapterError, FatalError
from rollout.core.messages.update_state import AdapterVersion, CommitReply, DraftVersion
from rollout.scheduler.agenda import Work
from rollout.scheduler.scheduler import Scheduler
from weight_sync.content import Digests
from weight_sync.errors import CommitError, TransactionStateError, WeightSyncError
from weight_sync.update import CommitResult
from weight_sync.update_book import EndedUpdate, Outcome
from weight_sync.updater import WeightUpdater

logger = logging.getLogger(__name__)

_MAX_DIGITS = 18
"""Digits of a count in a label that are read as a number; Python refuses to read thousands of them."""


class WeightCommit:
    """The commits of an engine during its whole life, as the label of a single call depends on earlier labels.

    `draft` None: no model drafts.
    `followers`: the work that is done after each commit of content, before the next step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        updater: WeightUpdater,
        adoption: PlacementAdoption,
        draft: DraftTarget | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._adoption = adoption
        self._draft = draft
        self._partial = PartialLabel()
        self.followers: Sequence[Work] = ()

    def run(self, *, alone: bool = False) -> tuple[str, CommitReply]:
        """Write, publish version and epoch in one assignment, and close the old epoch's prefixes to new requests.

        If no tensor came, only the label changes, and all prefixes stay.  Returns message and reply.

        `alone`: the call is not part of an update.  After `TransactionStateError` and `CommitError` the new weights are
        in force on no rank.  After `FatalError` this is in doubt: once something was written, no other error is raised.
        """
        state, update = self._scheduler.runner.state, self._updater.update
        self._scheduler.cache.require_accounted()  # `_publish` gives slots back, when it is too late for an error
        targets = [] if update is None else update.targets
        adapters = [target for target in targets if isinstance(target, AdapterTarget)]
        is_models = targets[:1] == [self._updater.model]
        with _in_doubt(but=(WeightSyncError, AdapterError)), state.mutate("weight refresh"):
            self._plan(adapters)
            result = self._written(adapters)
            with _in_doubt():
                versions = [target.publish() for target in adapters]
                if is_models:
                    reply, note = self._publish(result, alone, versions)
                else:
                    reply, note = self._publish_alone(result, *versions), ""
        if isinstance(reply.draft, DraftVersion) and reply.draft.is_stale and reply.draft.came is None:
            note += f" {stale_note(reply.draft)}"
            logger.info("Weights of version %s.%s", reply.weight_version, note)
        return committed(reply) + note, reply

    def _plan(self, adapters: Sequence[AdapterTarget]) -> None:
        """Choose the slots of adapters.  Drops the update, and raises `AdapterError`, where there are not enough."""
        update = self._updater.update
        if update is None or not adapters:
            return
        try:
            update.check_committable()
            AdapterTarget.plan_versions(adapters)
        except AdapterError as error:
            self._updater.drop(str(error), reported=True, by_sender=True)
            raise
        except TransactionStateError:
            return  # `WeightUpdater.commit` raises it on all ranks

    def _written(self, adapters: Sequence[AdapterTarget]) -> CommitResult:
        """Write the update.  Raises as `run`, and `FatalError` where a slot has the content of no version."""
        try:
            return self._updater.commit()
        except CommitError as error:
            if error.__cause__ is not None:  # another rank may be the one that answers
                position = self._scheduler.parallel.position
                say(f"rank {position.tp_rank} of replica {position.replica} could not commit: {error}", "WARNING")
            if any(target.torn is not None for target in adapters):
                raise FatalError(f"the slot of an adapter has the content of no version: {error}") from error
            raise

    def _publish_alone(self, result: CommitResult, version: AdapterVersion | UnsetType = UNSET) -> CommitReply:
        """Publish the draft, or note the commit of this version of an adapter; return the reply."""
        reply = self._reply(result, adapter=version, draft=self._publish_draft(result, result.weight_version))
        self._note(result, reply, version=result.weight_version, epoch=None, steps_held=False)
        return reply

    def _publish(self, result: CommitResult, alone: bool, adapters: list[AdapterVersion]) -> tuple[CommitReply, str]:
        """Put the written weights in force and note the commit; return the reply, and a note for the sender.

        `adapters`: the versions that came into force with them.
        """
        scheduler, state = self._scheduler, self._scheduler.runner.state
        total = len(state.model.weights.metas())
        if result.num_tensors == total:
            scheduler.serving.heal()
        more: dict[str, Any] = self._adoption.adopt()
        version = self._label(result, total, alone)
        whole = scheduler.serving.has_whole_weights
        if result.num_tensors:
            state.publish_weights(version, result.digests if whole else Digests())
            for work in self.followers:
                scheduler.agenda.call(work)
        else:
            state.relabel(version)
        scheduler.cache.prefix_cache.retire(state.epoch.weight_epoch)
        more["draft"] = self._publish_draft(result, result.weight_version or state.epoch.weight_version)
        reply = self._reply(result, adapters=adapters or UNSET, **more)
        held = result.update.takes_first and self._updater.holds_steps  # which holds for the model, as none is open
        self._note(result, reply, version, state.epoch.weight_epoch, held)
        is_part = result.num_tensors < total and (alone or result.update.counts_tensors)
        return reply, f" {result.num_tensors} of {total} tensors came." if is_part else ""

    def _publish_draft(self, result: CommitResult, weight_version: str | None) -> DraftVersion | UnsetType:
        """Put the draft in force that came, for this version of the model; None: the one in force.

        Returns the version in force; unset where no model drafts.
        """
        if self._draft is None:
            return UNSET
        came: Literal["alone", "with the model"] | None = None
        state, parts = self._scheduler.runner.state, result.update.parts
        for target, part in parts:
            if target is self._draft:
                came = "alone" if len(parts) == 1 else "with the model"
                self._draft.torn_elsewhere = None  # all ranks have written it
                state.publish_draft(weight_version or state.epoch.weight_version, part.digests)
        return msgspec.structs.replace(self._draft.version(), came=came)

    def _reply(self, result: CommitResult, **more: Any) -> CommitReply:
        """Return the answer of a commit: the versions in force, and what the update took."""
        state, update = self._scheduler.runner.state, result.update
        return CommitReply(
            weight_version=state.epoch.weight_version,
            weight_epoch=state.epoch.weight_epoch,
            content_digest=state.epoch.content_digest,
            held_digest=state.epoch.held_digest,
            placement_epoch=state.epoch.placement_epoch,
            num_tensors=update.num_received,
            num_bytes=result.num_bytes,
            prepared_seconds=update.prepared_s,
            staging_seconds=result.staging_seconds,
            receiving_seconds=update.receiving_s,
            stall_seconds=result.seconds,
            **more,
        )

    def _note(
        self, result: CommitResult, reply: CommitReply, version: str | None, epoch: int | None, steps_held: bool
    ) -> None:
        """Note a commit in the book of updates.  `version`, `epoch`: see `EndedUpdate`."""
        update, book = result.update, self._updater.book
        book.note(update.id, Outcome("committed", answer=msgspec.to_builtins(reply)))
        book.ended.append(
            EndedUpdate(
                update_id=update.id,
                kind="committed",
                weight_version=version,
                weight_epoch=epoch,
                num_tensors=update.num_received,
                num_bytes=result.num_bytes,
                prepared_s=update.prepared_s,
                staging_s=result.staging_seconds,
                receiving_s=update.receiving_s,
                stall_s=result.seconds,
                steps_held=steps_held,
                target=update.target_names,
            )
        )

    def _label(self, result: CommitResult, total: int, alone: bool) -> str:
        """Return the label of the weights in force from now on."""
        epoch, label = self._scheduler.runner.state.epoch, result.weight_version
        if not result.num_tensors:
            return epoch.weight_version if alone or label is None else label
        if label is None:
            return successor(epoch.weight_version)
        if not (alone or result.update.counts_tensors):
            return label
        return self._partial.after(label, result.names, total, epoch.weight_epoch)


@contextmanager
def _in_doubt(but: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """End the engine after an error in the block, unless it is one of `but`: it is unknown what is in force."""
    try:
        yield
    except FatalError:
        raise
    except but:
        raise
    except Exception as error:
        raise FatalError(f"the commit of a weight update is in doubt: {type(error).__name__}: {error}") from error


def committed(reply: CommitReply) -> str:
    """Return the message to its sender."""
    if isinstance(reply.adapter, AdapterVersion):
        return f"Succeeded to load adapter {reply.adapter.name}, version {reply.adapter.version}."
    if isinstance(reply.draft, DraftVersion) and reply.draft.came == "alone":
        return f"Succeeded to load the draft of version {reply.draft.weight_version}."
    beside = "".join(f" Adapter {it.name}: version {it.version}." for it in reply.adapters or ())
    return f"Succeeded to update parameter online. Weight version updated to {reply.weight_version}.{beside}"


def stale_note(draft: DraftVersion) -> str:
    """Return what a sender and the log learn of a draft that did not come with the model."""
    of = f"still of version {draft.weight_version}" if draft.torn is None else "of no version"
    return f"The draft is stale, as its weights are {of}: until a refresh fewer of its tokens are kept."


# --- labels ------------------------------------------------------------------------------------------------------


class PartialLabel:
    """The label of content that is a part without being declared so: some tensors are still of an older version.

    Such content comes by calls outside of an update, or by updates of vLLM's dialect.  This object remembers the names
    that came under one label, right after each other.
    """

    def __init__(self) -> None:
        self._label = ""
        self._weight_epoch = -1  # of the last of them
        self._names: set[str] = set()

    def after(self, label: str, names: Collection[str], total: int, weight_epoch: int) -> str:
        """Return `label` if all `total` tensors came under it, else `label` with their number.

        `weight_epoch` is the epoch in force.
        """
        goes_on = self._label == label and self._weight_epoch == weight_epoch and self._names.isdisjoint(names)
        self._names = self._names.union(names) if goes_on else set(names)
        self._label, self._weight_epoch = label, weight_epoch + 1
        count = len(self._names)
        return label if count == total else f"{label}~{count}of{total}"


def successor(version: str) -> str:
    """Return a label for content whose sender gave none: `v` -> `v+1` -> `v+2`, never the label of other content.

    Labels are text of any kind, and this never fails on one: it is asked when the content is already in memory.
    """
    stem, plus, count = version.rpartition("+")
    if plus and count.isascii() and count.isdigit() and len(count) <= _MAX_DIGITS:
        return f"{stem}+{int(count) + 1}"
    return f"{version}+1"
