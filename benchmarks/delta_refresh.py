"""A refresh by delta, as a trainer does one: encode what changed, broadcast it, have it committed.

One element in `ONE_IN` takes one step, about as many as in a step of Adam at lr 1e-6 (`delta`).
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from rollout.client import RolloutClient
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.process_group import free_port, init_process_group

ONE_IN = 65
GROUP = "delta"
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class DeltaRefresh:
    """The seconds to find and pack the changes, the seconds from begin to the answer of end, and the bytes sent."""

    encode_s: float
    send_s: float
    num_bytes: int


class DeltaTrainer:
    """A trainer that sends deltas.  `tensors`: the server's, by the names and in the dtypes of its model."""

    def __init__(self, client: RolloutClient, tensors: dict[str, torch.Tensor], timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._encoder = DeltaEncoder(self._tensors.items())
        self._generator = torch.Generator().manual_seed(0)
        self._calls = ThreadPoolExecutor(1)
        port = free_port()
        joining = self._calls.submit(client.init_weights_update_group, "127.0.0.1", port, 1, 2, GROUP, "gloo")
        self._group = init_process_group("127.0.0.1", port, 0, 2, GROUP, "gloo", timeout_s)
        joining.result()

    def refresh(self) -> DeltaRefresh:
        """Change the tensors, and bring the server to the changed ones."""
        for tensor in self._tensors.values():
            words = tensor.view(-1).view(_SIGNED[tensor.element_size()])
            at = torch.randint(0, len(words), (-(-len(words) // ONE_IN),), generator=self._generator)
            words[at] += 1  # away from zero
        start = time.perf_counter()
        delta = self._encoder.encode(self._tensors.items())
        payloads = delta.payloads()
        encoded = time.perf_counter()
        self._client.begin_weight_update(base_digest=self._encoder.digest)
        for payload in payloads:
            self._send(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._client.end_weight_update()
        seconds = time.perf_counter() - encoded
        self._encoder.advance(delta)
        return DeltaRefresh(encoded - start, seconds, sum(map(len, payloads)))

    def leave(self) -> None:
        """Have both sides leave the group."""
        self._client.destroy_weights_update_group(GROUP)
        self._group.destroy()
        self._calls.shutdown()

    def _send(self, payload: torch.Tensor) -> None:
        fields: dict[str, Any] = {"names": ["delta"], "dtypes": ["uint8"], "shapes": [[payload.numel()]]}
        call = self._calls.submit(
            self._client.update_weights_from_distributed, **fields, group_name=GROUP, load_format="delta"
        )
        work = self._group.start_broadcast(payload, self._timeout_s)
        self._group.finish(work, time.monotonic() + self._timeout_s)
        call.result()
