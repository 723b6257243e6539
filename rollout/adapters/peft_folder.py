"""`read_adapter`: a folder that PEFT's `save_pretrained` wrote, checked against its own configuration.

    adapter_config.json         rank, alpha, patterns: `config.py`
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, D], .lora_B.weight [O, r]
                                of all experts of a layer: `expert_stacks.py`

Tensors in their storage order: D input features, O output features, r rank of a module, E experts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollout.adapters.config import LoraConfig
from rollout.adapters.expert_stacks import is_stack, stack_name, stacked
from rollout.core.errors import AdapterError
from rollout.core.known_fields import shown
from weight_sync.content_check import is_finite
from weight_sync.errors import WeightSyncError
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.safetensors_file import open_regular, read_header, read_small, read_tensor
from weight_sync.tensor_meta import TensorMeta

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_NAME_CHARS = 256  # patterns are matched with names
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The name of the adapter ("default") stands between where a state dict was saved without PEFT.
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.-]+)\.lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight")
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Modules that compilers, FSDP and checkpointing put around others: they are no part of a name."""
_REFUSED_NAMES = {
    "lora_magnitude_vector": "it belongs to DoRA, which is not served",
    "lora_embedding_": "it adapts an embedding, which is not served",
    "lora_B.bias": "biases of adapters are not served",
    "modules_to_save": "modules_to_save are whole modules, not adapters",
}


class LoraWeights(NamedTuple):
    """The adapter of one module: `scale` times `b` [O, r] @ `a` [r, D] is added to its weight.

    Of a stack of experts `b` is [E, O, r] and `a` [E, r, D], where one of the two may have one entry for all experts.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter: `modules` by their names in the trained model, on the host.

    `digest` names the content: tensors and scales, by module.  `source`: the folder that it was read from, if it was.
    `unmatched`: patterns of the configuration that match no module.
    """

    modules: Mapping[str, LoraWeights]
    digest: str
    source: str | None = None
    unmatched: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The greatest rank of a module."""
        return max(weights.rank for weights in self.modules.values())


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter of a folder.

    Raises `AdapterError`: a file that is missing or damaged, settings or tensors that are not served, a tensor without
    its other half, ranks that differ from the configuration, and values that are not finite.
    """
    try:
        config = LoraConfig.of(read_config(folder))
        return replace(adapter_of(_read_pairs(_tensor_file(folder)), config), source=str(folder))
    except WeightSyncError as error:
        raise AdapterError(str(error)) from None


