"""Memory that updates pack in while an engine reads slowly, and updates of one call that are interrupted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from weight_sync.engine_control import EngineError
from weight_sync.errors import UnknownGroupError
from weight_sync.sealed_memory import MemoryAddress, _mapped
from weight_sync.sender import whole_update
from weight_sync.sender.carriers import Notices
from weight_sync.sender.link import SenderGroup
from weight_sync.sender.refresh import Refresh
from weight_sync.sender.refresh_plan import RefreshPlan, Settings
from weight_sync.sender.sender import WeightSender
from weight_sync.sender.source import Source
from weight_sync.timing import Parts

NUMEL = 1024
READS_S = 0.3


class Refused(Exception):
    status_code = 409


class Sent:
    def is_completed(self) -> bool:
        return True


class Group:
    """Stands in for the process group of a sender: all that it sends is there at once."""

    name, broken = "g", False

    def start_broadcast(self, *_: Any) -> Sent:
        return Sent()

    def finish(self, *_: Any) -> None: ...
    def end_connecting(self, *_: Any) -> None: ...
    def destroy(self) -> None: ...


class SlowEngine:
    """An engine that carries out one verb after the other.  Before it reads a bucket it waits."""

    takes_lists = True

    def __init__(self, refuses: bool = False) -> None:
        self.read: dict[str, float] = {}
        self.has_committed = threading.Event()
        self._refuses, self._queue = refuses, threading.Lock()
        self._open: str | None = None

    def begin_weight_update(self, *, update_id: str, **_: Any) -> dict[str, Any]:
        with self._queue:
            if self._open is not None:
                raise Refused("a weight update is already open")
            self._open = update_id
            return {}

    def update_weights_from_distributed(
        self, *, names: list[str], memory: Any = None, whole_update: Any = None, **_: Any
    ) -> dict[str, Any]:
        with self._queue:
            time.sleep(READS_S)
            if self._refuses:
                raise Refused("no")
            address = {field: value for field, value in dict(memory).items() if field != "filled"}
            content = _mapped(MemoryAddress(**address))[: 4 * NUMEL].view(torch.float32)
            assert content.unique().numel() == 1
            self.read[names[0]] = float(content[0])
            if whole_update is not None:
                self.has_committed.set()
            return {}

    def end_weight_update(self, **_: Any) -> dict[str, Any]:
        with self._queue:
            self._open = None
            return {}

    def abort_weight_update(self, *, update_id: str) -> None:
        with self._queue:
            if update_id != self._open:
                raise Refused("not open")
            self._open = None

    def weight_update(self, **_: Any) -> dict[str, Any]:
        return {"outcome": "committed" if self.has_committed.is_set() else "unknown"}

    def destroy_weights_update_group(self, **_: Any) -> dict[str, Any]:
        return {}


def sender_of(whole_updates: bool = False, **engines: SlowEngine) -> WeightSender:
    sender = WeightSender(engines, timeout_s=5.0)
    for link in sender._links.values():
        link.group = SenderGroup(Group(), [link], Notices(Group()), takes_whole_updates=whole_updates)  # type: ignore[arg-type]
    return sender


def filled(name: str, value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((NUMEL,), value))]


def test_a_refresh_that_is_refused_writes_nothing_that_an_open_update_sends() -> None:
    engine = SlowEngine()
    sender = sender_of(engine=engine)
    with sender.update("7") as update:
        update.send(filled("w", 1.0))
        with pytest.raises(EngineError, match="already open"):
            sender.refresh(filled("w", 2.0), "8")
    assert engine.read == {"w": 1.0}


def test_a_bucket_behind_a_refused_one_keeps_its_memory() -> None:
    refusing, other = SlowEngine(refuses=True), SlowEngine()
    sender = sender_of(refusing=refusing, other=other)
    with sender.update("7") as update:
        for number in range(4):
            if number == 1:
                with pytest.raises(EngineError, match="no"):
                    update.send(filled("w1", 1.0))
            else:
                update.send(filled(f"w{number}", float(number)))
    assert other.read == {f"w{number}": float(number) for number in range(4)}


class WithoutGroup(SlowEngine):
    """An engine that has lost the group of its sender."""

    def update_weights_from_distributed(self, **_: Any) -> dict[str, Any]:
        raise UnknownGroupError("weight update group 'g' does not exist")


def test_a_filled_bucket_that_an_engine_has_no_group_for_ends_it_here_too() -> None:
    sender = sender_of(lost=WithoutGroup(), refusing=SlowEngine(refuses=True))
    with pytest.raises(EngineError, match="does not exist"), sender.update("7") as update:
        update.send(filled("w", 1.0))
    assert sender.connected == ["refusing"]


def test_an_interrupt_that_comes_too_late_says_that_the_engine_has_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine()
    sender = sender_of(whole_updates=True, engine=engine)

    def interrupted(*_: Any) -> None:
        assert engine.has_committed.wait(10.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_update, "await_all", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        sender.refresh(filled("w", 1.0), "7", with_manifest=False)
    assert caught.value.__notes__ == ["engine engine: it had committed version '7' by then"]


def test_fingerprints_of_a_whole_update_are_in_the_order_of_its_bucket() -> None:
    """A tensor without elements has one, too, and no trainer holds anything of it."""
    tensors = [("h", torch.randn(4).bfloat16()), ("empty", torch.empty(0, 4)), ("f", torch.randn(6)[::2])]
    source = Source(tensors)
    plan = RefreshPlan(source, Settings(None, True, 1 << 20, torch.device("cpu"), None), None)
    fields = {"weight_version": "1", "coverage": "full"}
    refresh = Refresh(plan, source, None, fields, True, time.perf_counter(), Parts(), 0)
    refresh.prepare()
    whole = refresh.whole_update()
    assert whole is not None
    names = plan.layout.buckets[0].lists.names
    assert whole["fingerprints"] == "".join(refresh._fingerprints[name] for name in names) and len(names) == 3
