"""`AdapterWeights`: the tensors of one adapter as a weight update takes them, in host memory that serves nothing.

    <module>.lora_A.weight [r, D]   <module>.lora_B.weight [O, r]

The update's manifest lists the tensors, by the sender's names of the modules.  Without a manifest they follow from the
adapter's configuration, by the model's names, in float32.

D input features, O output features, r rank of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from rollout.adapters.config import LoraConfig
from rollout.adapters.expert_stacks import WRAPPED
from rollout.adapters.peft_folder import side_of
from rollout.core.errors import AdapterError
from rollout.core.known_fields import shown
from rollout.kernels.places import ViewPlace
from rollout.model.adapter_places import AdapterPlaces
from weight_sync.errors import ShapeMismatchError, UnknownTensorError
from weight_sync.tensor_meta import Pair, Piece, Place, TensorMeta
from weight_sync.unknown_names import NearestName

Pairs = dict[str, dict[str, torch.Tensor]]
"""Tensors by module and side, "A" or "B"."""


class AdapterWeights:
    """`weight_sync.tensor_meta.LogicalWeights` of one adapter.

    `metas`: its tensors.  `canonical(module)`: the name that `metas` have for a module of the sender's; None: `metas`
    have the sender's names and dtypes.  `aliases`: of tensors that do not come, the ones that they equal, by the
    sender's names.  Raises `AdapterError` for aliases of what the adapter does not have.
    """

    def __init__(
        self,
        metas: Sequence[TensorMeta],
        canonical: Callable[[str], str] | None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._metas = {meta.name: meta for meta in metas}
        self._tensors = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in metas}
        self._canonical = canonical
        self._sent: dict[str, tuple[str, torch.dtype]] = {}  # the sender's name of the module, and the dtype
        self._aliases: dict[str, list[tuple[str, str]]] = {}  # by the name that comes: others, and their modules
        for alias, sent in (aliases or {}).items():
            self._add_alias(alias, sent, sent in (aliases or {}))

    def metas(self) -> Mapping[str, TensorMeta]:
        return self._metas

    def split(self, wire: TensorMeta) -> list[Piece]:
        """Return the tensor in `wire` and its aliases.  Note how the sender has them, where that is not known.

        Raises `UnknownTensorError`, `ShapeMismatchError`.
        """
        try:
            name, module = self._named(wire)
        except AdapterError as error:
            raise UnknownTensorError(str(error)) from None
        if name not in self._metas:
            raise UnknownTensorError(f"the adapter has no tensor {name}", name)
        if wire.shape != self._metas[name].shape:
            have, want = list(wire.shape), list(self._metas[name].shape)
            raise ShapeMismatchError(f"{wire.name} has shape {have}, the adapter expects {want}")
        found = [(name, module), *self._aliases.get(name, ())]
        if self._canonical is not None:
            self._sent |= {each: (of, wire.dtype) for each, of in found}
        return [Piece(each) for each, _ in found]

    def _named(self, wire: TensorMeta) -> tuple[str, str]:
        """Return the name of a tensor of the sender's in `metas`, and the sender's name of its module."""
        module, side = side_of(wire)
        return _name(module if self._canonical is None else self._canonical(module), side), module

    def _add_alias(self, alias: str, sent: str, is_chain: bool) -> None:
        name, module = self._named(TensorMeta(alias, torch.float32, (1, 1)))
        target, _ = self._named(TensorMeta(sent, torch.float32, (1, 1)))
        metas = self._metas.get(name), self._metas.get(target)
        if is_chain or name == target or metas[0] is None or metas[1] is None or metas[0].shape != metas[1].shape:
            raise AdapterError(
                f"alias {shown(alias)} of {shown(sent)}: both must be tensors of one shape that the adapter has, of "
                "which the second comes"
            )
        self._aliases.setdefault(target, []).append((name, module))

    def nearest(self, name: str) -> str | None:
        return NearestName(self._metas).of(name)

    def write(self, name: str, source: torch.Tensor | Pair) -> None:
        ViewPlace(self._tensors[name]).write(source)

    def places(self, name: str) -> Sequence[Place]:
        return [ViewPlace(self._tensors[name])]

    def places_key(self) -> Hashable:
        return None

    def restore(self, name: str, content: torch.Tensor | Pair) -> None:
        self.write(name, content)

    def recompute_derived(self) -> None:
        """Do nothing: an adapter has no such tensors."""

    def pairs(self) -> Pairs:
        """Return the tensors as the sender has them: its names of modules, and its dtypes."""
        found: Pairs = {}
        for name, tensor in self._tensors.items():
            stem, side = name.removesuffix(".weight").rsplit(".lora_", 1)
            module, dtype = self._sent.get(name, (stem, tensor.dtype))
            found.setdefault(module, {})[side] = tensor.to(dtype)
        return found


def announced_weights(metas: Sequence[TensorMeta], places: AdapterPlaces) -> AdapterWeights:
    """Return the tensors that a manifest announces.  Raises `AdapterError`."""
    found: dict[str, TensorMeta] = {}
    for meta in metas:
        name = _name(*side_of(meta))
        if name in found:
            raise AdapterError(f"{name} is there under two names")
        found[name] = meta._replace(name=name)
    if not found:
        raise AdapterError("the manifest is empty")
    return _empty(list(found.values()), None, places)


def configured_weights(
    config: LoraConfig,
    target_modules: Sequence[str],
    places: AdapterPlaces,
    aliases: Mapping[str, str] | None = None,
) -> AdapterWeights:
    """Return A and B of all modules of the model whose names end as `target_modules` say.

    PEFT has one A and one B for all experts of a layer, if `target_parameters` of the configuration name them.  Raises
    `AdapterError`.
    """
    metas = []
    for module, (depth, width) in places.features.items():
        if _ends(module, target_modules):
            metas += _pair(module, depth, width, config.rank_of(module))
    for experts, (num_experts, features) in places.stacks.items():
        kinds = [kind for kind in features if _ends(f"{experts}.{kind}", config.target_parameters)]
        for kind in kinds:
            module = experts + WRAPPED if len(kinds) == 2 and kind == "gate_up_proj" else experts
            metas += _pair(module, *features[kind], num_experts * config.rank_of(f"{experts}.{kind}"))
    if not metas:
        targets = ", ".join((*target_modules, *config.target_parameters))[:200]
        raise AdapterError(f"the model has no module that target_modules {targets} adapts")
    return _empty(metas, places.canonical_sent, places, aliases)


def _ends(module: str, targets: Sequence[str]) -> bool:
    return any(f".{module}".endswith(f".{target}") for target in targets)


def _pair(module: str, depth: int, width: int, rank: int) -> list[TensorMeta]:
    """Return A and B of a module that takes `depth` features and gives `width`."""
    shapes = {"A": (rank, depth), "B": (width, rank)}
    return [TensorMeta(_name(module, side), torch.float32, shape) for side, shape in shapes.items()]


def _empty(
    metas: Sequence[TensorMeta],
    canonical: Callable[[str], str] | None,
    places: AdapterPlaces,
    aliases: Mapping[str, str] | None = None,
) -> AdapterWeights:
    """Return zeros.  Raises `AdapterError` for more bytes than an adapter has, before they are taken."""
    num_bytes, rank, most = sum(meta.nbytes for meta in metas), places.max_rank, places.max_bytes
    if num_bytes > most:
        raise AdapterError(f"the adapter has {num_bytes} bytes; with --max-lora-rank {rank} it has at most {most}")
    return AdapterWeights(metas, canonical, aliases)


def _name(module: str, side: str) -> str:
    return f"{module}.lora_{side}.weight"
