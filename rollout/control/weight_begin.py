"""`WeightBegin`: the verb that opens a weight update, and what it promises until the end."""

from __future__ import annotations

import functools
from typing import Any

from rollout.control.draft_target import Companions, DraftTarget
from rollout.control.placement_adoption import PlacementAdoption
from rollout.control.tensor_owner import is_part_of_names
from rollout.control.weight_queue import Job, nothing, replies
from rollout.control.weight_sources import manifest_of
from rollout.core.errors import BadRequest, Conflict
from rollout.core.messages.message import Reply
from rollout.core.messages.update_state import AdapterOfUpdate
from rollout.core.messages.weights import BeginReply, BeginWeightUpdateReqInput
from rollout.scheduler.scheduler import Scheduler
from weight_sync.checker import live_fingerprints
from weight_sync.content import Digests
from weight_sync.errors import BaseMismatchError
from weight_sync.update_target import UpdateTarget
from weight_sync.updater import WeightUpdater
from weight_sync.waiting import DEFAULT_LEASE_S


class WeightBegin:
    """Opens updates of the model with its companions, of an adapter, and of the draft."""

    def __init__(
        self, scheduler: Scheduler, updater: WeightUpdater, adoption: PlacementAdoption, companions: Companions
    ) -> None:
        self._scheduler, self._updater, self._adoption, self._companions = scheduler, updater, adoption, companions
        self._found_digests: Digests | None = None
        self._without_adapters: str | None = None  # the id of an update that refuses adapters

    def job(self, verb: BeginWeightUpdateReqInput) -> Job:
        """Return the job of a begin.  Raises `BadRequest`, `Conflict`."""
        update_id = verb.update_id or verb.request_id  # the same on all ranks
        begun = replies("Weight update begun.", BeginReply(update_id=update_id))
        update = self._updater.update
        if update is not None and update_id == update.id:  # sent again, as its answer did not arrive
            return Job(verb, nothing, begun)
        if verb.coverage == "partial" and not verb.has_manifest and verb.update_id is None:
            raise BadRequest(
                "coverage partial without a manifest takes any tensors: give an update_id, so that only yours are taken"
            )
        if verb.per_rank and verb.placement_epoch is None:
            raise BadRequest("per_rank needs placement_epoch: of the answer of /weight_parts that the sender goes by")
        adapter = None if verb.target is None else verb.target.stated_adapter
        draft = self._draft_of(verb, adapter)
        is_models = draft is None and adapter is None
        if not is_models:
            _require_whole(verb, "a draft" if adapter is None else "an adapter")
        elif not verb.sync_base:
            _require_registered_alone(verb)
        _require_named_apart(verb)
        takes_registered = is_models and verb.adapters == "keep" and not verb.per_rank
        # Deltas come with a base, and are added to it in place.
        keeps_placement = verb.base_digest is not None or not verb.sync_base
        adopts = False if verb.adopt_placement is None and keeps_placement else verb.adopt_placement
        if update is None:  # else this begin is refused
            self._without_adapters = update_id if verb.adapters == "refuse" else None
            self.require_no_adapters(update_id)
            if is_models:
                self._adoption.opening(adopts, verb.placement_epoch)

        def io() -> None:
            self._updater.require_none_open()
            self._require_base(verb)
            target: UpdateTarget | None = draft
            manifest, beside = manifest_of(verb), dict[str, Any]()
            if adapter is not None:
                target = self._companions.adapters.target(adapter, manifest)
            elif takes_registered:
                takes_draft, takes_model = verb.selector == "all", verb.sync_base
                manifest, beside = self._companions.of_begun(manifest, takes_draft=takes_draft, takes_model=takes_model)
            elif draft is None and not verb.per_rank:
                stated = verb.adapters if isinstance(verb.adapters, list) else []
                manifest, beside = self._companions.of_update(manifest, stated, takes_draft=verb.selector == "all")
            self._updater.begin(
                verb.weight_version,
                verb.coverage if verb.sync_base else "partial",
                manifest,
                DEFAULT_LEASE_S if verb.lease_s is None else verb.lease_s,
                update_id=update_id,
                bound=verb.update_id is not None,
                cast=verb.cast,
                per_rank=verb.per_rank,
                target=target,
                prepared_s=verb.prepared_s,
                counts_tensors=verb.counts_tensors,
                **beside,
            )

        def step(_: Any) -> tuple[str, Reply]:
            if takes_registered:  # not before: a begin that is refused on any rank changes no registration
                self._companions.registered.opening(update_id)
            return begun(None)

        roll_back = functools.partial(self._updater.drop, reported=True, by_sender=True)
        has_more = bool(takes_registered and self._companions.registered.stated) or not verb.sync_base
        is_sorted = isinstance(verb.adapters, list) or self._companions.draft_weights is not None or has_more
        is_brief = verb.base_digest is None and is_models and not is_sorted
        return Job(verb, io, step, roll_back=roll_back, is_brief=is_brief)

    def _draft_of(self, verb: BeginWeightUpdateReqInput, adapter: AdapterOfUpdate | None) -> DraftTarget | None:
        """Return the draft, if it is the target.  Raises `BadRequest` where there is none, or two targets."""
        if verb.selector == "draft" and adapter is not None:
            raise BadRequest('selector "draft", and the target is an adapter: leave one of them out')
        if adapter is not None or (verb.target is None and verb.selector != "draft"):
            return None
        return self._companions.require_draft()

    def require_no_adapters(self, update_id: str | None) -> None:
        """Raise `Conflict` if the update with this id began with adapters refused, and there are some."""
        served = [label.name for label in self._scheduler.runner.state.adapters.labels]
        if served and update_id is not None and update_id == self._without_adapters:
            names = ", ".join(dict.fromkeys(served))
            raise Conflict(f"this update refuses adapters, and this server has {names}: unload them, or keep them")

    def note_digests(self) -> None:
        """Note the digests of the weights in force, if a begin computed them.  Called on the thread of steps."""
        if self._found_digests is not None:
            self._scheduler.runner.state.note_digests(self._found_digests)
            self._found_digests = None

    def _require_base(self, verb: BeginWeightUpdateReqInput) -> None:
        """Raise `BaseMismatchError` unless the sender starts from the weights in force.

        Computes their digest if the sender asks for it and it is not known.
        """
        if verb.base_version is None and verb.base_digest is None:
            return
        serving, state = self._scheduler.serving, self._scheduler.runner.state
        if serving.poisoned is not None:
            raise BaseMismatchError("the weights are poisoned: a delta cannot start from them")
        if serving.content_lost:
            raise BaseMismatchError("the weights were released: a delta cannot start from them")
        epoch = state.epoch
        if verb.base_version not in (None, epoch.weight_version):
            raise BaseMismatchError(
                f"the weights in force are version {epoch.weight_version!r}, not {verb.base_version!r}"
            )
        if verb.base_digest is None:
            return
        actual = epoch.content_digest
        if actual is None:
            content = self._updater.model.content
            content.note_live(live_fingerprints(self._updater.weights, self._updater.exchange))
            self._found_digests = content.digests
            actual = self._found_digests.sent
        if actual != verb.base_digest.lower():
            raise BaseMismatchError(f"the weights in force have digest {actual}, not {verb.base_digest}")


