"""`lora_of`: the LoRA adapter of a PEFT model as an update sends it: tensors by PEFT's names, and a configuration.

Needs no PEFT: a model that PEFT made has `peft_config`, and its adapters' tensors among its parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch.distributed.tensor import DTensor

from weight_sync.errors import WeightRequestError, shown
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender.plan import TensorSource, sent_name
from weight_sync.sender.ranks import TrainerRanks
from weight_sync.tensor_meta import dtype_name

RANKS_WAIT_S = 120.0
"""Seconds that the sending rank of a trainer waits for another one in `packed_lora`; the others wait longer for it."""
_OF_PEFT = re.compile(r"\.(?:lora_\w+|modules_to_save)\.|\.lora_\w+$")
"""Tensors that PEFT adds to a model."""


class Lora(NamedTuple):
    """`tensors`: as PEFT saves them, without the adapter's name, whole or sharded.  `config`: of JSON's types."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    def target(self, name: str) -> dict[str, Any]:
        """Return the `target` of `begin_weight_update` for the version of adapter `name` that these tensors are."""
        return {"adapter": name, "config": self.config}


def lora_of(model: torch.nn.Module, adapter: str = "default", sent_as: str | None = None) -> Lora:
    """Return the adapter that PEFT calls `adapter` in `model`; tensors are the model's own.

    `sent_as`: the adapter's name that names of tensors hold; None: none.
    All tensors of the adapter are among them, also of kinds that no engine serves, which engines refuse by name.
    Raises `WeightRequestError` for a model without that adapter, and for settings that JSON cannot hold.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or adapter not in configs:
        known = ", ".join(configs) if isinstance(configs, dict) else "none"
        raise WeightRequestError(f"the model has no adapter {shown(adapter)} of PEFT; it has {known}")
    own = re.compile(rf"(?P<stem>.*\.lora_\w+)\.{re.escape(adapter)}(?P<end>\..*)?")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if (match := own.fullmatch(sent_name(name))) is not None:
            tensors[match["stem"] + ("" if sent_as is None else f".{sent_as}") + (match["end"] or "")] = tensor
    if not tensors:
        raise WeightRequestError(f"the adapter {shown(adapter)} has no tensors with names of LoRA")
    try:
        config = json.loads(json.dumps(configs[adapter].to_dict(), default=_listed))
    except TypeError as error:
        raise WeightRequestError(f"the configuration of the adapter {shown(adapter)}: {error}") from None
    return Lora(tensors, config)


def _listed(value: Any) -> list[Any]:
    """Return a set as a list, as PEFT saves it.  Raises `TypeError`."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not of JSON's types")


def ranks_of(model: torch.nn.Module, timeout_s: float = RANKS_WAIT_S) -> TrainerRanks | None:
    """Return the ranks of the default group if the model is sharded, which must be over all of them; None if not."""
    sharded = next((tensor for tensor in model.parameters() if isinstance(tensor, DTensor)), None)
    return None if sharded is None else TrainerRanks(None, sharded.to_local().device, timeout_s)


def with_adapters(
    source: TensorSource, adapters: Mapping[str, torch.nn.Module]
) -> tuple[TensorSource, list[dict[str, Any]]]:
    """Return a model's tensors together with adapters' tensors, and the `adapters` of `begin_weight_update`.

    `adapters`: by the engines' names, the models of PEFT that have them, under the same name or as the only adapter.
    Of a `source` that is a model of PEFT, the model without its adapters is sent.  Raises as `lora_of`.
    """
    several = len(adapters) > 1
    loras = {name: lora_of(it, _name_in(it, name), name if several else None) for name, it in adapters.items()}
    tensors = {name: tensor for lora in loras.values() for name, tensor in lora.tensors.items()}
    if isinstance(source, torch.nn.Module):
        source = base_of(source) if hasattr(source, "peft_config") else source.state_dict()
    joined: TensorSource = {**source, **tensors} if isinstance(source, Mapping) else [*source, *tensors.items()]
    return joined, [lora.target(name) for name, lora in loras.items()]


