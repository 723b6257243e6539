"""The models that engine numerics take, and the reasons to refuse the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rollout.core.errors import BadRequest, LockstepError, UnsupportedFeature
from rollout.core.specs.model_config import ModelConfig
from rollout.families.registry import FAMILIES, model_config_from_dict
from rollout.kernels.build import KernelStatus, load_kernels
from rollout.kernels.gpu.register import load_gpu_kernels
from rollout.numerics.adapters import active_adapter, adapts_experts, base_tensors, greatest_rank
from rollout.numerics.engine import TrainedEngine
from weight_sync.errors import WeightSyncError

DTYPES = (torch.bfloat16, torch.float32)
_HARMLESS = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def kernels_for(device: torch.device) -> KernelStatus:
    """Load the kernels of a device, and return whether they are there."""
    if device.type == "cuda":
        return load_gpu_kernels()
    if device.type == "cpu":
        return load_kernels()
    return KernelStatus(available=False, reason=f"no operators for device {device.type}")


def trained_tensors(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, each once.

    Raises `UnsupportedFeature` for one that is sharded, neither bfloat16 nor float32, or on another device.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, DTensor):
            raise UnsupportedFeature(f"sharded parameters are not supported under engine numerics: {name}")
        if tensor.is_floating_point() and tensor.dtype not in DTYPES:
            raise UnsupportedFeature(f"parameters must be bfloat16 or float32: {name} is {tensor.dtype}")
        if tensor.device != device or tensor.is_meta:
            raise UnsupportedFeature(f"all parameters must be on one device: {name} is on {tensor.device}")
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def checked_engine(model: nn.Module, dtype: torch.dtype, device: torch.device, allow_inexact: bool) -> TrainedEngine:
    """Return the engine for a trainer's model.  Raises `UnsupportedFeature` with the first reason to refuse it."""
    if dtype not in DTYPES:
        raise UnsupportedFeature(f"engine numerics support bfloat16 and float32, got {dtype}")
    config = _config_of(model)
    _refuse_modules(model)
    tensors, adapter = base_tensors(model, trained_tensors(model, device)), active_adapter(model)
    kernels = kernels_for(device)
    try:
        engine = TrainedEngine(
            config,
            tensors,
            dtype,
            device,
            kernels.available,
            _padding_id(model),
            greatest_rank(model),
            adapts_experts(model),
        )
        engine.load(tensors, adapter)
    except (WeightSyncError, LockstepError) as error:
        raise UnsupportedFeature(f"{type(model).__name__} is not a model that the engine can serve: {error}") from None
    if not engine.batch_invariant and not allow_inexact:
        reason = kernels.reason or f"no compiled operators for {dtype} on {device.type}, or for its heads"
        raise UnsupportedFeature(
            f"the engine's operators are plain torch here, whose bits depend on the batch ({reason}); "
            "allow_inexact=True takes them all the same"
        )
    return engine


def check_call(model: nn.Module, input_ids: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    """Raise `BadRequest` or `UnsupportedFeature` for arguments of a forward that engine numerics do not support."""
    if input_ids is None:
        raise BadRequest("engine numerics need input_ids")
    for name, value in others.items():
        if value is not None and not (name in _HARMLESS and value is False):
            raise UnsupportedFeature(f"{name} is not supported under engine numerics")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UnsupportedFeature("gradient checkpointing is not supported under engine numerics")


def _config_of(model: nn.Module) -> ModelConfig:
    architecture = type(model).__name__
    if architecture not in FAMILIES:
        raise UnsupportedFeature(f"{architecture} is not supported; the engine serves {', '.join(FAMILIES)}")
    config: Any = model.config
    try:
        return model_config_from_dict(_without_dtype({**config.to_dict(), "architectures": [architecture]}))
    except LockstepError as error:
        raise UnsupportedFeature(str(error)) from None


def _without_dtype(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without dtypes: the parameters have their own, and the model's and a part's may differ."""
    return {
        name: _without_dtype(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in ("dtype", "torch_dtype")
    }


def _padding_id(model: Any) -> int | None:
    return getattr(model.get_input_embeddings(), "padding_idx", None)


def _refuse_modules(model: Any) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedFeature("quantised modules are not supported under engine numerics")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedFeature(f"dropout is not supported under engine numerics: {name} has {module.p}")
    for name, value in model.config.get_text_config().to_dict().items():
        if name.endswith("dropout") and isinstance(value, int | float) and value > 0:
            raise UnsupportedFeature(f"dropout is not supported under engine numerics: {name} is {value}")
