"""`ModelState`: sole owner of the model, the placement and the version.

Weights, version and placement, on which the results of a forward depend, change only inside `mutate`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from hashlib import blake2b

from eplb.placement import ExpertPlacement
from rollout.core.errors import Conflict
from rollout.model.adapters import AdapterTable
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.draft_state import DraftState
from weight_sync.content import Digests

_EPOCHS_REMEMBERED = 16


@dataclass(frozen=True)
class ServingEpoch:
    """The versions behind a sampled token: immutable, swapped whole at a step boundary.

    `weight_version` is the trainer's label; `weight_epoch` counts commits and is never reused.  `content_digest` is the
    digest of all logical tensors as they were sent, `held_digest` as they are in memory; None if not computed.  The two
    differ if weights were converted.
    """

    weight_version: str
    weight_epoch: int = 0
    placement_epoch: int = 0
    content_digest: str | None = None
    held_digest: str | None = None

    @cached_property
    def mark(self) -> int:
        """A hash of all fields in 64 bits, which ranks compare."""
        return int.from_bytes(blake2b(repr(astuple(self)).encode(), digest_size=8).digest(), "little")


class ModelState:
    """Holds the model and the epoch in force."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        placement: ExpertPlacement,
        weight_version: str,
        adapters: AdapterTable | None = None,
        draft: DraftState | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters or AdapterTable(model)
        self.draft = draft  # None: no model drafts
        self.placement = placement
        self.epoch = ServingEpoch(weight_version, placement_epoch=placement.epoch)
        self._recent = deque([self.epoch], maxlen=_EPOCHS_REMEMBERED)
        self.model_path: str | None = None  # of the last refresh from disk
        self._mutation: str | None = None
        self._version_of_epoch = {0: weight_version}
        self._epoch_of_version = {weight_version: 0}

    def version_of(self, weight_epoch: int) -> str:
        """Return the label of a weight epoch, present or past."""
        return self._version_of_epoch[weight_epoch]

    def epoch_of(self, weight_version: str) -> int | None:
        """Return the last weight epoch that ever had this label; None for a label that was never in force."""
        return self._epoch_of_version.get(weight_version)

    @property
    def recent_epochs(self) -> Sequence[ServingEpoch]:
        """The last epochs that served, oldest first, the one in force last."""
        return tuple(self._recent)

    @contextmanager
    def mutate(self, kind: str) -> Iterator[None]:
        """Let the block, and nothing else, change weights, version or placement.

        Raises `Conflict` during another mutation.
        """
        if self._mutation is not None:
            raise Conflict(f"{kind} cannot start while {self._mutation} is under way")
        self._mutation = kind
        try:
            yield
        finally:
            self._mutation = None

    def publish_weights(self, weight_version: str, digests: Digests) -> None:
        """Publish the new content as a new epoch under `weight_version`, in one assignment."""
        assert self._mutation is not None, "weights are published inside mutate()"
        epoch = ServingEpoch(weight_version, self.epoch.weight_epoch + 1, self.placement.epoch, *digests)
        self._version_of_epoch[epoch.weight_epoch] = weight_version
        self._epoch_of_version[weight_version] = epoch.weight_epoch
        self._recent.append(epoch)
        self.epoch = epoch
        if self.draft is not None:
            self.draft.compare(weight_version)

    def publish_draft(self, weight_version: str, digests: Digests) -> None:
        """Publish new content of the draft, which belongs to this version of the model; no output depends on it."""
        assert self._mutation is not None and self.draft is not None, "drafts are published inside mutate()"
        self.draft.publish(weight_version, digests)

    def publish_placement(self) -> None:
        """Publish the placement's new epoch; the weights are the same."""
        assert self._mutation is not None, "placements are published inside mutate()"
        self._amend(replace(self.epoch, placement_epoch=self.placement.epoch))

    def relabel(self, weight_version: str) -> None:
        """Give the content in force another label, from the next token on."""
        assert self._mutation is not None, "versions change inside mutate()"
        self._amend(replace(self.epoch, weight_version=weight_version))
        self._version_of_epoch[self.epoch.weight_epoch] = weight_version
        self._epoch_of_version[weight_version] = self.epoch.weight_epoch
        if self.draft is not None:
            self.draft.relabel(weight_version)

    def note_digests(self, digests: Digests) -> None:
        """Record the digests of all logical tensors of the content in force."""
        self._amend(replace(self.epoch, content_digest=digests.sent, held_digest=digests.held))

    def drop_digests(self) -> None:
        """Forget the digests of the epoch in force, as memory no longer holds that content.

        Earlier contents keep their digests among `recent_epochs`; the epoch in force has none.
        """
        self.epoch = replace(self.epoch, content_digest=None, held_digest=None)

    def _amend(self, epoch: ServingEpoch) -> None:
        """Replace the epoch in force with updated metadata of the same weights."""
        self.epoch = self._recent[-1] = epoch
