"""A whole forward with activations on devices: which collectives it makes there, and the bits that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.distributed.layout import ParallelLayout
from rollout.distributed.nccl import NcclTransport
from rollout.distributed.transport import GlooTransport
from rollout.layers.embedding import Embedding
from tests.model_zoo import tiny_checkpoint
from tests.nccl_stand_in import OnDevice, devices, on_device, stand_in_transport
from tests.parallel_engine import MIXED, largest_difference, several_ranks

Sizes = tuple[int, int, int]  # tp, dp, ep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("nccl"), "moe_dense_first", 1)


@pytest.fixture
def embeds_on_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """From the embedding on, activations are on devices.  Gives the calls of hosts since then."""
    embed, calls = Embedding.__call__, []
    monkeypatch.setattr(Embedding, "__call__", lambda self, ids_T: on_device(embed(self, ids_T)))
    for name in ("broadcast", "all_gather", "all_to_all", "send_receive"):
        call = getattr(GlooTransport, name)

        def counted(self: GlooTransport, *args: Any, name: str = name, call: Any = call) -> None:
            if not getattr(self, "is_wire", False):
                calls.append(name)
            call(self, *args)

        monkeypatch.setattr(GlooTransport, name, counted)
    with devices():
        yield calls


def on_wires(store: dist.Store, rank: int, size: int, timeout_s: float) -> NcclTransport:
    """Return the stand-in's transport; its messages over gloo do not count as calls of a host."""
    transport = stand_in_transport(store, rank, size, timeout_s)
    transport.backend._gloo.is_wire = True
    return transport


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("none", (2, 1, 1)),
        ("all_to_all", (4, 2, 4)),
        pytest.param("none", (4, 1, 2), marks=pytest.mark.full),
        pytest.param("none", (4, 2, 4), marks=pytest.mark.full),
        pytest.param("all_to_all", (2, 1, 2), marks=pytest.mark.full),
        pytest.param("all_to_all", (4, 4, 4), marks=pytest.mark.full),
    ],
)
def test_a_forward_on_devices_gives_the_bits_of_hosts_and_exchanges_nothing_between_them(
    folder: Path, backend: str, sizes: Sizes, request: pytest.FixtureRequest
) -> None:
    tp, dp, ep = sizes
    layout = ParallelLayout(tp, dp, ep, enable_dp_attention=dp > 1)
    expected = several_ranks(folder, layout, MIXED, moe_a2a_backend=backend)
    calls = request.getfixturevalue("embeds_on_devices")
    found = several_ranks(folder, layout, MIXED, on_wires, moe_a2a_backend=backend)
    assert calls == []
    for mine, theirs in zip(found, expected, strict=True):
        assert all(isinstance(rows.logits_TV, OnDevice) for rows in mine.values())
        assert largest_difference([mine], theirs) == 0.0
        assert not any(torch.isnan(rows.logits_TV).any() for rows in mine.values())
