"""The trainer that `benchmarks.refresh_costs` asks, in JSON lines: a `WeightSender` of the checkout in PYTHONPATH.

It imports nothing of `benchmarks`: that checkout may have other modules there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.client import RolloutClient
from weight_sync.sender import WeightSender

SETTINGS: dict[str, dict[str, Any]] = {"broadcast": {}, "shared memory": {"transport": "shared_memory"}}
"""Arguments of `WeightSender` by transport.  A broadcast has none, as version 0.1 had no others."""


def main() -> None:
    settings = json.loads(sys.argv[1])
    files = sorted(Path(settings["folder"]).glob("*.safetensors"))
    trainer = _Trainer(settings, [item for file in files for item in load_file(file).items()])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        trainer.refresh(**json.loads(line))
        print(json.dumps({"done": True}), flush=True)
    trainer.leave()


class _Trainer:
    """A trainer of one process, which keeps one sender: that of the transport in use."""

    def __init__(self, settings: dict[str, Any], named: list[tuple[str, torch.Tensor]]) -> None:
        self._settings, self._named = settings, named
        self._client = RolloutClient(settings["url"])
        self._by: str | None = None
        self._sender: WeightSender | None = None

    def refresh(self, by: str, label: str) -> None:
        """Bring all weights to the server under a label, by a folder or by a transport of `SETTINGS`."""
        if by == "folder":
            self._client.update_weights_from_disk(self._settings["folder"], label)
        else:
            self._connected(by).refresh(self._named, label, bucket_bytes=self._settings["bucket_bytes"])

    def leave(self) -> None:
        """Leave the group of the sender in use."""
        if self._sender is not None:
            self._sender.close()
        self._by = self._sender = None

    def _connected(self, by: str) -> WeightSender:
        if self._sender is None or by != self._by:
            self.leave()
            self._by = by
            self._sender = WeightSender(self._client, timeout_s=self._settings["timeout_s"], **SETTINGS[by])
            self._sender.connect()
        return self._sender


if __name__ == "__main__":
    main()
