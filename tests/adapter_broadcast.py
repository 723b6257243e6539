"""A trainer of miles that broadcasts the tensors of an adapter to one server."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch

from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group

PATH = "/load_lora_adapter_from_distributed"
WAIT_S = 60.0
Named = Sequence[tuple[str, torch.Tensor]]


class AdapterBroadcast:
    """One group of the trainer and the server.  Leave it as a context manager; the server leaves it, too."""

    def __init__(self, client: httpx.Client) -> None:
        self._client, self._pool, self.group_name = client, ThreadPoolExecutor(1), f"miles-{uuid.uuid4().hex}"
        self._group = self._join()

    def _join(self) -> GroupHandle:
        port, name = free_port(), self.group_name
        fields = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
                  "backend": "gloo", "group_name": name}  # fmt: skip
        joined = self._pool.submit(self._client.post, "/init_weights_update_group", json=fields)
        group = init_process_group("127.0.0.1", port, 0, 2, name, "gloo", WAIT_S)
        assert joined.result(WAIT_S).status_code == 200, joined.result().text
        return group

    def body(self, name: str, config: dict[str, Any], named: Named, **more: Any) -> dict[str, Any]:
        lists = {
            "names": [each for each, _ in named],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
        }
        return lists | {"lora_name": name, "config_dict": config, "group_name": self.group_name} | more

    def send(self, name: str, config: dict[str, Any], named: Named, **more: Any) -> httpx.Response:
        """Make the call, and broadcast as miles does: all tensors, whatever the server thinks of them."""
        told = self._pool.submit(self._client.post, PATH, json=self.body(name, config, named, **more), timeout=WAIT_S)
        with contextlib.suppress(TransportError):  # the server left the group
            for _, tensor in named:
                self._group.finish(self._group.start_broadcast(tensor.contiguous()), time.monotonic() + WAIT_S)
        return told.result(WAIT_S)

    def __enter__(self) -> AdapterBroadcast:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.post("/destroy_weights_update_group", json={"group_name": self.group_name})
        with contextlib.suppress(TransportError):
            self._group.destroy()
        self._pool.shutdown()
