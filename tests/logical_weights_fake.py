"""A small in-memory model that offers `LogicalWeights`: fused experts with replicas, tied embeddings, two dtypes.

Shapes: V vocabulary, D hidden, E logical experts, P physical experts, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch

from rollout.kernels.places import ViewPlace
from weight_sync.errors import ShapeMismatchError, UnknownTensorError
from weight_sync.tensor_meta import Piece, TensorMeta

V, D, E, I = 6, 4, 3, 2
PHYSICAL_TO_LOGICAL = (0, 1, 2, 1)  # logical expert 1 has a replica

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
NORM = "model.norm.weight"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def expert_name(logical_expert: int, projection: str) -> str:
    return f"model.layers.0.mlp.experts.{logical_expert}.{projection}.weight"


class FakeWeights:
    """Stores embedding (tied to the head), a float32 norm, and experts fused as w13 [P, 2I, D] and w2 [P, D, I].

    `fault(name)` is called in each write by name and may raise, after which the tensor is left half-written.
    """

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.fault: Callable[[str], None] = lambda name: None
        self.derived_fault: Callable[[], None] = lambda: None
        num_physical = len(PHYSICAL_TO_LOGICAL)
        self.embed = torch.zeros(V, D, dtype=dtype)
        self.norm = torch.zeros(D)
        self.w13 = torch.zeros(num_physical, 2 * I, D, dtype=dtype)
        self.w2 = torch.zeros(num_physical, D, I, dtype=dtype)
        self.derived_norm_sum = torch.zeros(())
        self._metas = {EMBED: TensorMeta(EMBED, dtype, (V, D)), NORM: TensorMeta(NORM, torch.float32, (D,))}
        for expert in range(E):
            for projection, shape in (("gate_proj", (I, D)), ("up_proj", (I, D)), ("down_proj", (D, I))):
                name = expert_name(expert, projection)
                self._metas[name] = TensorMeta(name, dtype, shape)
        for name, tensor in version(seed, dtype).items():
            self.write(name, tensor)
        self.recompute_derived()

    def metas(self) -> Mapping[str, TensorMeta]:
        return self._metas

    def split(self, wire: TensorMeta) -> list[Piece]:
        if wire.name == GATE_UP:
            _require_shape(wire, (E, 2 * I, D))
            return [
                Piece(expert_name(expert, projection), (expert, rows))
                for expert in range(E)
                for projection, rows in (("gate_proj", slice(0, I)), ("up_proj", slice(I, 2 * I)))
            ]
        if wire.name == DOWN:
            _require_shape(wire, (E, D, I))
            return [Piece(expert_name(expert, "down_proj"), (expert,)) for expert in range(E)]
        name = EMBED if wire.name == LM_HEAD else wire.name
        if name not in self._metas:
            raise UnknownTensorError(f"{wire.name}: no such tensor")
        _require_shape(wire, self._metas[name].shape)
        return [Piece(name)]

    def nearest(self, name: str) -> str | None:
        return None

    def write(self, name: str, source: torch.Tensor) -> None:
        assert tuple(source.shape) == self._metas[name].shape
        for target in self._places(name):
            target[:1].copy_(source[:1])
            self.fault(name)
            target.copy_(source)

    def read(self, name: str) -> torch.Tensor:
        return self._places(name)[0]

    def places(self, name: str) -> list[ViewPlace]:
        return [ViewPlace(target) for target in self._places(name)]

    def places_key(self) -> Hashable:
        return None

    def restore(self, name: str, content: torch.Tensor) -> None:
        self.write(name, content)

    def recompute_derived(self) -> None:
        self.derived_fault()
        self.derived_norm_sum.copy_(self.norm.sum())

    def snapshot(self) -> list[bytes]:
        """Return every byte of every storage, replicas and derived tensors included."""
        stores = (self.embed, self.norm, self.w13, self.w2, self.derived_norm_sum)
        return [store.reshape(-1).view(torch.uint8).numpy().tobytes() for store in stores]

    def _places(self, name: str) -> list[torch.Tensor]:
        if name == EMBED:
            return [self.embed]
        if name == NORM:
            return [self.norm]
        expert, projection = name.split(".")[-3:-1]
        slots = [slot for slot, logical in enumerate(PHYSICAL_TO_LOGICAL) if logical == int(expert)]
        if projection == "down_proj":
            return [self.w2[slot] for slot in slots]
        rows = slice(0, I) if projection == "gate_proj" else slice(I, 2 * I)
        return [self.w13[slot, rows] for slot in slots]


class NamedWeights(FakeWeights):
    """Stores tensors of any names, as they come."""

    def __init__(self, metas: Mapping[str, TensorMeta]) -> None:
        self.fault, self.derived_fault = lambda name: None, lambda: None
        self._metas = dict(metas)
        self.tensors = {name: torch.zeros(meta.shape, dtype=meta.dtype) for name, meta in metas.items()}

    def split(self, wire: TensorMeta) -> list[Piece]:
        if wire.name not in self._metas:
            raise UnknownTensorError(f"{wire.name}: no such tensor")
        _require_shape(wire, self._metas[wire.name].shape)
        return [Piece(wire.name)]

    def recompute_derived(self) -> None:
        self.derived_fault()

    def snapshot(self) -> list[bytes]:
        return [bits(tensor) for tensor in self.tensors.values()]

    def _places(self, name: str) -> list[torch.Tensor]:
        return [self.tensors[name]]


def version(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return all logical tensors of one weight version, by canonical name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {EMBED: torch.randn(V, D, generator=generator).to(dtype), NORM: torch.randn(D, generator=generator)}
    for expert in range(E):
        for projection, shape in (("gate_proj", (I, D)), ("up_proj", (I, D)), ("down_proj", (D, I))):
            tensors[expert_name(expert, projection)] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


def fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same version in the fused form: `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I]."""
    gate_up = [
        torch.cat([tensors[expert_name(expert, "gate_proj")], tensors[expert_name(expert, "up_proj")]])
        for expert in range(E)
    ]
    down = [tensors[expert_name(expert, "down_proj")] for expert in range(E)]
    return {
        EMBED: tensors[EMBED],
        NORM: tensors[NORM],
        GATE_UP: torch.stack(gate_up),
        DOWN: torch.stack(down),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _require_shape(wire: TensorMeta, shape: tuple[int, ...]) -> None:
    if wire.shape != shape:
        raise ShapeMismatchError(f"{wire.name}: the model has {list(shape)}, got {list(wire.shape)}")
