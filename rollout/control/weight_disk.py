"""Weights from disk: `update_weights_from_disk`, and `pull_weights` into a local checkpoint and, if asked, memory.

update_weights_from_disk   check all -> stage -> verify -> commit, a refresh of its own; or a bucket of an open one
pull_weights               local checkpoint to the target version; with `update_memory` then a refresh of its own from
                           there: of the changed tensors if memory is at a version of this source, else of all tensors
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout.adapters.peft_folder import TENSORS
from rollout.control.adapter_target import AdapterTarget
from rollout.control.draft_target import Companions
from rollout.control.placement_adoption import PlacementAdoption
from rollout.control.weight_commit import WeightCommit
from rollout.control.weight_queue import Job
from rollout.core.args.named_folders import NamedFolders
from rollout.core.errors import StartupError
from rollout.core.messages.update_state import UpdateStateReply
from rollout.core.messages.weight_replies import PullReply
from rollout.core.messages.weights import DiskReply, PullWeightsReqInput, UpdateWeightsFromDiskReqInput
from rollout.core.specs.model_config import ModelConfig
from rollout.families.registry import load_model_config
from rollout.scheduler.scheduler import Scheduler
from weight_sync.checkpoint_folder import require_folder
from weight_sync.delta.local_checkpoint import PullResult, patched_in, pull
from weight_sync.delta.local_state import LocalVersion
from weight_sync.delta.version_dir import chain_of
from weight_sync.errors import TransportError, WeightRequestError
from weight_sync.ledger import Coverage
from weight_sync.receivers.base import BucketSource
from weight_sync.receivers.disk import DiskSource, check_against_model
from weight_sync.safetensors_file import read_small
from weight_sync.update import WeightUpdate
from weight_sync.updater import WeightUpdater

Opened = tuple[Coverage, dict[str, Any]]
"""The coverage of an update of its own, and the fields of `WeightUpdater.begin` for its targets."""
HowPulled = Literal["delta", "full", "unchanged"]
LOAD_FORMATS = (None, "auto", "safetensors")
_MAX_CONFIG_BYTES = 16 << 20
# Fields that may differ between two checkpoints of one model; the epsilon of latents is a setting of the server.
_FREE_CONFIG_FIELDS = {"torch_dtype", "eos_token_ids", "max_position_embeddings", "stored_format", "latent_eps"}


@dataclass(frozen=True)
class MemoryOrigin:
    """The published version of the weights of a weight epoch.  `source` None: version 0 of any source."""

    weight_epoch: int
    version: int
    source: str | None


class DiskRefresh:
    """`base_path`: the checkpoint that the engine started from, version 0 of every source.

    `overrides` replace settings of every `config.json`, as at the start.
    `timeout_s`: how long another process may keep a local checkpoint locked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        updater: WeightUpdater,
        adoption: PlacementAdoption,
        commit: WeightCommit,
        companions: Companions,
        *,
        base_path: str,
        folders: NamedFolders,
        overrides: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._adoption = adoption
        self._commit = commit
        self._companions = companions
        self._base = Path(base_path)
        self._folders = folders
        self._overrides = overrides
        self._timeout_s = timeout_s
        self._origin = MemoryOrigin(scheduler.runner.state.epoch.weight_epoch, 0, None)

    @property
    def jobs(self) -> dict[type, Callable[[Any], Job]]:
        return {UpdateWeightsFromDiskReqInput: self._from_disk, PullWeightsReqInput: self._pull}

    # --- update_weights_from_disk ---------------------------------------------------------------------------------

    def _from_disk(self, verb: UpdateWeightsFromDiskReqInput) -> Job:
        foreign = self._updater.foreign(verb.update_id, verb.weight_version)
        if verb.abort_all_requests and foreign is None:
            self._scheduler.abort(None)
        update = self._updater.update
        opens = update is None
        if opens and foreign is None:
            self._adoption.opening()
        is_implicit = update is not None and update.is_implicit
        refusal = foreign or self._companions.refusal(verb.selector, update)

        def io() -> LocalVersion | None:
            if refusal is not None:
                raise refusal
            if is_implicit:
                self._updater.require_none_open("a folder cannot join it")
            if verb.load_format not in LOAD_FORMATS:
                known = "null, 'auto', 'safetensors'"
                raise WeightRequestError(f"unknown load_format {verb.load_format[:64]!r}; known: {known}")
            try:
                source = self._source_of(verb, self._folders.readable(verb.model_path), update)
            except Exception as error:
                if update is not None:  # other ranks may have read it
                    update.spoil(str(error), verb.weight_version, verb.update_id)
                raise
            try:
                if opens:
                    opened = self._companions.of_call(verb.selector, "full")
                    self._refresh(source, opened, verb.weight_version, verb.request_id)
                else:
                    self._updater.receive(source, verb.weight_version, verb.update_id)
            finally:
                source.close()
            return source.local_version

        def step(local_version: LocalVersion | None) -> tuple[str, DiskReply]:
            if not opens:
                state = UpdateStateReply(**self._updater.status())
                return "Succeeded to receive weights.", DiskReply(weight_update=state)
            message, commit = self._commit.run()
            if verb.selector != "draft":  # which leaves the model as it was
                self._scheduler.runner.state.model_path = verb.model_path
                if local_version is not None:
                    self._note_origin(local_version.version, local_version.source)
            queues = self._scheduler.queues
            num_paused = len(queues.all()) if self._scheduler.serving.is_paused else 0
            facts = msgspec.structs.asdict(commit)
            return message, DiskReply(**facts, num_paused_requests=num_paused, model_path=verb.model_path)

        roll_back = None if opens else self._updater.fail
        holds = self._updater.holds_steps
        return Job(verb, io, step, holds_steps=holds, roll_back=roll_back)

    def _source_of(self, verb: UpdateWeightsFromDiskReqInput, path: Path, update: WeightUpdate | None) -> DiskSource:
        """Return a folder's tensors, for the open update; None: for one of their own.

        Raises `WeightRequestError`, `AdapterError` for the folder of another model or adapter.
        """
        adapter = None if update is None else _adapter_in(path, update)
        is_drafts = verb.selector == "draft" if update is None else update.target is self._companions.draft
        draft = self._companions.require_draft() if is_drafts else None
        if adapter is not None:
            adapter.require_same_config(path)
        elif draft is not None and draft.draft.config is not None:
            require_same_model(path, draft.draft.config, {})
        else:
            require_same_model(path, self._scheduler.runner.state.model.config, self._overrides)
        target = adapter or draft
        takes_both = verb.selector == "all" if update is None else self._companions.draft in update.targets[1:]
        return DiskSource(
            path,
            self._updater.target if target is None else target.weights,
            complete=update is None,
            timeout_s=self._timeout_s,
            known_calls=(draft or self._updater.model).known_calls,
            version=verb.pulled_version,
            file=None if adapter is None else TENSORS,
            further=self._companions.draft_weights if takes_both and target is None else None,
        )

    # --- pull_weights ---------------------------------------------------------------------------------------------

    def _pull(self, verb: PullWeightsReqInput) -> Job:
        is_open = self._updater.is_open
        foreign = None if verb.update_id is None else self._updater.foreign(verb.update_id)
        if not is_open and foreign is None:
            self._adoption.opening()
        weights = self._scheduler.runner.state.model.weights

        def io() -> tuple[PullResult, HowPulled | None]:
            if foreign is not None:
                raise foreign
            if verb.update_memory:
                self._updater.require_none_open()
            local = self._folders.writable(verb.local_checkpoint_dir)
            source = self._folders.readable(verb.source_dir)
            result = pull(
                local,
                self._base,
                source,
                verb.target_version,
                timeout_s=self._timeout_s,
                check=functools.partial(check_against_model, weights),
            )
            return result, self._pull_into_memory(verb, local, source) if verb.update_memory else None

        def step(done: tuple[PullResult, HowPulled | None]) -> tuple[str, PullReply]:
            result, memory = done
            facts: dict[str, Any] = {}
            if memory in ("delta", "full"):
                facts = msgspec.structs.asdict(self._commit.run()[1])
                self._note_origin(verb.target_version, str(Path(verb.source_dir).resolve()))
            return "Success.", PullReply(**dataclasses.asdict(result), memory=memory, **facts)

        holds = verb.update_memory and self._updater.holds_steps
        return Job(verb, io, step, holds_steps=holds)

    def _pull_into_memory(self, verb: PullWeightsReqInput, local: Path, source: Path) -> HowPulled:
        """Stage and verify the tensors that bring memory to the target.

        Returns the way: "delta", a "full" load, or "unchanged".
        """
        version = str(verb.target_version) if verb.weight_version is None else verb.weight_version
        weights = self._scheduler.runner.state.model.weights
        start = self._origin_in(source)
        if start == verb.target_version and start > 0:
            return "unchanged"
        changed: Collection[str] | None = None
        if start is not None and start < verb.target_version:
            changed = _changed_since(start, source, verb.target_version) or None
        folder = DiskSource(
            local,
            weights,
            complete=changed is None,
            timeout_s=self._timeout_s,
            known_calls=self._updater.model.known_calls,
            names=changed,
            version=verb.target_version,
            further=self._companions.draft_weights,
        )
        opened: Opened = ("full" if changed is None else "partial", self._companions.of_update()[1])
        try:
            self._refresh(folder, opened, version, verb.request_id)
        finally:
            folder.close()
        return "full" if changed is None else "delta"

    def _origin_in(self, source: Path) -> int | None:
        """Return the version of `source` that memory holds, if it is known to hold one, whole."""
        state, origin = self._scheduler.runner.state, self._origin
        if not self._scheduler.serving.has_whole_weights or state.epoch.weight_epoch != origin.weight_epoch:
            return None
        return origin.version if origin.source in (None, str(source.resolve())) else None

    # --- both -----------------------------------------------------------------------------------------------------

    def _refresh(self, source: BucketSource, opened: Opened, weight_version: str | None, update_id: str) -> None:
        """Receive and verify in a transaction of its own, which is aborted if anything fails."""
        coverage, targets = opened
        self._updater.open_implicit(coverage, update_id, **targets)
        try:
            self._updater.receive(source, weight_version)
        except Exception:
            self._updater.abort(update_id)
            raise
        self._updater.verify(update_id)

    def _note_origin(self, version: int, source: str | None) -> None:
        if source is not None:
            self._origin = MemoryOrigin(self._scheduler.runner.state.epoch.weight_epoch, version, source)