def mark_of(folder: Path) -> bytes:
    """Return 32 bytes that stand for the configuration of a folder, and the names, types and places of its tensors.

    Nothing of their content is read.  Raises `AdapterError`.
    """
    try:
        tensors = read_header(_tensor_file(folder)).tensors
        stated = [(each.meta.name, str(each.meta.dtype), each.meta.shape, each.start) for each in tensors]
        config = read_small(folder / CONFIG, _MAX_CONFIG_BYTES)
    except WeightSyncError as error:
        raise AdapterError(str(error)) from None
    return hashlib.sha256(config + repr(stated).encode()).digest()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object of a folder's `adapter_config.json`.  Raises `AdapterError`, `WeightSyncError`."""
    path = folder / CONFIG
    try:
        content = json.loads(read_small(path, _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path.name} cannot be parsed as JSON: {error}") from None
    if not isinstance(content, dict):
        raise AdapterError(f"{path.name} is not a JSON object")
    return content


def _tensor_file(folder: Path) -> Path:
    path = folder / TENSORS
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise AdapterError("adapter_model.bin is a pickle, which is not read: save the adapter as safetensors")
    return path


def _read_pairs(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors by module and side, "A" or "B".  Raises `AdapterError`, `WeightSyncError`."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    header = read_header(path)
    with open_regular(path) as file:
        for tensor in header.tensors:
            module, side = _place_in(pairs, tensor.meta)
            pairs[module][side] = read_tensor(file, path, tensor)
    if not pairs:
        raise AdapterError(f"{path.name} holds no tensors")
    return pairs


class SentTensors:
    """The tensors of an adapter as they come, by PEFT's names.  Each is copied, to the host.

    `checksums`: the SHA-256 of the bytes of each, in hex, by name, as SGLang's clients state it; None: not stated.
    """

    def __init__(self, checksums: Mapping[str, str] | None = None) -> None:
        self._pairs: dict[str, dict[str, torch.Tensor]] = {}
        self._stated = checksums
        self._found: dict[str, str] = {}

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the next tensors.  Raises `AdapterError` for a name that is not an adapter's, or comes twice."""
        for name, tensor in tensors:
            module, side = _place_in(self._pairs, TensorMeta(name, tensor.dtype, tuple(tensor.shape)))
            copied = self._pairs[module][side] = tensor.to("cpu", copy=True)
            if self._stated is not None:
                self._found[name] = sha256_of(copied)

    def adapter(self, config: LoraConfig) -> Adapter:
        """Return the adapter that they make up.  Raises `AdapterError` as `read_adapter`, and for other checksums."""
        if not self._pairs:
            raise AdapterError("the adapter has no tensors")
        if self._stated is not None:
            require_checksums("expected_checksums", self._stated, self._found)
        return adapter_of(self._pairs, config)


def sha256_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor on the host, in hex."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def require_checksums(what: str, stated: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise `AdapterError` unless the tensors that came are the ones for which a sender states checksums, by name.

    `what`: the field that has them.
    """
    stated = {name: each.lower() for name, each in stated.items()}
    if found == stated:
        return
    missing, extra = stated.keys() - found.keys(), found.keys() - stated.keys()
    other = {name for name in stated.keys() & found.keys() if stated[name] != found[name]}
    raise AdapterError(
        f"{what}: {len(other)} of {len(stated)} tensors have other bytes, {len(missing)} did not come, "
        f"{len(extra)} came without one: {shown(', '.join(sorted(other | missing | extra)[:3]))}"
    )


def _place_in(pairs: dict[str, dict[str, torch.Tensor]], meta: TensorMeta) -> tuple[str, str]:
    """Return the module and the side of a tensor that is to come.  Raises `AdapterError`, also for a second one."""
    module, side = side_of(meta)
    if side in pairs.setdefault(module, {}):
        raise AdapterError(f"{meta.name}: {module} has two tensors lora_{side}")
    return module, side


def side_of(meta: TensorMeta) -> tuple[str, str]:
    """Return the module and the side, "A" or "B", of a tensor, by its name.  Raises `AdapterError`."""
    for part, reason in _REFUSED_NAMES.items():
        if part in meta.name:
            raise AdapterError(f"{shown(meta.name)}: {reason}")
    module, side = place_of(meta.name)
    name, is_float = meta.name[:200], meta.dtype in _DTYPES
    if is_stack(module) and not (is_float and len(meta.shape) == 3):
        raise AdapterError(f"{name} must be floats of three dimensions, got {meta.dtype} {list(meta.shape)}")
    if not is_stack(module) and not (is_float and len(meta.shape) == 2):
        raise AdapterError(f"{name} must be a matrix of floats, got {meta.dtype} {list(meta.shape)}")
    return module, side


def place_of(name: str) -> tuple[str, str]:
    """Return the module and the side, "A" or "B", of a tensor with this name.  Raises `AdapterError`."""
    match = _NAME.fullmatch(name)
    if match is None or len(name) > _MAX_NAME_CHARS:
        raise AdapterError(f"'{shown(name)}' is not the name of a tensor of a LoRA adapter")
    return _WRAPPERS.sub("", match["module"]), match["side"]


def adapter_of(pairs: Mapping[str, Mapping[str, torch.Tensor]], config: LoraConfig) -> Adapter:
    """Return the adapter of these tensors, by module and side.  Raises `AdapterError` as `read_adapter`."""
    modules, entries = {}, []
    for name, sides in sorted(pairs.items()):
        for side in "AB":
            if side not in sides:
                raise AdapterError(f"{name} has no tensor lora_{side}")
            if not is_finite(sides[side]):
                raise AdapterError(f"{name}: lora_{side} has values that are not finite")
        wrapped = stack_name(name, pairs, config.target_parameters)
        module, a, b = wrapped or name, sides["A"], sides["B"]
        rank, scale = config.rank_of(module), config.scale_of(module)
        if module in modules:
            raise AdapterError(f"{module} is there under two names")
        if wrapped is not None:
            a, b = stacked(module, a, b, rank)
        if a.shape[-2] != rank or b.shape[-1] != rank:
            raise AdapterError(
                f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not of rank {rank}, which "
                f"{CONFIG} gives it"
            )
        modules[module] = LoraWeights(a, b, scale)
        for what, tensor in (("lora_A", a), ("lora_B", b), ("scale", torch.tensor(scale, dtype=torch.float64))):
            meta = TensorMeta(f"{module}.{what}", tensor.dtype, tuple(tensor.shape))
            entries.append((meta, fingerprint(tensor.contiguous())))
    return Adapter(modules, digest(entries), unmatched=config.unmatched(modules))
