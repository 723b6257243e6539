"""The PyPI package checkpoint-engine against ours: its own worker hears from the stand-in what the engine hears.

The package does not support CPUs: what it asks of a device (to synchronise, to free) is replaced; its conversation is
its own.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import zmq
from checkpoint_engine import worker

from tests.logical_weights_fake import NORM, FakeWeights, bits, version
from tests.parameter_server_stand_in import ParameterServerStandIn
from weight_sync.errors import WeightSyncError
from weight_sync.receivers.ipc import IpcSource
from weight_sync.updater import WeightUpdater


class _NoDevice:
    """A replacement of the package's `DeviceManager`: its calls to a device do nothing on a CPU."""

    def __init__(self) -> None:
        self.device_type = "cpu"
        self.device_module = self

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...


def run_package(
    server: ParameterServerStandIn, sent: dict[str, torch.Tensor], refuse: str | None
) -> tuple[dict[str, bytes], list[BaseException | None], list[str]]:
    """Return what the package's worker loads, what each side raises, and the order in which its hooks are called."""
    loaded: dict[str, bytes] = {}
    hooks: list[str] = []

    def run(named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name == refuse:
                raise ValueError(f"no {name}")
            loaded[name] = bits(tensor.clone())
        hooks.append("run")

    def listen() -> None:
        context = zmq.Context()
        try:
            worker.update_weights_from_ipc(
                context, server.endpoint, None, run=run, post_hook=lambda: hooks.append("post_hook")
            )
        finally:
            context.destroy(linger=0)

    return loaded, _together(lambda: server.update(list(sent.items())), listen), hooks


def run_ours(
    server: ParameterServerStandIn, sent: dict[str, torch.Tensor], refuse: str | None
) -> tuple[dict[str, bytes], list[BaseException | None]]:
    """Return the content that our engine loads and what each side raises.

    `refuse` is the name of a sent tensor that the model lacks and therefore refuses, or None.
    """
    weights = FakeWeights()
    updater = WeightUpdater(weights, device="cpu", timeout_s=10.0, vote=lambda mine: mine)
    updater.begin(coverage="partial" if refuse else "full")
    errors = _together(
        lambda: server.update(list(sent.items())), lambda: updater.receive(IpcSource(server.handles, updater.receiver))
    )
    if errors[1] is None:
        updater.verify()
        updater.commit()
    return {name: bits(weights.read(name)) for name in weights.metas()}, errors


def _together(*calls: Any) -> list[BaseException | None]:
    """Run the calls at once, each on a thread, and return what each raised."""
    errors: list[BaseException | None] = [None] * len(calls)

    def guarded(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    return errors


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "DeviceManager", _NoDevice)


def test_the_stand_in_speaks_to_the_packages_worker_and_the_engine_hears_the_same() -> None:
    sent = version(1)
    with ParameterServerStandIn() as server:
        loaded, errors, hooks = run_package(server, sent, None)
        theirs = server.answers
    assert errors == [None, None] and hooks[-1] == "post_hook"
    with ParameterServerStandIn() as server:
        ours, errors = run_ours(server, sent, None)
        assert errors == [None, None]
        assert server.answers == theirs
    assert ours == loaded == {name: bits(tensor) for name, tensor in sent.items()}


def test_a_refusal_takes_the_same_course() -> None:
    sent = {"model.norm.bias": version(1)[NORM], **version(1)}
    with ParameterServerStandIn() as server:
        _, (sender, receiver), hooks = run_package(server, sent, "model.norm.bias")
        theirs = [answer != "" for answer in server.answers]
    assert isinstance(sender, RuntimeError) and isinstance(receiver, RuntimeError) and hooks == []
    with ParameterServerStandIn() as server:
        _, (sender, engine) = run_ours(server, sent, "model.norm.bias")
        ours = [answer != "" for answer in server.answers]
    assert isinstance(sender, RuntimeError) and isinstance(engine, WeightSyncError)
    assert ours == theirs == [False, True]
