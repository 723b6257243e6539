"""Scales of keys and values in FP8, one for the keys and one for the values of a layer, from a checkpoint or a file.

    model.layers.0.self_attn.k_scale                   compressed-tensors, and SGLang's and vLLM's own
    model.layers.0.self_attn.attn.k_scale              vLLM's name of its parameter
    model.layers.0.self_attn.k_proj.k_scale            ModelOpt
    {"model_type": "llama",                            SGLang's and vLLM's file: --quantization-param-path
     "kv_cache": {"dtype": "float8_e4m3fn",
                  "scaling_factor": {"0": {"0": 0.0125, ...}}}}

The file has a number for each rank of attention and each layer, for keys and values alike.  Scales are no weights: a
start reads them, and a refresh does not bring any.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import AttentionSpec
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.memory.kv_pool import KVScale
from weight_sync.checkpoint_folder import open_checkpoint_folder
from weight_sync.errors import WeightSyncError

_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.self_attn\.(?:attn\.|([kv])_proj\.)?([kv])_scale")
_DTYPE = "float8_e4m3fn"


@dataclass(frozen=True)
class KVScales:
    """The scales of all layers of this rank, 1 for layers that keep no keys and values.

    `facts`, for /server_info: the `source`, a path; the smallest and the largest scale of keys, `k`, and of values,
    `v`, on any rank.  None: no scales were given.
    """

    layers: tuple[KVScale, ...]
    facts: dict[str, Any] | None = None


def layer_and_part(name: str, renamed: Iterable[tuple[str, str]] = ()) -> tuple[int, str] | None:
    """Return the layer of a scale of keys ("k") or values ("v") by its name in checkpoints; None for other tensors.

    `renamed`: as in `WeightIndex`.
    """
    for prefix, canonical in renamed:
        if name.startswith(prefix):
            name = canonical + name.removeprefix(prefix)
    found = _NAME.fullmatch(name)
    if found is None or found[2] not in (None, found[3]):
        return None
    return int(found[1]), found[3]


def read_kv_scales(
    model_path: str, param_path: str | None, is_fp8: bool, config: ModelConfig, parallel: Parallel
) -> KVScales:
    """Return the scales of this rank: of the file `param_path`, else of the checkpoint, else 1.

    All ranks call this together, and fail together where one of them does.  Raises `StartupError` in one line for a
    number that is not positive or finite, for a layer without one, and for scales of KV that is not in FP8.
    """
    fault, source, by_rank = None, None, list[tuple[KVScale, ...]]()
    try:
        source, by_rank = _given(model_path, param_path, is_fp8, config, parallel.attn_tp.size)
    except StartupError as error:
        fault = error
    read = parallel.world.gather_bytes(b"" if fault else repr(by_rank).encode())
    if b"" in read:
        raise fault or StartupError("another rank cannot read the scales of keys and values: see its message")
    if len(set(read)) > 1:
        raise StartupError("machines have different scales of keys and values: give all of them the same files")
    facts: dict[str, Any] | None = None
    every = [scales[layer] for scales in by_rank for layer in _kept_layers(config)]
    if source is not None and every:
        facts = {"source": source} | {part: [min(of), max(of)] for part, of in zip("kv", zip(*every), strict=True)}
    return KVScales(by_rank[parallel.attn_tp.rank], facts)


def _given(
    model_path: str, param_path: str | None, is_fp8: bool, config: ModelConfig, num_ranks: int
) -> tuple[str | None, list[tuple[KVScale, ...]]]:
    """Return the source, and the scales of all layers for each rank of attention."""
    named = _of_checkpoint(model_path, config)
    if named and not is_fp8:
        raise StartupError(
            f"{model_path} has scales of keys and values, such as {next(iter(named))}: "
            "start with --kv-cache-dtype fp8_e4m3, or leave the scales out of the checkpoint"
        )
    if param_path is not None:
        return param_path, _of_file(param_path, config, num_ranks)
    if named:
        return model_path, [_by_layer(named, config)] * num_ranks
    return None, [(KVScale(),) * config.num_hidden_layers] * num_ranks


def _of_checkpoint(model_path: str, config: ModelConfig) -> dict[str, tuple[int, str, float]]:
    """Return layer, part and number of every scale by name."""
    try:
        files = open_checkpoint_folder(Path(model_path)).files
    except WeightSyncError as error:
        raise StartupError(str(error)) from None
    found = {}
    for file in files:
        names = [meta.name for meta in file.metas if not meta.name.startswith(config.ignored_names)]
        places = {name: place for name in names if (place := layer_and_part(name, config.renamed_prefixes))}
        if not places:
            continue
        try:
            with safe_open(file.path, framework="pt") as mapped:
                for name, place in places.items():
                    found[name] = (*place, _number(name, mapped.get_tensor(name)))
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file.path} is truncated or damaged ({error}); copy it again") from None
    return found


def _number(name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise StartupError(
            f"{name} is {str(tensor.dtype)[6:]} {list(tensor.shape)}: keys and values of a layer have one scale each"
        )
    return _scale(name, tensor.item())


def _scale(name: str, value: Any) -> float:
    """Return a scale as a number of float32."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with_float32 = torch.tensor(_float(value), dtype=torch.float32).item()
        if 0 < with_float32 < math.inf:
            return with_float32
    shown = str(value)[:60]
    raise StartupError(f"{name} is {shown}: a scale of keys or values is a positive finite number of float32")


