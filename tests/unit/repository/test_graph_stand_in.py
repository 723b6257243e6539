"""The stand-in for CUDA graphs: a replay reads the current content of captured addresses, and mistakes raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.graph_stand_in import CaptureError, StandInGraphPool, forbid_in_capture


def test_a_replay_reads_and_writes_the_captured_addresses() -> None:
    given, weights, out = torch.arange(4.0), torch.eye(4), torch.zeros(4)

    def run() -> None:
        product = weights @ given
        product[1:] += 1
        out.copy_(torch.cat([product[:2], product[2:] * 2]))

    replay = StandInGraphPool().capture(run)
    for step in range(3):
        given.fill_(step)
        weights.mul_(2)
        replay()
        expected = float(2 ** (step + 1) * step)
        assert out.tolist() == [expected, expected + 1, 2 * (expected + 1), 2 * (expected + 1)]


def test_a_replaced_input_is_not_seen() -> None:
    held = {"input": torch.ones(2)}
    out = torch.zeros(2)

    def run() -> None:
        out.copy_(held["input"] * 3)

    replay = StandInGraphPool().capture(run)
    held["input"] = torch.full((2,), 5.0)
    replay()
    assert out.tolist() == [3.0, 3.0]


def test_a_moved_input_is_not_seen() -> None:
    given, out = torch.ones(2), torch.zeros(2)
    old = given.detach()

    def run() -> None:
        out.copy_(given * 3)

    replay = StandInGraphPool().capture(run)
    given.set_(torch.full((2,), 5.0))
    replay()
    assert out.tolist() == [3.0, 3.0]
    old.fill_(7.0)
    replay()
    assert out.tolist() == [21.0, 21.0]


def test_memory_of_the_pool_is_garbage_afterwards() -> None:
    given, leaked = torch.ones(2), []

    def run() -> None:
        leaked[:] = [given + 1]

    replay = StandInGraphPool().capture(run)
    assert leaked[0].isnan().all()
    replay()
    assert leaked[0].isnan().all()


TENSOR = torch.tensor([1, 0, 2])
FORBIDDEN: dict[str, Callable[[], object]] = {
    "item": lambda: TENSOR[0].item(),
    "tolist": lambda: TENSOR.tolist(),
    "bool": lambda: bool(TENSOR[0] > 0),
    "int": lambda: int(TENSOR[0]),
    "numpy": lambda: TENSOR.numpy(),
    "cpu": lambda: TENSOR.cpu(),
    "nonzero": lambda: TENSOR.nonzero(),
    "mask": lambda: TENSOR[TENSOR > 0],
    "masked_select": lambda: TENSOR.masked_select(TENSOR > 0),
    "unique": lambda: TENSOR.unique(),
    "from the host": lambda: torch.tensor([1, 2]),
    "plan": lambda: forbid_in_capture(lambda: None)(),
    "capture": lambda: StandInGraphPool().capture(lambda: None),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_no_capture_may(what: str) -> None:
    pool, calls = StandInGraphPool(), []

    def run() -> None:
        calls.append(len(calls))
        if len(calls) > pool.warm_ups:
            FORBIDDEN[what]()

    with pytest.raises(CaptureError):
        pool.capture(run)
    assert len(calls) == pool.warm_ups + 1
    pool.capture(lambda: None)  # the next one is not hindered


def test_results_must_be_written_somewhere() -> None:
    with pytest.raises(CaptureError, match="tensor of your own"):
        StandInGraphPool().capture(lambda: torch.ones(1))  # type: ignore[arg-type,return-value]
