"""The memory of buckets that are sent, and pieces that are packed early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weight_sync.sender.rooms import Ahead, Rooms

CPU = torch.device("cpu")


def test_two_buckets_take_turns_in_memory_that_stays() -> None:
    rooms = Rooms()
    first, second, third = (rooms.take(position, 10, CPU) for position in range(3))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert rooms.take(4, 5, CPU).data_ptr() == first.data_ptr(), "a smaller bucket fits"
    assert rooms.take(0, 20, CPU).numel() == 20
    rooms.clear()
    fresh = rooms.take(0, 4, CPU)
    assert fresh.numel() == 4 and fresh.data_ptr() not in (first.data_ptr(), second.data_ptr())


@pytest.mark.parametrize("num_ahead", [0, 1, 3, 5])
def test_pieces_keep_their_order_however_many_were_packed_early(num_ahead: int) -> None:
    packed: list[int] = []

    def pieces() -> Iterator[torch.Tensor]:
        for number in range(3):
            packed.append(number)
            yield torch.tensor([number])

    ahead = Ahead(pieces())
    assert [ahead.pack_one() for _ in range(num_ahead)] == [True, True, True, False, False][:num_ahead]
    assert packed == [0, 1, 2][:num_ahead]
    assert [int(piece) for piece in ahead] == [0, 1, 2] == packed
    assert next(ahead, None) is None


def test_what_packing_raises_is_raised_where_it_is_packed() -> None:
    def pieces() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise ValueError("a tensor is gone")

    ahead = Ahead(pieces())
    assert ahead.pack_one()
    with pytest.raises(ValueError, match="a tensor is gone"):
        ahead.pack_one()
