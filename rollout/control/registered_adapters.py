"""`RegisteredAdapters`: the adapters whose tensors come in updates of the model, as NAME:TENSOR, and their verb.

    register_lora_adapter     its configuration is checked and kept; nothing is served
    begin_weight_update       it may come: all of its tensors, or none of them
    end_weight_update         if it came, it is the next version of its name, with the model's weights or without them

A registration holds for all later updates, until its name is unloaded or registered anew.  One with `defer_publish`
holds for the next update alone, unless that has put it in force.  It takes no slot.

All ranks plan verbs in the same order, so that they have the same registrations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.control.adapter_target import AdapterTarget, AdapterTargets
from rollout.control.tensor_owner import is_of_adapter
from rollout.control.weight_queue import Job
from rollout.core.errors import AdapterError, Conflict
from rollout.core.known_fields import shown
from rollout.core.messages.adapters import RegisterLoraAdapterReqInput, RegisterReply
from rollout.core.messages.update_state import AdapterOfUpdate
from rollout.model.adapters import AdapterTable
from weight_sync.errors import WeightRequestError
from weight_sync.paired_wire import keeps
from weight_sync.tensor_meta import LogicalWeights, TensorMeta
from weight_sync.update import WeightUpdate
from weight_sync.updater import WeightUpdater

_SIGN = ":"


@dataclass(frozen=True)
class _Registration:
    """A configuration.  `is_deferred`: for one update.  `update_id`: of the last update in which it may have come."""

    stated: AdapterOfUpdate
    is_deferred: bool
    update_id: str | None = None

    def is_same(self, stated: AdapterOfUpdate, is_deferred: bool) -> bool:
        return (self.stated.config, self.is_deferred) == (stated.config, is_deferred)


class RegisteredAdapters:
    """Keeps the registrations of one rank.  Every method but `io` of a job is called on the thread of steps."""

    def __init__(self, table: AdapterTable, targets: AdapterTargets, updater: WeightUpdater) -> None:
        self._table, self._targets, self._updater = table, targets, updater
        self._known: dict[str, _Registration] = {}

    @property
    def jobs(self) -> dict[type, Callable[[Any], Job]]:
        return {RegisterLoraAdapterReqInput: self._register}

    @property
    def stated(self) -> list[AdapterOfUpdate]:
        """The adapters that an update may bring, by name."""
        return [known.stated for _, known in sorted(self._known.items())]

    def opening(self, update_id: str) -> None:
        """Note that an update with this id is open, which may bring all of them."""
        self._known = {name: replace(known, update_id=update_id) for name, known in self._known.items()}

    def settle(self) -> None:
        """Drop deferred registrations whose update has ended without them."""
        update = self._updater.update
        for name, known in list(self._known.items()):
            has_ended = known.update_id is not None and (update is None or update.id != known.update_id)
            if known.is_deferred and has_ended:
                self._end_deferred(name)

    @property
    def has_deferred(self) -> bool:
        return any(known.is_deferred for known in self._known.values())

    def drop_deferred(self) -> None:
        """Drop the deferred registrations of names that are not served."""
        for name in [name for name, known in self._known.items() if known.is_deferred]:
            self._end_deferred(name)

    def require_not_coming(self, name: str) -> None:
        """Raise `Conflict` for a name whose first weights the open update may bring."""
        known, update = self._known.get(name), self._updater.update
        if known is None or update is None or update.id != known.update_id or self._table.serves(name):
            return
        raise Conflict(f"the first weights of {shown(repr(name))} may come in the open weight update {update.way_out}")

    def drop(self, name: str) -> bool:
        """Drop the registration of a name.  Returns whether there was one."""
        if name not in self._known:
            return False
        del self._known[name]
        self._table.register(sorted(self._known))
        return True

    def _end_deferred(self, name: str) -> None:
        """Drop a deferred registration; of a name that is served it becomes one for all updates."""
        if self._table.serves(name):
            self._known[name] = replace(self._known[name], is_deferred=False)
        else:
            self.drop(name)

    # --- the verb -------------------------------------------------------------------------------------------------

    def _register(self, verb: RegisterLoraAdapterReqInput) -> Job:
        """Plan a registration.  Raises `AdapterError`, `Conflict`."""
        name = verb.lora_name
        stated = AdapterOfUpdate(adapter=name, config=verb.config_dict)
        self._table.require_name(name)
        known = self._known.get(name)
        is_there = known is not None and known.is_same(stated, verb.defer_publish)
        if not is_there:
            self._require_may_come(name, verb.defer_publish)

        def io() -> None:
            if not is_there:
                self._targets.target(stated, None)  # checks what names, shapes and ranks decide

        def step(_: Any) -> tuple[str, RegisterReply]:
            if not is_there:
                self._known[name] = _Registration(stated, verb.defer_publish)
                self._table.register(sorted(self._known))
            sources, pending = self._table.sources, not self._table.serves(name)
            reply = RegisterReply(lora_name=name, pending=pending, loaded_adapters=sources)
            return f"Adapter {name!r} registered: a weight update brings its tensors as {name}{_SIGN}TENSOR.", reply

        return Job(verb, io, step)

    def _require_may_come(self, name: str, is_deferred: bool) -> None:
        """Raise for a registration that must not be made now: `Conflict` amid an update, else `AdapterError`."""
        update = self._updater.update
        if _SIGN in name:
            raise AdapterError(f"{name!r}: a registered name holds no {_SIGN!r}, which stands before names of tensors")
        if update is not None:
            raise Conflict(f"register an adapter before its update begins: a weight update is open {update.way_out}")
        if self._table.serves(name):
            if is_deferred:
                raise AdapterError(f"the adapter {name!r} is served: defer_publish is for a name that is not")
            return
        awaited = [other for other in self._table.awaited if other != name]
        try:
            self._table.require_room([*awaited, name])
        except AdapterError as error:
            waiting = f"; registered, and without weights: {', '.join(awaited)}" if awaited else ""
            raise AdapterError(f"there is no room for the adapter {name!r}: {error}{waiting}") from None


class PrefixOwner:
    """Numbers the targets of an update with registered adapters: 0 is the model, then come `adapters`, and the `draft`.

    What stands before the first colon of a name is the adapter.  `takes_model`: False, no others may come.
    `count`, `rule`: as of `TensorOwner`.
    """

    def __init__(self, adapters: Sequence[str], draft: LogicalWeights | None, *, takes_model: bool) -> None:
        self._numbers = {name: number for number, name in enumerate(adapters, 1)}
        self._draft, self._takes_model = draft, takes_model
        self.count = 1 + len(adapters) + (draft is not None)
        self.rule = _SIGN, tuple(adapters), draft is not None, takes_model

    def __call__(self, meta: TensorMeta) -> int:
        """Return the number of a tensor's target.  Raises `WeightRequestError`."""
        adapter, sign, _ = meta.name.partition(_SIGN)
        if sign:
            if adapter not in self._numbers:
                known = ", ".join(self._numbers) or "none"
                raise WeightRequestError(
                    f"{shown(meta.name)}: this update may bring the registered adapters {known}; "
                    "/register_lora_adapter comes before begin_weight_update"
                )
            return self._numbers[adapter]
        if is_of_adapter(meta.name):
            raise WeightRequestError(f"{shown(meta.name)}: the name of its adapter is missing, as in NAME{_SIGN}TENSOR")
        if not self._takes_model:
            raise WeightRequestError(
                f"{shown(meta.name)} belongs to the model, and this update began with sync_base false, for adapters "
                "alone"
            )
        if self._draft is not None and keeps(self._draft, meta):
            return self.count - 1
        return 0

    @staticmethod
    def named(meta: TensorMeta) -> TensorMeta:
        """Return a tensor by the name that its target knows."""
        _, sign, name = meta.name.partition(_SIGN)
        return meta._replace(name=name) if sign else meta


def adapters_in(metas: Sequence[TensorMeta]) -> set[str]:
    """Return the adapters that names of tensors have before a colon."""
    return {meta.name.partition(_SIGN)[0] for meta in metas if _SIGN in meta.name}


def require_checksums(stated: Mapping[str, Mapping[str, str]] | None, update: WeightUpdate) -> None:
    """Raise `AdapterError` unless exactly these adapters came, each with exactly these tensors.  None: not stated.

    `stated`: the SHA-256 of the bytes of each tensor, in hex, by adapter and the sender's name.
    """
    if stated is None:
        return
    came = {target.adapter: target for target in update.targets if isinstance(target, AdapterTarget)}
    if stated.keys() != came.keys():
        listed = [", ".join(sorted(map(shown, names))) or "none" for names in (stated, came)]
        raise AdapterError(f"expected_lora_checksums has the adapters {listed[0]}, and these came: {listed[1]}")
    for name, target in came.items():
        target.require_checksums(stated[name])
