"""Payloads of `update_weights_from_tensor` as SGLang's clients make them, without the sglang package.

Their classes are placed into modules of the right names for as long as the pickler needs them.
"""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

BUCKET_MODULES = (
    "sglang.srt.weight_sync.tensor_bucket",
    "sglang.srt.model_executor.model_runner",
    "nemo_rl.models.generation.sglang.utils.train_utils",  # NeMo-RL's own copy
)
LOCAL_MODULES = (
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "sglang.srt.model_executor.model_runner",
)


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    values: list[bytes]


class FlattenedTensorBucket:
    def __init__(self, flattened_tensor: torch.Tensor, metadata: list[FlattenedTensorMetadata]) -> None:
        self.flattened_tensor = flattened_tensor
        self.metadata = metadata


CLASSES = (FlattenedTensorMetadata, LocalSerializedTensor, FlattenedTensorBucket)


@contextlib.contextmanager
def classes_in(module_name: str) -> Iterator[None]:
    """Make `CLASSES` belong to the module `module_name`, which can be imported."""
    parts = module_name.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    assert not set(names) & sys.modules.keys()
    homes = [cls.__module__ for cls in CLASSES]
    sys.modules.update({name: types.ModuleType(name) for name in names})
    for cls in CLASSES:
        cls.__module__ = module_name
        setattr(sys.modules[module_name], cls.__name__, cls)
    try:
        yield
    finally:
        for cls, home in zip(CLASSES, homes, strict=True):
            cls.__module__ = home
        for name in names:
            del sys.modules[name]


def forking_pickle(value: Any) -> bytes:
    """Pickle as SGLang's `MultiprocessingSerializer.serialize` does: tensors go by torch's shared-memory reductions."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def metadata_of(named: Sequence[tuple[str, torch.Tensor]]) -> list[FlattenedTensorMetadata]:
    """Return metadata with byte offsets, end to end, as clients since 0.5.4 give them; `numel` counts bytes too."""
    entries, start = [], 0
    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        entries.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + size, size))
        start += size
    return entries


def flattened(named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    parts = [tensor.contiguous().flatten().view(torch.uint8) for _, tensor in named]
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    return {"flattened_tensor": joined, "metadata": metadata_of(named)}
