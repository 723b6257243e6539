"""`WeightIndex`: a model's weights by logical name, collected from its layers.

Cold load and live refresh both go through this object, which splits wire tensors into logical ones and writes this
rank's part of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from types import MappingProxyType

import torch

from rollout.layers.layer import Layer
from rollout.layers.weight_entry import FusedForm, WeightEntry, WeightLayer
from rollout.model.kv_scales import layer_and_part
from weight_sync.errors import ShapeMismatchError, UnknownTensorError, shown
from weight_sync.held_format import HeldFormats
from weight_sync.mxfp4 import is_mxfp4
from weight_sync.paired_wire import part_of
from weight_sync.tensor_meta import Pair, Piece, Place, TensorMeta
from weight_sync.unknown_names import NearestName, is_derived


class WeightIndex:
    """`weight_sync.tensor_meta.LogicalWeights` over the layers of `model`.

    `aliases` maps accepted names to the canonical name of the same content (tied embeddings).  `renamed` has prefixes
    of names, each with its canonical form.  Tensors whose names begin with one of `ignored` are accepted and dropped,
    as are tensors that are derived from the configuration.
    """

    def __init__(
        self,
        model: Layer,
        aliases: Mapping[str, str],
        ignored: Sequence[str] = (),
        renamed: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._is_proposed = False
        self._dropped: WeightIndex | None = None
        self._nearest: NearestName | None = None  # made when a name is wrong for the first time
        self._entries: dict[str, WeightEntry] = {}
        self._fused: dict[str, FusedForm] = {}
        self._aliases = dict(aliases)
        self._ignored = tuple(ignored)
        self._renamed = tuple(renamed)
        self._layers = [layer for _, layer in model.named_layers() if isinstance(layer, WeightLayer)]
        for prefix, layer in model.named_layers():
            if isinstance(layer, WeightLayer):
                for entry in layer.weight_entries(prefix):
                    assert entry.name not in self._entries, f"two layers hold {entry.name}"
                    self._entries[entry.name] = entry
                self._fused.update((form.name, form) for form in layer.fused_forms(prefix))
        metas = {name: TensorMeta(name, entry.dtype, entry.shape) for name, entry in self._entries.items()}
        self._metas = MappingProxyType(metas)

    def metas(self) -> Mapping[str, TensorMeta]:
        """Return every logical tensor by canonical name, in the order of the model's layers."""
        return self._metas

    def split(self, wire: TensorMeta) -> list[Piece]:
        """Return the logical tensors inside `wire`; an empty list if the model ignores it.

        Raises `UnknownTensorError`, `ShapeMismatchError`.
        """
        name = self._renamed_name(wire.name)
        own = self._metas.get(name)
        if own is not None:
            if own.shape != wire.shape:
                _require_shape(wire.name, wire.shape, own.shape)
            return [Piece(name)]
        if name in self._fused:
            _require_shape(wire.name, wire.shape, self._fused[name].shape)
            return list(self._fused[name].pieces)
        if (self._ignored and name.startswith(self._ignored)) or is_derived(name):
            return []
        if is_mxfp4(wire) and wire.name.removesuffix("_blocks").removesuffix("_scales") in self._fused:
            raise UnknownTensorError(f"{wire.name} is in MXFP4, which only a start reads: send its values in bfloat16")
        if self._dropped is not None and self._dropped.accepts(wire):
            return []
        if layer_and_part(name):
            raise UnknownTensorError(
                f"{wire.name} is a scale of keys and values, which only a start reads: leave it out of refreshes"
            )
        if ":" in wire.name:
            raise UnknownTensorError(
                f"{shown(wire.name)} is the name of a tensor of an adapter: /register_lora_adapter, then "
                "begin_weight_update come before its tensors"
            )
        raise UnknownTensorError(f"the model has no tensor {shown(wire.name)}", wire.name)

    def accepts(self, wire: TensorMeta) -> bool:
        """Return whether these weights keep or drop a tensor of this name."""
        try:
            self.split(wire)
        except ShapeMismatchError:
            return True
        except UnknownTensorError:
            return part_of(self, wire) is not None
        return True

    def dropping(self, others: WeightIndex) -> WeightIndex:
        """Return an index of the same tensors that drops what `others` accept."""
        index = copy(self)
        index._dropped = others
        return index

    def nearest(self, name: str) -> str | None:
        """Return the accepted name that is most like the wrong `name`; None if no name is like it."""
        if self._nearest is None:
            self._nearest = NearestName({*self._entries, *self._fused, *self._aliases})
        return self._nearest.of(name)

    def held_formats(self) -> HeldFormats:
        """Return the formats of the tensors that this model quantises as they are written."""
        return {name: entry.held for name, entry in self._entries.items() if entry.held is not None}

    def write(self, name: str, source: torch.Tensor | Pair) -> None:
        """Copy `source` to every place of the logical tensor, cast to its dtype.

        Raises `UnknownTensorError` unless `name` is canonical, `ShapeMismatchError`.
        """
        entry = self._entry(name)
        _require_shape(name, tuple(source.shape), entry.shape)
        for place in self._places(entry):
            place.write(source)

    def places(self, name: str) -> Sequence[Place]:
        """Return all places of the logical tensor on this rank under the current placement.

        Raises `UnknownTensorError`.
        """
        return self._places(self._entries.get(name) or self._entry(name))

    def places_key(self) -> Hashable:
        """Return a key that changes whenever `places` of any tensor does."""
        return self._is_proposed, tuple(layer.places_key for layer in self._layers)

    def under_proposed_placement(self) -> WeightIndex:
        """Return an index whose places are the ones under the proposed placement.

        A refresh that adopts the placement stages the weights there.
        """
        other = copy(self)
        other._is_proposed = True
        return other

    def restore(self, name: str, content: torch.Tensor | Pair) -> None:
        """Copy `content`, which one place of this rank held, to every place.  Raises `UnknownTensorError`."""
        for place in self.places(name):
            place.restore(content)

    def canonical_name(self, name: str) -> str:
        """Return the canonical name of `name`.  Raises `UnknownTensorError` for a name that the model does not have."""
        return self._entry(self._renamed_name(name)).name

    def recompute_derived(self) -> None:
        """Do nothing: these models hold no tensors that are computed from weights."""

    def _renamed_name(self, name: str) -> str:
        for prefix, canonical in self._renamed:
            if name.startswith(prefix):
                name = canonical + name.removeprefix(prefix)
        return self._aliases.get(name, name)

    def _places(self, entry: WeightEntry) -> Sequence[Place]:
        return entry.proposed() if self._is_proposed and entry.proposed is not None else entry.places()

    def _entry(self, name: str) -> WeightEntry:
        if name not in self._entries:
            near = self.nearest(name)
            hint = f"; the nearest that it has is {near!r}" if near is not None else ""
            raise UnknownTensorError(f"the model has no tensor {shown(name)}{hint}")
        return self._entries[name]


def _require_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(expected):
        raise ShapeMismatchError(f"{name} has shape {list(shape)}, the model expects {list(expected)}")


def weight_tensors(model: Layer) -> list[torch.Tensor]:
    """Return every tensor that holds weights of `model`, each once, without tensors computed from its settings."""
    layers = [layer for _, layer in model.named_layers() if isinstance(layer, WeightLayer)]
    held = (value for layer in layers for value in vars(layer).values())
    return list({id(value): value for value in held if isinstance(value, torch.Tensor)}.values())