def _require_whole(verb: BeginWeightUpdateReqInput, what: str) -> None:
    """Raise `BadRequest` for fields that an update of `what`, an adapter or a draft, does not have."""
    given = {
        "coverage partial": verb.coverage == "partial",
        "per_rank": verb.per_rank,
        "placement_epoch": verb.placement_epoch is not None,
        "adopt_placement": bool(verb.adopt_placement),
        "adapters": verb.adapters != "keep",
        "sync_base false": not verb.sync_base,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise BadRequest(f"{', '.join(wrong)}: {what} is sent whole, to all ranks; these are for the model")


def _require_registered_alone(verb: BeginWeightUpdateReqInput) -> None:
    """Raise `BadRequest` for fields that an update without the model's tensors does not have."""
    given = {
        "coverage partial": verb.coverage == "partial",
        "per_rank": verb.per_rank,
        "placement_epoch": verb.placement_epoch is not None,
        "adopt_placement": bool(verb.adopt_placement),
        "base_digest": verb.base_digest is not None,
        "adapters": verb.adapters != "keep",
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise BadRequest(f"{', '.join(wrong)}: with sync_base false registered adapters alone come, whole")


def _require_named_apart(verb: BeginWeightUpdateReqInput) -> None:
    """Raise `BadRequest` for adapters with the model if names do not show whose tensors are, or ranks get parts."""
    if not isinstance(verb.adapters, list):
        return
    names = [each.adapter for each in verb.adapters]
    if not names:
        raise BadRequest("adapters is an empty list: leave it out, and the server keeps its own")
    if verb.per_rank:
        raise BadRequest("adapters come whole, to all ranks: begin without per_rank, or give them updates of their own")
    if len(set(names)) < len(names):
        raise BadRequest("adapters name one adapter twice")
    wrong = [name for name in names if len(names) > 1 and not is_part_of_names(name)]
    if wrong:
        raise BadRequest(
            f"the adapter {wrong[0]!r} cannot come with others: its tensors are named by it, and names of tensors hold "
            "letters, digits, _ and -"
        )
