"""OpenRLHF's engine over a client that refuses calls: updates that break off, sleep that is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from rollout.client import ClientError
from rollout.core.errors import BadRequest
from rollout.integrations.openrlhf import AsyncEngineArgs, AsyncLLMEngine


class Client:
    """A client that notes calls as (name, update id or arguments), and refuses each call named in `refused` once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.refused: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def call(*args: Any, **named: Any) -> None:
            self.calls.append((name, named.get("update_id", args)))
            if name in self.refused:
                self.refused.remove(name)
                raise ClientError(f"{name} is refused")

        return call

    def names(self) -> list[str]:
        return [name.removesuffix("_weight_update").removesuffix("_memory_occupation") for name, _ in self.calls]


def engine(client: Client) -> AsyncLLMEngine:
    made = AsyncLLMEngine(AsyncEngineArgs(model="m", enable_sleep_mode=True))

    async def ready() -> Any:
        return client

    made._client = ready  # type: ignore[method-assign]
    return made


async def send(llm: AsyncLLMEngine, is_last: bool = False) -> None:
    await llm.collective_rpc("update_weight", args=("w", torch.float32, [2], is_last))


@pytest.mark.parametrize(
    "refused", ["begin_weight_update", "update_weights_from_distributed", "end_weight_update", "abort_weight_update"]
)
def test_the_sync_after_one_that_failed_is_a_new_update(refused: str) -> None:
    async def run() -> None:
        client = Client()
        llm = engine(client)
        # The server refuses an abort without an update.  The client does not raise this refusal.
        client.refused = [refused] if refused != "abort_weight_update" else ["end_weight_update", refused]
        with pytest.raises(ClientError, match=client.refused[0]):
            await send(llm, is_last=True)
        assert client.calls[-1][0] == "abort_weight_update"
        failed = client.calls[0][1]
        assert client.calls[-1][1] == (failed,)
        client.calls.clear()
        await send(llm)
        await send(llm, is_last=True)
        receive = "update_weights_from_distributed"
        assert client.names() == ["begin", receive, receive, "end"]
        ids = {update for _, update in client.calls}
        assert len(ids) == 1 and failed not in ids

    asyncio.run(run())


def test_a_call_that_is_cancelled_ends_the_update() -> None:
    async def run() -> None:
        client = Client()
        llm = engine(client)
        await send(llm)

        async def hang(*_: Any, **__: Any) -> None:
            await asyncio.sleep(60)

        client.update_weights_from_distributed = hang  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(llm), 0.05)
        del client.update_weights_from_distributed
        assert client.names()[-1] == "abort"
        await send(llm)
        assert client.names()[-2] == "begin"

    asyncio.run(run())


def test_a_new_trainer_ends_the_update_of_the_one_before() -> None:
    async def run() -> None:
        client = Client()
        llm = engine(client)
        await send(llm)
        await llm.collective_rpc("init_process_group", args=("127.0.0.1", 1, 1, 2, "openrlhf", "nccl"))
        await send(llm)
        receive = "update_weights_from_distributed"
        assert client.names() == ["begin", receive, "abort", "init_weights_update_group", "begin", receive]
        await send(llm, is_last=True)
        await llm.collective_rpc("init_process_group", args=("127.0.0.1", 1, 1, 2, "openrlhf", "nccl"))
        assert client.names().count("abort") == 1

    asyncio.run(run())


def test_what_is_refused_changes_nothing_of_sleep() -> None:
    async def run() -> None:
        client = Client()
        llm = engine(client)
        client.refused = ["release_memory_occupation"]
        with pytest.raises(ClientError):
            await llm.sleep()
        assert not await llm.is_sleeping()
        await llm.wake_up()
        assert client.names() == ["release"], "nothing to take back"
        await llm.sleep()
        client.refused = ["resume_memory_occupation"]
        with pytest.raises(ClientError):
            await llm.wake_up(["weights"])
        await llm.wake_up(["weights"])
        await llm.wake_up(["kv_cache"])
        assert client.names() == ["release", "release", "resume", "resume", "resume"]
        assert not await llm.is_sleeping()

    asyncio.run(run())


def test_on_a_gpu_the_server_starts_without_the_memory_saver_and_sleep_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = AsyncEngineArgs(model="m", enable_sleep_mode=True).settings
    assert settings["device"] == "cuda"
    assert not settings["enable_memory_saver"] and not settings["enable_weights_cpu_backup"]
    client = Client()
    with pytest.raises(BadRequest, match="sleep: memory is released on a CPU only, but this server runs on cuda"):
        asyncio.run(engine(client).sleep())
    assert not client.calls
    # Of a server that was started otherwise only that server knows.
    monkeypatch.setenv("LOCKSTEP_FLAGS", "--device cpu --enable-memory-saver")
    asyncio.run(engine(client).sleep())
    monkeypatch.delenv("LOCKSTEP_FLAGS")
    monkeypatch.setenv("LOCKSTEP_URL", "http://127.0.0.1:1")
    asyncio.run(engine(client).sleep())
    assert client.names() == ["release", "release"]


def test_on_a_cpu_the_server_may_sleep_if_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in (True, False):
        settings = AsyncEngineArgs(model="m", enable_sleep_mode=asked).settings
        assert settings["enable_memory_saver"] is settings["enable_weights_cpu_backup"] is asked
