"""`lora_of`: the LoRA adapter of a PEFT model as an update sends it: tensors by PEFT's names, and a configuration.

Needs no PEFT: a model that PEFT made has `peft_config`, and its adapters' tensors among its parameters.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch.distributed.tensor import DTensor

from weight_sync.errors import WeightRequestError, shown
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender.plan import sent_name
from weight_sync.tensor_meta import dtype_name


class Lora(NamedTuple):
    """`tensors`: as PEFT saves them, without the adapter's name, whole or sharded.  `config`: of JSON's types."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    def target(self, name: str) -> dict[str, Any]:
        """Return the `target` of `begin_weight_update` for the version of adapter `name` that these tensors are."""
        return {"adapter": name, "config": self.config}


def lora_of(model: torch.nn.Module, adapter: str = "default") -> Lora:
    """Return the adapter that PEFT calls `adapter` in `model`; tensors are the model's own.

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
            tensors[match["stem"] + (match["end"] or "")] = tensor
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


class PackedLora(NamedTuple):
    """An adapter for the body of a request: `target` and `manifest` of begin, and its tensors as a safetensors file."""

    target: dict[str, Any]
    manifest: list[dict[str, Any]]
    payload: bytes


def packed_lora(model: torch.nn.Module, name: str, adapter: str = "default") -> PackedLora | None:
    """Return the adapter that PEFT calls `adapter` in `model`, for the next version of the engines' adapter `name`.

    Sharded tensors are gathered by all ranks together; only the first rank of the default group gets the adapter, and
    the others None.  Raises as `lora_of`.
    """
    lora = lora_of(model, adapter)
    is_sharded = any(isinstance(tensor, DTensor) for tensor in lora.tensors.values())
    is_first = not is_sharded or dist.get_rank() == 0
    whole: dict[str, torch.Tensor] = {}
    for tensor_name, tensor in lora.tensors.items():
        full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        if is_first:  # memory of its own, as a file has no two tensors in one
            whole[tensor_name] = full.to("cpu", copy=True).contiguous()
    if not is_first:
        return None
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
