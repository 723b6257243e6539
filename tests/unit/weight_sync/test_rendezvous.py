"""A rendezvous that cannot succeed ends for all of its members as soon as rank 0 knows."""

from __future__ import annotations

import time

import pytest

from weight_sync.errors import TransportError
from weight_sync.process_group import GroupHandle, free_port, init_process_group
from weight_sync.waiting import Patience, in_thread

LONG_S = 60.0


def test_others_fail_at_once_when_rank_0_gives_up() -> None:
    port, patience = free_port(), Patience()
    ranks = [
        in_thread(init_process_group, "127.0.0.1", port, rank, 3, f"of rank {rank}", "gloo", LONG_S, patience=given)
        for rank, given in ((0, patience), (1, None))
    ]
    time.sleep(0.5)
    assert not any(rank.done() for rank in ranks)  # a third member lacks
    patience.give_up("the third one refused")
    start = time.monotonic()
    for rank in ranks:
        assert isinstance(rank.exception(LONG_S), TransportError)
    assert time.monotonic() - start < 10
    assert "the third one refused" in str(ranks[0].exception())
    assert _is_free(port)


def test_a_port_is_free_again_after_the_group_was_left() -> None:
    port = free_port()
    joining = in_thread(init_process_group, "127.0.0.1", port, 1, 2, "left 1", "gloo", LONG_S)
    with pytest.raises(TransportError, match="join"):
        init_process_group("127.0.0.1", port, 0, 3, "left 0", "gloo", 1.0)
    assert isinstance(joining.exception(LONG_S), TransportError) and _is_free(port)


def _is_free(port: int) -> bool:
    """Return whether rank 0 can listen at the port."""
    name = f"at {port}"
    other = in_thread(init_process_group, "127.0.0.1", port, 1, 2, f"{name}, 1", "gloo", 1.0)
    try:
        init_process_group("127.0.0.1", port, 0, 2, name, "gloo", 1.0)
    except TransportError as error:
        return "EADDRINUSE" not in str(error) and isinstance(other.exception(LONG_S), GroupHandle | TransportError)
    raise AssertionError("members of different names met")
