"""A base checkpoint of random tensors and versions published on top of it, in every encoding."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.delta_models import DriftingMasters, Tensors
from weight_sync.checkpoint_folder import INDEX_FILE
from weight_sync.delta.encoder import DeltaEncoder
from weight_sync.delta.publisher import publish_bytes, publish_encoded
from weight_sync.delta.version_dir import version_path

SHAPES = {"embed": (60, 16), "layer.0": (48, 32), "layer.1": (48, 32), "norm": (32,)}
SHARDS = (("embed", "layer.0"), ("layer.1", "norm"))


def write_checkpoint(folder: Path, tensors: Tensors, shards: tuple[tuple[str, ...], ...] = SHARDS) -> Path:
    """Write a checkpoint in Hugging Face format, with an index if there is more than one shard."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "test"}')
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
    if len(shards) > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_checkpoint(folder: Path) -> Tensors:
    """Read every tensor of every safetensors file in the folder, as any other reader would find them."""
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


class Stream:
    """`base`: version 0.  `versions[n]`: the tensors of version n, which `publish` adds."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self._masters = DriftingMasters(SHAPES, seed)
        self.versions: list[Tensors] = [self._masters.tensors()]
        self.base = write_checkpoint(root / "base", self.versions[0])
        self.source = root / "source"
        self.local = root / "local"
        self._encoder = DeltaEncoder(self.versions[0].items(), frame_bytes=4000)

    def publish(self, encoding: str, checksum_format: str = "xxh3-128") -> int:
        """Publish one more version, of a few steps, as "xor", "overwrite", "ulp-gap" or "full"; return its number."""
        old, new = self.versions[-1], self.step()
        version = len(self.versions) - 1
        delta = self._encoder.encode(new.items())
        if encoding == "full":
            write_checkpoint(version_path(self.source, version), new, (tuple(SHAPES),))
        elif encoding == "ulp-gap":
            publish_encoded(self.source, version, delta)
        else:
            publish_bytes(self.source, version, old, new, encoding=encoding, checksum_format=checksum_format)
        self._encoder.advance(delta)
        return version

    def step(self) -> Tensors:
        """Make one more version, and return its tensors; the caller publishes them."""
        for _ in range(5):
            self._masters.step(1e-5)
        self.versions.append({name: tensor.clone() for name, tensor in self._masters.tensors().items()})
        return self.versions[-1]


def rewrite_index(folder: Path, **changes: object) -> None:
    """Change entries of the index's metadata; None removes one."""
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            index["metadata"].pop(key, None)
        else:
            index["metadata"][key] = value
    path.write_text(json.dumps(index))


def nan_planted(tensors: Tensors, name: str) -> Tensors:
    planted = {key: tensor.clone() for key, tensor in tensors.items()}
    planted[name].view(-1)[0] = torch.nan
    return planted
