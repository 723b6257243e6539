"""`DraftState`: the weights of a draft that is a model, their version, and whether the served model has moved on.

A draft's weights change the speed alone, so nothing of them is in a `ServingEpoch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.core.specs.model_config import ModelConfig
from rollout.model.weight_loading import WeightIndex
from weight_sync.content import Digests


@dataclass(eq=False)
class DraftState:
    """`weights`: of the draft's layers.  `weight_version`: the label of the model's weights that they belong to.

    `config`: of a draft that has a checkpoint of its own; None: its tensors are in the model's checkpoint.
    `is_stale`: the model's weights have another version since, whose draft did not come.
    `digests`: of all tensors, where they are known.
    """

    weights: WeightIndex
    weight_version: str
    config: ModelConfig | None = None
    is_stale: bool = False
    digests: Digests = field(default_factory=Digests)

    def publish(self, weight_version: str, digests: Digests) -> None:
        """Put new content in force, which belongs to this version of the model."""
        self.weight_version, self.digests, self.is_stale = weight_version, digests, False

    def compare(self, weight_version: str) -> None:
        """Take in that the model has new content under this label."""
        self.is_stale = self.weight_version != weight_version

    def relabel(self, weight_version: str) -> None:
        """Take in another label of the model's content, which is the draft's label, too, unless it is stale."""
        if not self.is_stale:
            self.weight_version = weight_version
