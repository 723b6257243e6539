"""The memory of buckets that are sent, and pieces that are packed early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from weight_sync.sender.rooms import Ahead, Rooms

CPU = torch.device("cpu")


@pytest.mark.parametrize("shared", [False, True])
def test_two_buckets_take_turns_in_memory_that_stays(shared: bool) -> None:
    rooms = Rooms()
    first, second, third = (rooms.take(position, 10, CPU, shared=shared).content for position in range(3))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert rooms.take(4, 5, CPU, shared=shared).content.data_ptr() == first.data_ptr(), "a smaller bucket fits"
    assert rooms.take(0, 20, CPU, shared=shared).content.numel() == 20
    rooms.clear()
    fresh = rooms.take(0, 4, CPU, shared=shared).content
    assert fresh.numel() == 4 and fresh.data_ptr() not in (first.data_ptr(), second.data_ptr())


def test_memory_that_engines_map_and_other_memory_do_not_take_each_other_s_place() -> None:
    rooms = Rooms()
    own, shared = rooms.take(0, 10, CPU), rooms.take(0, 10, CPU, shared=True)
    assert own.address is None and shared.address is not None and shared.address.num_bytes == 10
    assert rooms.take(0, 10, CPU).address is None


def test_pieces_are_copied_end_to_end_into_memory_that_engines_map() -> None:
    """One that was packed there stays; one that lies in the trainer's memory is copied."""
    room = Rooms().take(0, 6, CPU, shared=True)
    elsewhere = torch.tensor([7, 8], dtype=torch.uint8)

    def pieces() -> Iterator[torch.Tensor]:
        room.content[:3] = 1
        yield room.content[:3]
        yield elsewhere
        yield torch.empty(0, dtype=torch.uint8)
        room.content[5:] = 2
        yield room.content[5:]

    held = list(room.held(pieces()))
    assert torch.cat(held).tolist() == room.content.tolist() == [1, 1, 1, 7, 8, 2]
    assert [piece.data_ptr() - room.content.data_ptr() for piece in held if piece.numel()] == [0, 3, 5]
    alone = Rooms().take(0, 2, CPU)
    assert [piece.data_ptr() for piece in alone.held([elsewhere])] == [elsewhere.data_ptr()]


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
    assert ahead.num_bytes == min(num_ahead, 3)
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
