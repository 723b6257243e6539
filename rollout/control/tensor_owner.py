"""`TensorOwner`: whose a tensor is that comes in an update of the model, of adapters and of the draft, by its name.

model.layers.0.self_attn.q_proj.weight                              the model's
base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      the adapter's, where there is one
base_model.model.model.layers.0.self_attn.q_proj.lora_A.poet.weight   adapter poet's, as PEFT's state names it
mtp.layers.0.self_attn.q_proj.weight                                the draft's, where it has such names
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollout.core.known_fields import shown
from weight_sync.errors import UnknownTensorError, WeightRequestError, WeightSyncError
from weight_sync.paired_wire import keeps
from weight_sync.tensor_meta import LogicalWeights, TensorMeta

_OF_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save)(?:\.(?P<adapter>[\w-]+))?(?:\.(?:weight|bias))?")
_NAME = re.compile(r"[\w-]+")


def is_part_of_names(adapter: str) -> bool:
    """Return whether names of tensors can hold the name of an adapter."""
    return _NAME.fullmatch(adapter) is not None and adapter not in ("weight", "bias")


def is_of_adapter(name: str) -> bool:
    """Return whether the name of a tensor is like that of one of an adapter."""
    return _OF_ADAPTER.search(name) is not None


class TensorOwner:
    """Numbers the targets of an update: 0 is the model with these `weights`, then come `adapters`, and the `draft`.

    `count`: of the targets.  `rule`: equal for owners that give tensors the same numbers.
    """

    def __init__(self, adapters: Sequence[str], weights: LogicalWeights, draft: LogicalWeights | None = None) -> None:
        self._adapters, self._weights, self._draft = list(adapters), weights, draft
        self.count = 1 + len(adapters) + (draft is not None)
        self.rule = tuple(adapters) if len(adapters) > 1 else len(adapters), draft is not None

    def __call__(self, meta: TensorMeta) -> int:
        """Return the number of a tensor's target.  Raises `WeightRequestError` for a name that leaves it open."""
        if self._draft is not None and keeps(self._draft, meta):
            return self.count - 1
        match = _OF_ADAPTER.search(meta.name)
        if match is None or not self._adapters:
            return 0
        if self._is_models(meta):
            raise WeightRequestError(
                f"{shown(meta.name)} may be a tensor of the model or of an adapter: send it in an update of one of them"
            )
        if len(self._adapters) == 1:
            return 1
        adapter = match["adapter"]
        if adapter not in self._adapters:
            names = ", ".join(self._adapters)
            raise WeightRequestError(
                f"{shown(meta.name)}: the update has the adapters {names}, and a tensor's name has its adapter's, "
                "such as lora_A.NAME.weight"
            )
        return 1 + self._adapters.index(adapter)

    def _is_models(self, meta: TensorMeta) -> bool:
        try:
            self._weights.split(meta)
        except UnknownTensorError:
            return False
        except WeightSyncError:
            return True
        return True
