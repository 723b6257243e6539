"""Tools for tests of weight update groups: background calls, and the raw sides of a bucket.

torch looks up the name of every address that joins its store.  Where reverse DNS is slow a rendezvous takes seconds now
and then, so deadlines are generous except where the deadline itself is the subject.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.announcements import bucket_fields
from tests.logical_weights_fake import FakeWeights
from tests.weight_engine_process import Engine
from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group

TIMEOUT_S = 20.0
Named = Sequence[tuple[str, torch.Tensor]]
seeds = itertools.count(1)
names = (f"group{i}" for i in itertools.count())


class Meddling:
    """Passes control calls on; `before(verb, arguments)` may change them, raise, or act."""

    def __init__(self, engine: Engine, before: Callable[[str, dict[str, Any]], None]) -> None:
        self._engine, self._before = engine, before
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            phase = arguments.get("phase")
            self.calls.append(f"{verb}:{phase}" if phase else verb)
            self._before(self.calls[-1], arguments)
            return getattr(self._engine, verb)(**arguments)

        return call


def content_of(seed: int) -> list[str]:
    return [block.hex() for block in FakeWeights(seed).snapshot()]


def in_background(call: Callable[[], Any]) -> Callable[[float], BaseException | None]:
    """Start `call`; the result waits for it and returns what it raised."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def outcome(within_s: float) -> BaseException | None:
        thread.join(within_s)
        assert raised, f"no answer within {within_s} s"
        return raised[0]

    return outcome


def announce(engine: Engine, group: GroupHandle, named: Named, **more: Any) -> Callable[[float], BaseException | None]:
    """Tell the engine that `named` comes; broadcasting is left to the test."""
    arguments = {**bucket_fields(named, group.name, None), "weight_version": None, **more}
    return in_background(lambda: engine.update_weights_from_distributed(**arguments))


def broadcast(group: GroupHandle, tensor: torch.Tensor) -> None:
    group.finish(group.start_broadcast(tensor), time.monotonic() + TIMEOUT_S)


def join(engine: Engine, name: str | None = None, attempts: int = 3) -> GroupHandle:
    """Join a raw group with the engine, for a sender that does what `WeightSender` would not."""
    name = name or next(names)
    port = free_port()
    joined = in_background(
        lambda: engine.init_weights_update_group(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=name, backend="nccl"
        )
    )
    try:
        group = init_process_group("127.0.0.1", port, 0, 2, name, "gloo", TIMEOUT_S)
    except TransportError:
        assert attempts > 1
        joined(TIMEOUT_S)
        return join(engine, name, attempts - 1)
    if joined(TIMEOUT_S) is not None:  # an impatient engine gave up on a slow rendezvous
        assert attempts > 1
        group.destroy()
        return join(engine, name, attempts - 1)
    return group
