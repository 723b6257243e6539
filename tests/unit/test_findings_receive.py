"""What a payload, a folder or a name may make a receiver do, and what not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from weight_sync.errors import WeightRequestError
from weight_sync.receivers.safetensors_bytes import SafetensorsSource
from weight_sync.shared_segment import SharedSegment

MANY = 1 << 30

# --- W15: shm_unlink ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["lockstep_findings", "psm_findings"])
def segment(request: pytest.FixtureRequest) -> Iterator[SharedMemory]:
    memory = SharedMemory(request.param, create=True, size=4096)
    yield memory
    memory.close()
    with contextlib.suppress(FileNotFoundError):
        memory.unlink()


def _file(memory: SharedMemory) -> bool:
    return Path("/dev/shm", memory.name).exists()


def test_w15_what_holds_no_safetensors_file_is_not_unlinked(segment: SharedMemory) -> None:
    source = SafetensorsSource(SharedSegment(segment.name, 4096), unlink=True)
    with pytest.raises(WeightRequestError):
        source.announce(MANY)
    source.refuse("refused")
    del source
    assert _file(segment)


def test_w15_only_names_with_our_prefix_are_unlinked(segment: SharedMemory) -> None:
    content = save({"x": torch.ones(3)})
    segment.buf[: len(content)] = content
    source = SafetensorsSource(SharedSegment(segment.name, len(content)), unlink=True)
    if segment.name.startswith("lockstep_"):
        source.announce(MANY)
        list(source.receive())
        assert not _file(segment)
    else:
        with pytest.raises(WeightRequestError, match="begin with 'lockstep_', not 'psm_findings'"):
            source.announce(MANY)
        source.refuse("refused")
        assert _file(segment)