def _adapter_in(path: Path, update: WeightUpdate) -> AdapterTarget | None:
    """Return the target of an update that a folder has tensors for; None: the model.

    Raises `WeightRequestError` for the folder of an adapter, where the update has several.
    """
    adapters = [target for target in update.targets if isinstance(target, AdapterTarget)]
    if not adapters or not (update.target is adapters[0] or (path / TENSORS).exists()):
        return None
    if len(adapters) > 1:
        raise WeightRequestError("a folder does not say which of the update's adapters it holds: send tensors by name")
    return adapters[0]


def _changed_since(start: int, source: Path, target: int) -> Collection[str]:
    """Return the tensors that change from `start` to `target`; none if no published chain of deltas joins them."""
    try:
        deltas, _, found = chain_of(source, target, lambda number: number == start)
        return patched_in(deltas) if found == start else ()
    except (WeightRequestError, TransportError):
        return ()  # all of the local checkpoint, which is at the target, is read instead


def require_same_model(path: Path, running: ModelConfig, overrides: Mapping[str, Any]) -> None:
    """Require that the folder's `config.json`, if there is one, describes the running model.

    `overrides` replace its settings, too.  Raises `WeightRequestError` that names what differs.
    """
    require_folder(path)
    if not (path / "config.json").exists():
        return
    for name in ("config.json", "generation_config.json"):
        if (path / name).exists():
            read_small(path / name, _MAX_CONFIG_BYTES)  # refuses files that could block for ever
    try:
        stated = load_model_config(path, overrides)
    except StartupError as error:
        raise WeightRequestError(str(error)) from None
    facts, others = _facts(dataclasses.asdict(running)), _facts(dataclasses.asdict(stated))
    for name in facts | others:
        here, there = facts.get(name), others.get(name)
        if _FREE_CONFIG_FIELDS.isdisjoint(name.split(".")) and here != there:
            raise WeightRequestError(f"{path / 'config.json'} has {name} {there}, the running model {here}")


def _facts(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return plain values by dotted name: `layers.3.attention.num_heads`."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, tuple):
            value = dict(enumerate(value))
        found |= _facts(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
