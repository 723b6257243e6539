"""Cold reading of a Hugging Face checkpoint folder: files mapped into memory, faults found before any tensor is read.

Every fault of the folder is one line that names the file and says what to do.  Does not know models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rollout.core.errors import StartupError
from weight_sync.bucket import runs_of
from weight_sync.checkpoint_folder import open_checkpoint_folder
from weight_sync.errors import ContentError, WeightSyncError
from weight_sync.safetensors_file import SafetensorsFile

MAPPED_BYTES = 256 * 2**20  # read from one mapping of a file


def open_checkpoint(model_path: str | Path) -> tuple[SafetensorsFile, ...]:
    """The files of a checkpoint folder, headers read.

    Raises `StartupError` when there is no safetensors file, one that the index names is missing, one is truncated or
    lacks a tensor that the index puts there, or a tensor lies in two of them.
    """
    try:
        return open_checkpoint_folder(Path(model_path)).files
    except ContentError as error:
        raise StartupError(f"{error}; copy it again") from None
    except WeightSyncError as error:
        raise StartupError(str(error)) from None


def read_tensors(file: SafetensorsFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one file, on the CPU, in the order of their content.  Raises `StartupError`.

    A tensor is a view of the mapped file.  The mapping is renewed now and then: what was read of it would otherwise
    count as resident, beside the weights made from it, until the whole file is read.
    """
    try:
        for metas in runs_of(file.metas, MAPPED_BYTES):
            with safe_open(file.path, framework="pt") as mapped:
                for meta in metas:
                    yield meta.name, mapped.get_tensor(meta.name)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file.path} is truncated or damaged ({error}); copy it again") from None
