"""`AdapterTarget`: one adapter as the target of a weight update.

begin        its tensors, from the manifest or the configuration; what cannot be served is refused
buckets      every transport writes them into memory of their own; the model and its adapters serve on
verify       on the I/O thread: the adapter is checked, and converted for this rank; all ranks vote
commit       between two steps of all ranks: its slot is chosen, it is written there, all ranks vote, and it becomes
             the next version of its name
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

from rollout.adapters.config import LoraConfig, target_modules
from rollout.adapters.peft_folder import adapter_of, place_of, read_config, require_checksums, sha256_of
from rollout.core.errors import AdapterError
from rollout.core.messages.update_state import AdapterOfUpdate, AdapterVersion
from rollout.model.adapter_places import SlotContent
from rollout.model.adapter_weights import AdapterWeights, announced_weights, configured_weights
from rollout.model.adapters import AdapterTable, PlannedVersion, PreparedAdapter
from weight_sync.held_format import AS_SENT
from weight_sync.in_model import Apart
from weight_sync.manifest import Manifest
from weight_sync.update_target import UpdateTarget


class _NextVersion:
    """The tensors on their way into `table`.  It does not know the target, so that an update is freed as it ends."""

    def __init__(self, table: AdapterTable, name: str, config: LoraConfig, weights: AdapterWeights) -> None:
        self.table, self.name, self._config, self._weights = table, name, config, weights
        self.prepared: PreparedAdapter | None = None
        self.planned: PlannedVersion | None = None
        self._before: SlotContent | None = None
        self._is_written = False

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of the bytes of each tensor as it was sent."""
        pairs = self._weights.pairs().items()
        return {f"{module}.lora_{side}": sha256_of(each) for module, sides in pairs for side, each in sides.items()}

    def prepare(self) -> None:
        self.prepared = self.table.prepare(self.name, adapter_of(self._weights.pairs(), self._config))

    def write(self) -> None:
        assert self.planned is not None, "`plan_versions` was called"
        self._before = self.table.content(self.planned)
        self._is_written = True
        self.table.write(self.planned)

    def undo(self) -> None:
        if self._is_written and self.planned is not None:
            self.table.write_back(self.planned, self._before)
        self.forget()

    def forget(self) -> None:
        """Release what belongs to one update."""
        self.prepared = self.planned = self._before = None
        self._is_written = False


class AdapterTarget(UpdateTarget):
    """The next version of adapter `name` in `table`, with this configuration.

    `is_known`: one with this configuration was made before, so that names and shapes are not asked again.
    """

    def __init__(
        self, table: AdapterTable, name: str, config: LoraConfig, weights: AdapterWeights, *, is_known: bool = False
    ) -> None:
        self._config, self._next = config, _NextVersion(table, name, config, weights)
        apart = Apart(self._next.prepare, self._next.write, self._next.undo)
        super().__init__(f"adapter {name}", weights, lambda _: weights, AS_SENT, apart)
        if not is_known:
            self._next.prepare()  # with zeros: what only names and shapes decide

    def begin(self, name: str) -> None:
        """Start another update, for the next version of adapter `name`."""
        self._next.forget()
        self._next.name, self.name = name, f"adapter {name}"

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors, in host memory."""
        return sum(meta.nbytes for meta in self.weights.metas().values())

    @property
    def adapter(self) -> str:
        """The name of the adapter."""
        return self._next.name

    def require_checksums(self, stated: Mapping[str, str]) -> None:
        """Raise `AdapterError` unless the tensors that came have these SHA-256, by the sender's names."""
        found = self._next.checksums()
        require_checksums(
            f"expected_lora_checksums of {self.adapter!r}",
            {_place_text(name): each for name, each in stated.items()},
            found,
        )

    def require_same_config(self, folder: Path) -> None:
        """Raise `AdapterError` unless the folder's tensors are meant for the configuration of this update."""
        if LoraConfig.of(read_config(folder)) != self._config:
            raise AdapterError(
                f"{folder}: adapter_config.json differs from the configuration that the update began with"
            )

    def publish(self) -> AdapterVersion:
        """Put the version in force that was written; return it."""
        assert self._next.planned is not None, "it is committed"
        label = self._next.table.publish(self._next.planned).label
        self._next.forget()
        return AdapterVersion(name=label.name, version=label.version, content_digest=label.content_digest)

    @staticmethod
    def plan_versions(targets: Sequence[AdapterTarget]) -> None:
        """Choose the versions and slots of verified targets, on the thread of steps of all ranks.

        Raises as `AdapterTable.plan`.
        """
        following = [target._next for target in targets]
        prepared = [each.prepared for each in following if each.prepared is not None]
        if targets:
            for each, planned in zip(following, following[0].table.plan(prepared), strict=True):
                each.planned = planned


class AdapterTargets:
    """Makes the targets of updates of adapters in `table`, and keeps the ones that a manifest announced.

    A target is found again for the same tensors and configuration, with its memory and its plans: what only names and
    shapes decide is not asked again.  The ones used last are kept, with at most `max_bytes` of tensors together.
    """

    def __init__(self, table: AdapterTable, max_bytes: int = 256 << 20) -> None:
        self._table, self._max_bytes = table, max_bytes
        self._kept: OrderedDict[Hashable, AdapterTarget] = OrderedDict()

    def target(self, stated: AdapterOfUpdate, manifest: Manifest | None, *, is_known: bool = False) -> AdapterTarget:
        """Return the target that a begin states, while no update is open.  `is_known`: see `AdapterTarget`.

        Raises `AdapterError`, and `WeightRequestError` for its manifest.
        """
        self._table.require_name(stated.adapter)
        if manifest is None:
            config = LoraConfig.of(stated.config)
            modules = target_modules(stated.config)
            weights = configured_weights(config, modules, self._table.places, stated.aliases)
            return AdapterTarget(self._table, stated.adapter, config, weights, is_known=is_known)
        if stated.aliases:
            raise AdapterError("aliases are for updates without a manifest: list all tensors, and send them")
        key = json.dumps(stated.config), manifest.key
        target = None if manifest.key is None else self._kept.get(key)
        if target is None:
            config = LoraConfig.of(stated.config)
            weights = announced_weights(manifest.metas(), self._table.places)
            target = AdapterTarget(self._table, stated.adapter, config, weights)
        target.begin(stated.adapter)
        if manifest.key is not None:
            self._kept[key] = target
            self._kept.move_to_end(key)
            self._drop_oldest()
        return target

    def _drop_oldest(self) -> None:
        sizes = [target.num_bytes for target in self._kept.values()]
        while sum(sizes) > self._max_bytes:
            self._kept.popitem(last=False)
            del sizes[0]


def _place_text(name: str) -> str:
    """Return the module and side of a tensor of this name; the name itself, where it is not an adapter's."""
    try:
        module, side = place_of(name)
    except AdapterError:
        return name
    return f"{module}.lora_{side}"
