"""The client's block around an update of an adapter, when its task is cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rollout.client.adapter_update import AdapterUpdate, AsyncAdapterUpdate
from weight_sync.sender import lora
from weight_sync.sender.lora import PackedLora


class Transaction:
    """A transaction whose begin takes until `answered`; it notes the error with which it ended."""

    def __init__(self) -> None:
        self.entering, self.answered = threading.Event(), threading.Event()
        self.ended: list[BaseException | None] = []
        self.engines: dict[str, Any] = {}

    def __enter__(self) -> Transaction:
        self.entering.set()
        assert self.answered.wait(60)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.ended.append(error)

    def send(self, transport: str, **fields: Any) -> None:
        pass


def test_a_cancelled_send_aborts_the_update_that_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "ranks_of", lambda _: None)
    monkeypatch.setattr(lora, "packed_lora", lambda *_: PackedLora({}, [], b""))
    transaction = Transaction()
    begin: Any = lambda **_: transaction  # noqa: E731

    async def trainer() -> None:
        async with AsyncAdapterUpdate(AdapterUpdate("poet", begin)) as update:
            await update.send(object())

    async def run() -> None:
        task = asyncio.ensure_future(trainer())
        await asyncio.to_thread(transaction.entering.wait, 60)
        task.cancel()
        await asyncio.sleep(0.05)  # the task acts on it
        transaction.answered.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [type(error) for error in transaction.ended] == [asyncio.CancelledError], "or its lease keeps others out"
