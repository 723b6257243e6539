"""`ModelExpertSlots`: the expert slots of a model on this rank, as bytes that can be moved.

However a matrix is stored, the content of one slot is one run of bytes in each of a layer's tensors.  The same expert
has the same bytes on every rank of the same shard.

Shapes: B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout.layers.layer import Layer
from rollout.layers.moe.experts import Experts
from weight_sync.fingerprint import fingerprint


class ModelExpertSlots:
    """The expert slots of a model.  `layer` is the ordinal of a MoE layer, `slot` counts from this rank's first one.

    Tensors are looked up at every call, so that no call writes to storage that a layer has replaced.
    """

    def __init__(self, model: Layer) -> None:
        layers = [layer for _, layer in model.named_layers() if isinstance(layer, Experts)]
        self._layers = sorted(layers, key=lambda layer: layer.moe_layer)
        assert [layer.moe_layer for layer in self._layers] == list(range(len(layers))), "every MoE layer once"
        assert len({self._describe(layer) for layer in layers}) == 1, "MoE layers have the same experts"

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def slots_per_rank(self) -> int:
        return self._layers[0].w13.shape[0]

    @property
    def part_bytes(self) -> Sequence[int]:
        return [tensor[0].nbytes for tensor in self._tensors(0)]

    @property
    def form(self) -> str:
        """Operators, dtype and shapes, which decide how an expert's elements lie in its bytes."""
        return self._describe(self._layers[0])

    def read(self, layer: int, slot: int) -> Sequence[torch.Tensor]:
        return [_as_bytes(tensor[slot]) for tensor in self._tensors(layer)]

    def write(self, layer: int, slot: int, content: Sequence[torch.Tensor]) -> None:
        for own, new in zip(self.read(layer, slot), content, strict=True):
            own.copy_(new)
        if content[0].is_cuda:
            torch.cuda.synchronize(content[0].device)  # an error shows here, before the vote

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._layers[0].w13.device)

    def _tensors(self, layer: int) -> list[torch.Tensor]:
        return self._layers[layer].slot_tensors()

    @staticmethod
    def _describe(layer: Experts) -> str:
        shapes = [list(tensor.shape[1:]) for tensor in layer.slot_tensors()]
        return f"{layer.ops.storage.name} {layer.w13.dtype} {shapes}"


def bytes_fingerprint(content: torch.Tensor) -> int:
    """Return the fingerprint of uint8 [B], read as words of two bytes where they fit."""
    return fingerprint(content.view(torch.int16) if content.numel() % 2 == 0 else content)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's bytes.  Raises `RuntimeError` for a tensor that is not contiguous."""
    return tensor.view(-1).view(torch.uint8)
