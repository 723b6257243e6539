"""Messages of checkpoint-engine's conversation, as its sender pickles them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.logical_weights_fake import NORM


def entry(**changed: Any) -> dict[str, Any]:
    norm = {"name": NORM, "dtype": torch.float32, "shape": torch.Size([4]), "offset": 0}
    return {**norm, **changed}


def cuda_handle() -> bytes:
    arguments = (torch.Tensor, torch.Size([64]), (1,), 0, torch.storage.UntypedStorage, torch.uint8, 3)
    memory = (b"\x01" * 64, 64, 0, False, b"counter", 0, b"event", True)
    return pickle.dumps((rebuild_cuda_tensor, (*arguments, *memory)), -1)
