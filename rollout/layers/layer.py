"""`Layer`: the base class of the parts of a model.  A layer is a plain object that holds tensors and other layers.

It is no `nn.Module`: it is not trained, and a step of a small model would spend as long in module calls and attribute
look-ups as in arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Layer:
    """A part of a model.  Its sublayers are found in attributes, in the order of assignment, alone or in lists."""

    def named_layers(self, prefix: str = "") -> Iterator[tuple[str, Layer]]:
        """Yield this layer and all below it, each once, with its dotted name: `model.layers.3.self_attn`."""
        yield from self._walk(prefix, set())

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that this layer and the layers below hold as an attribute, each once."""
        held = (value for _, layer in self.named_layers() for value in vars(layer).values())
        return list({id(value): value for value in held if isinstance(value, torch.Tensor)}.values())

    def _walk(self, prefix: str, seen: set[int]) -> Iterator[tuple[str, Layer]]:
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, value in vars(self).items():
            children = [(name, value)]
            if isinstance(value, list):
                children = [(f"{name}.{i}", item) for i, item in enumerate(value)]
            for child_name, child in children:
                if isinstance(child, Layer):
                    yield from child._walk(f"{prefix}.{child_name}" if prefix else child_name, seen)
