"""`/pull_weights`: versions published one on top of the other, in each encoding by turns, and what can happen to them.

Knows published folders.  Does not know which faults there are.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollout.core.weight_io_struct import PullWeightsReqInput
from tests.faults.contents import Tensors
from tests.faults.engines import Engine
from tests.faults.transports import Damage, Verb
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_bytes, publish_encoded
from weight_sync.delta.version_dir import version_path

ENCODINGS = ("xor", "overwrite", "ulp-gap")
_FRAME_BYTES = 16 << 10  # several frames, so several files


class Publisher:
    """What one trainer publishes for one engine.  Version 0 is the engine's own checkpoint."""

    def __init__(self, engine: Engine) -> None:
        self.source = engine.scratch / "source"
        self.local = engine.scratch / "local"
        self.source.mkdir()
        self._versions: list[Tensors] = [engine.zoo.contents[0]]

    @property
    def last(self) -> int:
        return len(self._versions) - 1

    def publish(self, tensors: Mapping[str, torch.Tensor]) -> Path:
        """One more version.  A tensor that the last one does not have changes from zeros."""
        number, last = len(self._versions), self._versions[-1]
        old = {name: last.get(name, torch.zeros_like(tensor)) for name, tensor in tensors.items()}
        encoding = ENCODINGS[number % len(ENCODINGS)]
        if encoding == "ulp-gap":
            delta = DeltaEncoder(old.items(), frame_bytes=_FRAME_BYTES).encode(tensors.items())
            folder = publish_encoded(self.source, number, delta)
        else:
            folder = publish_bytes(self.source, number, old, tensors, encoding=encoding)
        self._versions.append(dict(tensors))
        return folder

    def retract(self) -> None:
        """What was published last was never accepted: the next one takes its number."""
        shutil.rmtree(version_path(self.source, self.last), ignore_errors=True)
        self._versions.pop()

    def damage(self, folder: Path, damage: Damage, part: float) -> None:
        """Damage a published version at `part` (0..1) of its content."""
        if damage == "killed":
            folder.rename(folder.with_name(f".{folder.name}.1"))  # what a publisher has made before it publishes
            return
        files = sorted(folder.glob("*.safetensors"))
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

    def verb(self) -> Verb:
        return PullWeightsReqInput, {
            "local_checkpoint_dir": str(self.local),
            "source_dir": str(self.source),
            "target_version": self.last,
            "update_memory": True,
        }


def _exchange(files: Sequence[Path], part: float) -> None:
    """Two files take each other's names; in a single file, two tensors each other's content."""
    if len(files) > 1:
        at = min(int(part * len(files)), len(files) - 2)
        aside = files[at].with_suffix(".aside")
        files[at].rename(aside)
        files[at + 1].rename(files[at])
        aside.rename(files[at + 1])
        return
    with safe_open(files[0], "pt") as opened:
        sums = opened.metadata()
    payloads = load_file(files[0])
    names = sorted(payloads)
    at = min(int(part * len(names)), len(names) - 2)
    one, other = names[at : at + 2]
    payloads[one], payloads[other] = payloads[other], payloads[one]
    save_file(payloads, files[0], metadata=sums)
