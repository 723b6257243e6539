"""`AdapterUpdate`: a PEFT model's adapter on its way to engines, in the body of a request.

    with client.adapter_update("poet") as update:
        update.send(model)

Through a group, and for large adapters, `WeightSender.refresh_adapter` sends the same.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rollout.client.brackets import WeightTransaction
from rollout.core.errors import BadRequest
from weight_sync.joint_update import EngineReport


class AdapterUpdate:
    """The next version of adapter `name`: in force at the end of the block, or after an error nowhere.

    `begin(**options)`: the update of the model's weights, with options of `begin_weight_update`.  Used once.
    """

    def __init__(self, name: str, begin: Callable[..., WeightTransaction]) -> None:
        self._name, self._begin = name, begin
        self._update: WeightTransaction | None = None
        self._ranks: Any = None  # of the trainer, if the model is sharded: `TrainerRanks`
        self._is_sent = False

    @property
    def engines(self) -> Mapping[str, EngineReport]:
        """Reports of the engines by name; final after the block."""
        return {} if self._update is None else self._update.engines

    def send(self, model: Any, adapter: str = "default") -> None:
        """Send the adapter that PEFT calls `adapter` in `model`.

        With a model that is sharded (FSDP2) all of its ranks call it, and the first one sends; each rank leaves its
        block with an error if one of them failed.  Raises `WeightRequestError` for a model without that adapter,
        `EngineError` with an engine's refusal, and `TransportError` where another rank failed.
        """
        if self._is_sent:
            raise BadRequest("this update has its adapter: begin another one")
        lora: Any = importlib.import_module("weight_sync.sender.lora")  # torch, which a client does without until here
        self._ranks = lora.ranks_of(model)
        packed = lora.packed_lora(model, self._name, adapter, self._ranks)
        self._is_sent = True
        if packed is None:
            return
        self._update = self._begin(target=packed.target, manifest=packed.manifest).__enter__()
        payloads = [packed.payload]
        self._update.send("update_weights_from_tensor", serialized_named_tensors=payloads, format="safetensors")

    def __enter__(self) -> AdapterUpdate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ranks is None:
            self._end(error)
            return

        def my_block() -> None:
            if error is not None:
                raise error

        try:
            self._ranks.jointly(my_block)  # before anything is in force
        except BaseException as failure:
            self._end(failure)
            if error is None:
                raise
        else:
            self._ranks.jointly(lambda: self._end(None))

    def _end(self, error: BaseException | None) -> None:
        """Put the adapter in force, or after an error drop it."""
        if self._update is not None:
            self._update.__exit__(None if error is None else type(error), error, None)
        elif error is None and not self._is_sent:
            raise BadRequest(f"no adapter was sent for {self._name!r}: call send(model) in the block")


class AsyncAdapterUpdate:
    """`AdapterUpdate` for one event loop: entered by `async with`, `send` to be awaited."""

    def __init__(self, update: AdapterUpdate) -> None:
        self.blocking = update

    async def send(self, model: Any, adapter: str = "default") -> None:
        """Send as `AdapterUpdate.send` does, on a thread.

        If it is cancelled it waits for that thread, so that the block's end aborts the update that it has begun.
        """
        sending = asyncio.ensure_future(asyncio.to_thread(self.blocking.send, model, adapter))
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait({sending})
            sending.exception()  # it is known: the block is left all the same
            raise

    async def __aenter__(self) -> AsyncAdapterUpdate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.blocking.__exit__, kind, error, traceback)
