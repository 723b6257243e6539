"""`/pull_weights`: versions published one on top of the other, and damage to them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.faults.transports import Damage
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_bytes, publish_encoded
from weight_sync.delta.version_dir import version_path

Encoding = Literal["xor", "overwrite", "ulp-gap"]
ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite", "ulp-gap")
_FRAME_BYTES = 16 << 10  # so that a version of a small model has several frames and files


class Publisher:
    """A trainer that publishes versions in `folder/source`, which an engine pulls to `folder/local`.

    `tensors`: the content of version `last`; version 0 is the engine's own checkpoint.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], frame_bytes: int = _FRAME_BYTES) -> None:
        self.source = folder / "source"
        self.local = folder / "local"
        self.source.mkdir(parents=True, exist_ok=True)
        self.last = 0
        self.tensors = self._before = tensors
        self._frame_bytes = frame_bytes
        self._whole: dict[Path, dict[str, bytes]] = {}  # the files of damaged versions, before the damage

    def publish(self, tensors: Mapping[str, torch.Tensor], encoding: Encoding | None = None) -> Path:
        """Publish one more version; encodings take turns.  A tensor that the last version lacks changes from zeros."""
        number = self.last + 1
        old = {name: self.tensors.get(name, torch.zeros_like(tensor)) for name, tensor in tensors.items()}
        encoding = encoding or ENCODINGS[number % len(ENCODINGS)]
        if encoding == "ulp-gap":
            delta = DeltaEncoder(old.items(), frame_bytes=self._frame_bytes).encode(tensors.items())
            folder = publish_encoded(self.source, number, delta)
        else:
            folder = publish_bytes(self.source, number, old, tensors, encoding=encoding)
        self.last, self._before, self.tensors = number, self.tensors, dict(tensors)
        return folder

    def retract(self) -> None:
        """Remove the last published version, which was never accepted: the next one takes its number."""
        folder = version_path(self.source, self.last)
        shutil.rmtree(folder, ignore_errors=True)
        self._whole.pop(folder, None)
        self.last, self.tensors = self.last - 1, self._before

    def repair(self) -> None:
        """Publish the damaged versions again."""
        for folder, files in self._whole.items():
            folder.mkdir(exist_ok=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
        self._whole.clear()

    def damage(self, folder: Path, damage: Damage, part: float) -> None:
        """Damage a published version at `part` (0..1) of its content, or its index where nothing has changed."""
        self._whole[folder] = {file.name: file.read_bytes() for file in folder.iterdir()}
        if damage == "killed":
            folder.rename(folder.with_name(f".{folder.name}.1"))  # a publisher died before it published
            return
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            (index,) = folder.iterdir()
            index.write_bytes(index.read_bytes()[:-1])
            return
        file = files[min(int(part * len(files)), len(files) - 1)]
        content = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        at = header + int((len(content) - header - 1) * (part if len(files) == 1 else 0.5))
        if damage == "vanished":
            file.unlink()
        elif damage == "reordered":
            _exchange(files, part)
        elif damage == "truncated":
            file.write_bytes(content[:at])
        else:
            content[at] ^= 1
            file.write_bytes(content)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the call that pulls the last version."""
        return {
            "local_checkpoint_dir": str(self.local),
            "source_dir": str(self.source),
            "target_version": self.last,
            "update_memory": True,
        }


def _exchange(files: Sequence[Path], part: float) -> None:
    """Exchange the names of two files, or the contents of two tensors in a single file."""
    if len(files) > 1:
        at = min(int(part * len(files)), len(files) - 2)
        other = files[at].with_suffix(".other")
        files[at].rename(other)
        files[at + 1].rename(files[at])
        other.rename(files[at + 1])
        return
    with safe_open(files[0], "pt") as opened:
        sums = opened.metadata()
    payloads = load_file(files[0])
    names = sorted(payloads)
    at = min(int(part * len(names)), len(names) - 2)
    one, other = names[at : at + 2]
    payloads[one], payloads[other] = payloads[other], payloads[one]
    save_file(payloads, files[0], metadata=sums)
