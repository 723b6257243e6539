"""`DraftTarget`: a draft's weights as the target of a weight update, alone or with the model.

names of its own        the draft is another checkpoint    an update whose target is the draft
other than the model's  `mtp.*`, further layers            that, or an update of the model, in the same commit

`Companions`: the targets that come into force with the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout.control.adapter_target import AdapterTargets
from rollout.control.registered_adapters import PrefixOwner, RegisteredAdapters, adapters_in
from rollout.control.tensor_owner import TensorOwner
from rollout.core.errors import AdapterError, BadRequest, Conflict
from rollout.core.messages.update_state import AdapterOfUpdate, DraftVersion
from rollout.core.messages.weights import Selector
from rollout.model.draft_state import DraftState
from rollout.model.model_state import ModelState
from rollout.model.weight_loading import WeightIndex
from weight_sync.ledger import Coverage
from weight_sync.manifest import Manifest
from weight_sync.paired_wire import keeps
from weight_sync.sorter import KnownParts, Sorter
from weight_sync.update import WeightUpdate
from weight_sync.update_target import Further, UpdateTarget


class DraftTarget(UpdateTarget):
    """The weights of `draft`, which drafts for the model with the weights `model`.

    `comes_with_model`: no tensor has the name of one of the model's, so that a name shows whose a tensor is.
    `torn_elsewhere`: `torn` of any rank of this replica, as its ranks found between the last verbs.  `require_memory`
    raises `TransactionStateError` while the weights have none.
    """

    def __init__(
        self, draft: DraftState, model: WeightIndex, require_memory: Callable[[], None] = lambda: None
    ) -> None:
        self.draft = draft
        self.torn_elsewhere: str | None = None
        metas = draft.weights.metas().values()
        self.comes_with_model = not any(keeps(model, meta) for meta in metas)
        # A sender of all of a checkpoint's tensors sends the model's, too, and SGLang and vLLM have the draft pick.
        weights = draft.weights.dropping(model) if self.comes_with_model else draft.weights

        def placed(_: Coverage) -> WeightIndex:
            require_memory()
            return weights

        super().__init__("draft", weights, placed, draft.weights.held_formats())

    def version(self) -> DraftVersion:
        """Return the version in force."""
        draft, torn = self.draft, self.torn or self.torn_elsewhere
        return DraftVersion(
            weight_version=draft.weight_version,
            is_stale=draft.is_stale or torn is not None,
            content_digest=None if torn is not None else draft.digests.sent,
            torn=torn,
        )


class Companions:
    """Finds the further targets of an update: adapters that it states, and the draft.  `draft` None: there is none."""

    def __init__(
        self, state: ModelState, adapters: AdapterTargets, registered: RegisteredAdapters, draft: DraftTarget | None
    ) -> None:
        self.draft, self.adapters, self.registered = draft, adapters, registered
        self._table, self._weights = state.adapters, state.model.weights
        self._with_model = None if draft is None or not draft.comes_with_model else draft
        self._layouts = KnownParts()

    @property
    def draft_weights(self) -> WeightIndex | None:
        """The draft's weights, if they may come with the model's."""
        return None if self._with_model is None else self._with_model.draft.weights

    def refusal(self, selector: Selector, update: WeightUpdate | None) -> Exception | None:
        """Return why tensors of SGLang's `selector` cannot come in an update; None if they can.

        `update` None: one of their own.
        """
        if selector == "draft" and self.draft is None:
            return _no_draft()
        if selector == "draft" and update is not None and update.target is not self.draft:
            return Conflict(f'selector "draft", and the open weight update has the target {update.target_names}')
        return None

    def of_call(self, selector: Selector, coverage: Coverage) -> tuple[Coverage, dict[str, Any]]:
        """Return the coverage of an update that a call opens, and the fields of `WeightUpdater.begin` for its targets.

        A draft comes whole.  A call that is a part of the model may have some of the draft's tensors: it leaves them.
        """
        if selector == "draft":
            return "full", {"target": self.require_draft()}
        return coverage, self.of_update(takes_draft=selector == "all" and coverage == "full")[1]

    def require_draft(self) -> DraftTarget:
        """Return the draft.  Raises `BadRequest` where no model drafts."""
        if self.draft is None:
            raise _no_draft()
        return self.draft

    def of_update(
        self, manifest: Manifest | None = None, stated: Sequence[AdapterOfUpdate] = (), *, takes_draft: bool = True
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """Return the model's part of a manifest, and the fields of `WeightUpdater.begin` for its companions.

        Without a manifest the draft's tensors come or not.  Raises as `AdapterTargets.target`.
        """
        draft = self._with_model if takes_draft else None
        names = [each.adapter for each in stated]
        for name in names:
            self._table.require_name(name)
        if names:
            self._table.require_room(names)
        elif draft is None:
            return manifest, {}
        owner = TensorOwner(names, self._weights, None if draft is None else draft.draft.weights)
        sorter = Sorter(owner.count, owner, owner.rule, self._layouts)
        mine, *theirs = [None] * sorter.count if manifest is None else sorter.manifests(manifest)
        if draft is not None and theirs[-1] is not None and not theirs[-1].metas():
            return self.of_update(manifest, stated, takes_draft=False)
        parts = [Further(self.adapters.target(one, part), part) for one, part in zip(stated, theirs)]
        if draft is not None:
            parts.append(Further(draft, theirs[-1], is_optional=manifest is None))
        return mine, {"beside": parts, "sorter": sorter}

    def of_begun(
        self, manifest: Manifest | None, *, takes_draft: bool, takes_model: bool
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """Return as `of_update` what an update may bring that states no adapters: the registered ones.

        Without a manifest each of them comes or not.  `takes_model` False: they alone come.  Raises as `of_update`.
        """
        stated = self.registered.stated
        if stated and manifest is not None:
            came = adapters_in(manifest.metas())
            stated = [each for each in stated if each.adapter in came]
        if takes_model and not stated:
            return self.of_update(manifest, takes_draft=takes_draft)
        draft = self._with_model if takes_draft and takes_model else None
        if draft is not None and manifest is not None:
            is_there = any(keeps(draft.draft.weights, meta) for meta in manifest.metas())
            draft = draft if is_there else None
        if not takes_model and self._table.max_rank is None:
            raise AdapterError("sync_base false, and this server has no adapters: start it with --enable-lora")
        names = [each.adapter for each in stated]
        owner = PrefixOwner(names, None if draft is None else draft.draft.weights, takes_model=takes_model)
        sorter = Sorter(owner.count, owner, owner.rule, self._layouts, owner.named)
        mine, *theirs = [None] * sorter.count if manifest is None else sorter.manifests(manifest)
        is_optional = manifest is None
        parts = [
            Further(self.adapters.target(one, part, is_known=True), part, is_optional)
            for one, part in zip(stated, theirs)
        ]
        if draft is not None:
            parts.append(Further(draft, theirs[-1], is_optional))
        return mine if takes_model else None, {"beside": parts, "sorter": sorter, "takes_first": takes_model}


def _no_draft() -> BadRequest:
    return BadRequest("no model drafts on this server, so that no weights of a draft can be refreshed")
