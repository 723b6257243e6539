"""The rules of the device stand-in and its streams: which calls they let pass, and which they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rollout.core.host_copy import HostCopies, to_device
from tests.device_engine import stand_in_device
from tests.device_stand_in import DEVICE, Device, HostWaitsError, RaceError
from tests.streams_stand_in import Event, Stream, Streams


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in_device() as device:
        yield device


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory().to(DEVICE, non_blocking=True)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to_cpu": lambda x: x.to("cpu"),
    "into_pageable": lambda x: torch.empty(3).copy_(x),
    "into_pageable_blind": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "blocking": lambda x: torch.empty(3, pin_memory=True).copy_(x),
    "from_pageable": lambda x: torch.ones(3).to(DEVICE),
    "from_pageable_blind": lambda x: torch.ones(3).to(DEVICE, non_blocking=True),
    "blocking_to_device": lambda x: torch.ones(3).pin_memory().to(DEVICE),
    "assignment": lambda x: x.__setitem__(slice(0, 2), torch.ones(2)),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "host_index": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("read", WAITS.values(), ids=WAITS)
def test_a_wait_of_the_host_is_refused(device: Device, read: Callable[[torch.Tensor], object]) -> None:
    x = on_device(1.0, 2.0, 3.0)
    waits = device.num_waits
    read(x)
    assert device.num_waits > waits
    with device.refusing(), pytest.raises(HostWaitsError):
        read(x)


def test_what_does_not_wait(device: Device) -> None:
    with device.refusing():
        x = to_device(torch.tensor([1.0, 2.0, 3.0]), DEVICE)
        y = torch.zeros(3, device=DEVICE)
        y[to_device(torch.tensor([2, 0]), DEVICE)] = x[1:]
        y.index_fill_(0, to_device(torch.tensor([1]), DEVICE), 5.0)
        table = torch.zeros(2, 3, device=DEVICE)
        table[1, :2] = y[1:]
        copies = HostCopies(DEVICE)
        copied = copies.copy(torch.where(table > 0, table, table - 1).half().float())
        copies.close()
        assert copied.isnan().all()
        copies.wait()
        assert copied.tolist() == [[-1, -1, -1], [5, 2, -1]]


def test_tensors_of_two_devices_do_not_mix(device: Device) -> None:
    with pytest.raises(AssertionError, match="two devices"):
        on_device(1.0) + torch.ones(1)
    assert (on_device(1.0) + torch.tensor(1.0)).tolist() == [2.0]  # a number


def test_memory_that_is_written_in_flight_is_noticed(device: Device) -> None:
    source = torch.ones(3).pin_memory()
    source.to(DEVICE, non_blocking=True)
    source += 1
    with pytest.raises(RaceError):
        torch.cuda.synchronize()


def test_memory_may_be_written_once_the_event_after_the_transfer_has_come(device: Device) -> None:
    source = torch.ones(3).pin_memory()
    source.to(DEVICE, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    source += 1
    torch.cuda.synchronize()


def test_results_cannot_be_added_after_the_event(device: Device) -> None:
    copies = HostCopies(DEVICE)
    copies.close()
    with pytest.raises(AssertionError):
        copies.copy(on_device(1.0))


def test_streams_have_no_order_but_by_events() -> None:
    streams, done = Streams(), []
    one, two = streams.current, streams.new()
    one.enqueue(lambda: done.append("a"))
    event = one.record_event()
    one.enqueue(lambda: done.append("b"))
    two.enqueue(lambda: done.append("c"))
    two.wait_event(event)
    two.enqueue(lambda: done.append("d"))
    assert done == [] and not event.query()
    two.synchronize()
    assert done == ["c", "a", "d"] and event.query()
    Event().synchronize()  # never recorded: nothing is waited for
    assert done == ["c", "a", "d"]
    one.record_event(event)
    assert not event.query(), "it stands for the later record"
    streams.synchronize()
    assert done == ["c", "a", "d", "b"] and Stream().record_event().query()
