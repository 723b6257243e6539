"""Ranks that stop or die while a model and an adapter are committed together: all serve the pair before, or the next.

Content i of the model comes with content i of the adapter, so that answers by any other pair are answers of neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save

from tests.adapter_updates import random_content
from tests.faults.contents import Version, Zoo
from tests.faults.stopped import Player

_NAME = "poet"


class PairZoo(Zoo):
    """Contents of the matrix, and as many of an adapter.  A server starts with the first of both."""

    adapter = _NAME

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.adapters = [random_content(folder / f"adapter{it}", self.contents[0], it) for it in range(2)]

    @property
    def settings(self) -> dict[str, Any]:
        adapters = getattr(self, "adapters", None)  # none yet for the answers of the model alone
        if adapters is None:
            return super().settings
        return super().settings | {"enable_lora": True, "lora_paths": f"{_NAME}={adapters[0].folder}"}


class PairPlayer(Player):
    """Every refresh brings the model and the adapter."""

    points: ClassVar[Mapping[str, Sequence[str]]] = {
        "verify": ("exchange", "exchanged"),
        "commit": ("planning", "planned", "written", "vote", "voted", "published"),
    }
    _zoo: PairZoo

    def _stated(self, version: Version) -> dict[str, Any]:
        return super()._stated(version) | {"adapters": [self._zoo.adapters[version.content].target(_NAME)]}

    def _payload(self, version: Version) -> bytearray:
        return bytearray(save(self._zoo.contents[version.content] | dict(self._zoo.adapters[version.content].named)))