def _float(number: float) -> float:
    """Return a number as a float, infinity for an integer beyond all floats."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _by_layer(named: Mapping[str, tuple[int, str, float]], config: ModelConfig) -> tuple[KVScale, ...]:
    """Return the scales of all layers, of which each that keeps keys and values has both."""
    by_place: dict[tuple[int, str], tuple[str, float]] = {}
    for name, (layer, part, number) in named.items():
        if layer not in _kept_layers(config):
            raise StartupError(f"{name}: the model keeps no keys and values in a layer {layer}")
        other = by_place.setdefault((layer, part), (name, number))
        if other[1] != number:
            raise StartupError(f"{name} is {number}, and {other[0]} of the same layer is {other[1]}")
    for layer in _kept_layers(config):
        for part in "kv":
            if (layer, part) not in by_place:
                raise StartupError(
                    f"the checkpoint has scales such as {next(iter(named))}, but none for the "
                    f"{'keys' if part == 'k' else 'values'} of layer {layer}"
                )
    scales = [KVScale()] * config.num_hidden_layers
    for layer in _kept_layers(config):
        scales[layer] = KVScale(by_place[layer, "k"][1], by_place[layer, "v"][1])
    return tuple(scales)


def _kept_layers(config: ModelConfig) -> list[int]:
    """Return the layers that keep keys and values.  Latents are no keys and values of FP8."""
    return [layer for layer, spec in enumerate(config.layers) if isinstance(spec.attention, AttentionSpec)]


def _of_file(path: str, config: ModelConfig, num_ranks: int) -> list[tuple[KVScale, ...]]:
    """Return the scales of all layers for each rank of attention."""
    flag = f"--quantization-param-path {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{flag} cannot be read: {error}") from None
    kv_cache = content.get("kv_cache") if isinstance(content, Mapping) else None
    factors = kv_cache.get("scaling_factor") if isinstance(kv_cache, Mapping) else None
    if not isinstance(kv_cache, Mapping) or not isinstance(factors, Mapping):
        raise StartupError(f'{flag} is not of the form {{"kv_cache": {{"dtype": …, "scaling_factor": …}}}}')
    if kv_cache.get("dtype") != _DTYPE:
        raise StartupError(f"{flag} has scales for {kv_cache.get('dtype')}, not for {_DTYPE}")
    model_type = content.get("model_type")
    if model_type not in (None, config.model_type):
        raise StartupError(f"{flag} has scales for model type {model_type}, not for {config.model_type}")
    if set(factors) != {str(rank) for rank in range(num_ranks)}:
        raise StartupError(f"{flag} has scales of ranks {_listed(factors)}, and {num_ranks} ranks share the heads")
    return [_of_rank(flag, factors[str(rank)], rank, config) for rank in range(num_ranks)]


def _of_rank(flag: str, numbers: Any, rank: int, config: ModelConfig) -> tuple[KVScale, ...]:
    wanted, known = _kept_layers(config), {str(layer) for layer in range(config.num_hidden_layers)}
    given = set(numbers) if isinstance(numbers, Mapping) else set()
    if not {str(layer) for layer in wanted} <= given <= known:
        raise StartupError(
            f"{flag}: rank {rank} has scales of layers {_listed(given)}, and the model keeps keys and values in "
            f"{_listed(map(str, wanted))}"
        )
    scales = [KVScale()] * config.num_hidden_layers
    for layer in wanted:
        number = _scale(f"{flag}: layer {layer} of rank {rank}", numbers[str(layer)])
        scales[layer] = KVScale(number, number)
    return tuple(scales)


def _listed(names: Iterable[str]) -> str:
    """List the first names, and say how many there are."""
    ordered: Sequence[str] = sorted(names, key=lambda name: (len(name), name))
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "") or "none"
