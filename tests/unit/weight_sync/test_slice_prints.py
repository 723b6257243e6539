"""Fingerprints of shares of inner dimensions: many of one form at once, and large ones alone."""

from __future__ import annotations

import pytest
import torch

from weight_sync.fingerprint import combine, fingerprint
from weight_sync.sender import slices
from weight_sync.sender.plan import Part
from weight_sync.sender.shards import Box
from weight_sync.sender.shares import Share
from weight_sync.sender.slices import SlicePrints
from weight_sync.tensor_meta import Piece, TensorMeta

SHAPE = (12, 50)
BOXES: list[Box] = [((0, 12), (0, 20)), ((0, 5), (20, 50)), ((5, 12), (20, 50))]


def tensors(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(count)]


def shares(number: int, dtype: torch.dtype, boxes: list[Box]) -> list[Share]:
    name = f"w{number}"
    part = Part(TensorMeta(name, dtype, SHAPE), name, Piece(name))
    return [Share(part, rank, box, SHAPE) for rank, box in enumerate(boxes)]


def sums(wholes: list[torch.Tensor], dtype: torch.dtype, stated: list[Box]) -> list[int]:
    """Return the sums of the shares in `BOXES` of each tensor, taken to lie in the boxes `stated`."""
    numbered, views = [], []
    for number, whole in enumerate(wholes):
        for box, share in zip(BOXES, shares(number, dtype, stated), strict=True):
            numbered.append((len(views), share))
            views.append(whole[tuple(slice(*span) for span in box)].reshape(-1))
    found = SlicePrints(numbered).values(views)
    return [combine(*(found[at] for at in range(3 * n, 3 * n + 3))) for n in range(len(wholes))]


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["alone", "together"])
@pytest.mark.parametrize(("held", "sent"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float64", "float64")])
def test_shares_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, small: int, held: str, sent: str) -> None:
    monkeypatch.setattr(slices, "_SMALL", small)
    monkeypatch.setattr(slices, "_WORDS", 700)  # one or two shares at a time
    dtype = getattr(torch, sent)
    wholes = tensors(5, getattr(torch, held))
    assert sums(wholes, dtype, BOXES) == [fingerprint(whole.to(dtype)) for whole in wholes]


def test_shares_in_the_wrong_boxes_show() -> None:
    wholes = tensors(3, torch.bfloat16)
    shifted: list[Box] = [((0, 12), (30, 50)), ((0, 5), (0, 30)), ((5, 12), (0, 30))]
    right, wrong = sums(wholes, torch.bfloat16, BOXES), sums(wholes, torch.bfloat16, shifted)
    assert all(one != other for one, other in zip(right, wrong, strict=True))
