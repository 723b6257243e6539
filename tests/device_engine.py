"""An engine on the device of `tests/device_stand_in.py`, with operators that are kernels with hidden insides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine import build
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import plain_ops
from tests.device_stand_in import DEVICE, Device
from tests.scheduler_harness import Harness
from tests.streams_stand_in import Streams


@contextmanager
def stand_in_device() -> Iterator[Device]:
    """Let engines that are built within be on `DEVICE`."""
    plain, streams = plain_ops(), Streams()
    device = Device(streams)
    kernels = plain.replace(**{name: device.kernel(one.plain) for name, one in OPERATORS.items()})
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), device:
        streams.install(patch)
        patch.setattr(build, "select_ops", lambda *_, **__: kernels)
        yield device


def device_engine(folder: Path, **settings: Any) -> Harness:
    return Harness(folder, device=str(DEVICE), disable_native_kernels=True, **settings)
