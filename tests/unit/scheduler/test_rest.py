"""Threads of operators rest when no step follows, before the last answer leaves, and at no other time."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.late_loop import loop  # noqa: F401
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness


def test_threads_rest_when_no_step_follows(tmp_path: Path, monkeypatch) -> None:
    torch.set_num_threads(1)
    harness = Harness(tiny_checkpoint(tmp_path, "dense"), enable_return_routed_experts=False)
    order: list[str] = []
    send = harness.channel.send
    monkeypatch.setattr(harness.scheduler, "rest_helpers", lambda: order.append("rest"))
    monkeypatch.setattr(harness.channel, "send", lambda message: (order.append("answer"), send(message)))
    for new_tokens in (3, 9):
        harness.submit([5, 9, 2], params={"max_new_tokens": new_tokens})
    harness.run()
    assert order == ["answer", "rest", "answer"]
    harness.submit([7, 7], params={"max_new_tokens": 1})
    harness.run()
    assert order[3:] == ["rest", "answer"]
