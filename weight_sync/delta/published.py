"""A published version, and the patch of a tensor in it, in whichever form it was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from weight_sync.delta.byte_patches import APPLIERS, checksum
from weight_sync.errors import ContentError
from weight_sync.safetensors_file import FileTensor, SafetensorsFile, open_regular, read_tensor


@dataclass(frozen=True)
class VersionFolder:
    """A published version.  `base_version` None: a full one.

    `identity` differs between two publications under one number.  `has_manifest`: see `delta_manifest`.
    """

    path: Path
    version: int
    base_version: int | None
    encoding: str | None
    checksum_format: str | None
    identity: str
    has_manifest: bool = False

    @property
    def is_full(self) -> bool:
        return self.base_version is None


@dataclass(frozen=True)
class BytePatch:
    """The payload of `xor` or `overwrite` for a tensor, still on disk."""

    name: str
    file: SafetensorsFile
    payload: FileTensor
    encoding: str
    checksum_format: str
    stated: str

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """Apply the patch to `base` and return the new content.

        Raises `ContentError` if the new content has another checksum than stated, as on a wrong base.
        """
        name = self.name
        with open_regular(self.file.path) as file:
            packed = read_tensor(file, self.file.path, self.payload).numpy().tobytes()
        try:
            new = APPLIERS[self.encoding](packed, base)
        except ContentError as error:
            raise ContentError(f"{self.file.path}: {name}: {error}") from None
        actual = checksum(self.checksum_format, new)
        if actual != self.stated:
            raise ContentError(
                f"{self.file.path}: {name} has checksum {actual} after the delta, expected {self.stated[:128]}. "
                "The file is damaged, or the delta belongs to another base."
            )
        return new
