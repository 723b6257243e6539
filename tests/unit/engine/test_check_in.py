"""Machines of an engine compare what they were started with, before any of them joins a group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.engine import rendezvous


def answers_of(monkeypatch: pytest.MonkeyPatch, versions: list[str | None]) -> list[str]:
    """Let a machine check in for each version of the library, side by side.  Returns why each does not start."""
    count = len(versions)
    args = ServerArgs(model_path="m", tp_size=count, nnodes=count, dist_init_addr="127.0.0.1:1")
    store, stated = dist.HashStore(), list(versions)
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 30.0)

    def start(rank: int) -> str:
        try:
            rendezvous.check_in(store, replace(args, node_rank=rank), rank, stated[rank])
        except StartupError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(start, range(count)))


def test_machines_with_the_same_library_or_none_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers_of(monkeypatch, ["1.9.1", "1.9.1"]) == ["", ""]
    assert answers_of(monkeypatch, [None, None]) == ["", ""]


@pytest.mark.parametrize("other", ["1.8.0", None])
def test_one_machine_with_another_library_or_none_refuses_the_start_on_all(
    monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    answers = answers_of(monkeypatch, ["1.9.1", "1.9.1", other])
    for machine, answer in enumerate(answers):
        named = {f"1.9.1 on machine {machine}", f"{other or 'missing'} on machine {machine}"}
        assert "llguidance" in answer and any(words in answer for words in named), answers
        assert f"{other or 'missing'} on machine 2" in answer


@pytest.mark.parametrize("ends", [True, False])
def test_a_machine_that_waits_says_whether_the_first_one_has_ended(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """The first machine holds what all have stated.  It ends when it sees that settings differ."""
    args = ServerArgs(model_path="m", tp_size=3, nnodes=3, dist_init_addr="127.0.0.1:1", node_rank=1)
    owner = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", owner.port, 3, timeout=timedelta(seconds=30 if ends else 0.5))
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT_S", 0.5)
    if ends:
        del owner
    said = (
        "machine 0 ended while machine 1 waited for all of them" if ends else "machine 0 of 3 did not come within 0.5 s"
    )
    with pytest.raises(StartupError, match=said):
        rendezvous.check_in(store, args, 1, None)