def with_adapters_or_error(
    source: TensorSource, adapters: Mapping[str, torch.nn.Module]
) -> tuple[TensorSource, list[dict[str, Any]], Exception | None]:
    """Return what `with_adapters` returns and None, or all tensors that were given, and the error.

    The tensors show which ranks the trainer has: they wait for this one, and are to learn of its error.
    """
    try:
        return *with_adapters(source, adapters), None
    except Exception as error:
        models = [model for model in (source, *adapters.values()) if isinstance(model, torch.nn.Module)]
        given = source.items() if isinstance(source, Mapping) else () if isinstance(source, torch.nn.Module) else source
        return [*given, *(named for model in models for named in model.named_parameters())], [], error


def base_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the model that PEFT has put adapters around, by that model's names."""
    found = {}
    for name, tensor in model.state_dict().items():
        if not _OF_PEFT.search(name):
            name = sent_name(name).removeprefix("base_model.model.").replace(".original_module.", ".")
            found[name.replace(".base_layer.", ".")] = tensor
    return found


def _name_in(model: torch.nn.Module, name: str) -> str:
    """Return PEFT's name of the adapter that engines call `name`."""
    names = list(getattr(model, "peft_config", None) or ())
    return names[0] if len(names) == 1 else name


class PackedLora(NamedTuple):
    """An adapter for the body of a request: `target` and `manifest` of begin, and its tensors as a safetensors file."""

    target: dict[str, Any]
    manifest: list[dict[str, Any]]
    payload: bytes


def packed_lora(
    model: torch.nn.Module, name: str, adapter: str = "default", ranks: TrainerRanks | None = None
) -> PackedLora | None:
    """Return the adapter that PEFT calls `adapter` in `model`, for the next version of the engines' adapter `name`.

    `ranks`: those over which it is sharded, which all make this call and gather together.  Only the sending rank gets
    the adapter, and the others None.  Raises as `lora_of`; if one rank raises, or has another adapter, all ranks do:
    `WeightRequestError`, `TransportError`.
    """
    if ranks is None:
        return _packed(lora_of(model, adapter), name)
    lora = ranks.jointly(lambda: lora_of(model, adapter))
    first = ranks.from_sender(_stated(lora))
    ranks.jointly(lambda: _require_equal(_stated(lora), first))
    whole = {of: gathered for of, tensor in lora.tensors.items() if (gathered := _gathered(tensor, ranks)) is not None}
    return _packed(Lora(whole, lora.config), name) if ranks.is_sender else None


def _stated(lora: Lora) -> bytes:
    """Return what all ranks must have in common."""
    tensors = [
        [name, dtype_name(tensor.dtype), list(tensor.shape), repr(getattr(tensor, "placements", "whole"))]
        for name, tensor in lora.tensors.items()
    ]
    return json.dumps([lora.config, tensors], sort_keys=True).encode()


def _require_equal(mine: bytes, first: bytes) -> None:
    if mine != first:
        raise WeightRequestError("trainer ranks have different adapters: names, shapes, placements or settings differ")


def _gathered(tensor: torch.Tensor, ranks: TrainerRanks) -> torch.Tensor | None:
    """Return the whole tensor on the sending rank; all ranks make the call."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full if ranks.is_sender else None


def _packed(lora: Lora, name: str) -> PackedLora:
    # Memory of its own for each tensor, as a file has no two tensors in one.
    whole = {of: tensor.detach().to("cpu", copy=True).contiguous() for of, tensor in lora.tensors.items()}
    manifest = [
        {
            "name": tensor_name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "fingerprint": fingerprint_hex(fingerprint(tensor)),
        }
        for tensor_name, tensor in whole.items()
    ]
    return PackedLora(lora.target(name), manifest, save(whole))
