"""Adapters as the target of weight updates: contents that PEFT wrote, and how each transport brings them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict
from safetensors.torch import load_file, save

from rollout.adapters.peft_folder import read_adapter
from rollout.core.messages.update_state import AdapterOfUpdate, TargetOfUpdate
from rollout.core.messages.weights import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ManifestEntry,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.adapters import ATTENTION, save_adapter, write_adapter
from tests.announcements import manifest_of
from tests.faults import transports
from tests.faults.harness import RefreshHarness
from tests.faults.transports import Call, Named, Verb

Target = AdapterOfUpdate | TargetOfUpdate
FAMILY, SEED, RANK = "qwen3", 3, 4
IDS = [5, 9, 200, 31, 7, 8, 77, 140]


@dataclass(frozen=True)
class Content:
    """One content of an adapter: the folder that PEFT wrote, and what is in it."""

    folder: Path

    @property
    def named(self) -> Named:
        return list(load_file(self.folder / "adapter_model.safetensors").items())

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "adapter_config.json").read_text())

    @property
    def digest(self) -> str:
        return read_adapter(self.folder).digest

    def target(self, name: str = "poet", **changes: Any) -> AdapterOfUpdate:
        return AdapterOfUpdate(adapter=name, config=self.config | changes)


def make_content(folder: Path, seed: int, **settings: Any) -> Content:
    defaults = {"target_modules": list(ATTENTION), "r": RANK, "lora_alpha": 8}
    return Content(save_adapter(folder, FAMILY, SEED, seed, **defaults | settings))


def random_content(folder: Path, weights: Mapping[str, torch.Tensor], seed: int, scale: float = 2.0) -> Content:
    """Write a random adapter of rank 2 on the attention of all layers of a model with these weights."""
    generator, matrices = torch.Generator().manual_seed(seed), {}
    for name, weight in sorted(weights.items()):
        if any(name.endswith(f".{module}.weight") for module in ATTENTION):
            out, into = weight.shape
            a_RD, b_OR = (0.3 * torch.randn(shape, generator=generator) for shape in ((2, into), (out, 2)))
            matrices[name.removesuffix(".weight")] = (a_RD, b_OR)
    content = Content(write_adapter(folder, matrices, scale))
    config = content.config | {"target_modules": list(ATTENTION)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return content


def begin(engine: Any, target: Target | None, named: Named | None = None, **fields: Any) -> Any:
    """Begin an update, of the model if `target` is None, with a manifest of `named`, if it is given.

    Its id is one more than that of the engine's update before: `update_id(engine)`.
    """
    engine.update_count = getattr(engine, "update_count", 0) + 1
    if named is not None:
        fields["manifest"] = [ManifestEntry(**entry) for entry in manifest_of(named)]
    stated = target if target is None or isinstance(target, TargetOfUpdate) else TargetOfUpdate(**asdict(target))
    return engine.control(BeginWeightUpdateReqInput, update_id=update_id(engine), target=stated, **fields)


def update_id(engine: Any) -> str:
    return f"u{engine.update_count}"


def bring(engine: Any, named: Named) -> Any:
    fields = {"payload": bytearray(save(dict(named))), "format": "safetensors"}
    return engine.control(UpdateWeightsFromTensorReqInput, update_id=update_id(engine), **fields)


def end(engine: Any, **fields: Any) -> Any:
    return engine.control(EndWeightUpdateReqInput, update_id=update_id(engine), **fields)


def abort(engine: Any) -> Any:
    return engine.control(AbortWeightUpdateReqInput, update_id=update_id(engine))


def refresh(engine: Any, content: Content, name: str = "poet", *, with_manifest: bool = True) -> Any:
    """Send a content in two buckets, as an update of its own; return the last answer."""
    begun = begin(engine, content.target(name), content.named if with_manifest else None)
    middle = len(content.named) // 2
    for part in (content.named[:middle], content.named[middle:]):
        if not begun.success:
            return begun
        begun = bring(engine, part)
    return end(engine) if begun.success else begun


def started(checkpoint: Path, scratch: Path, paths: str, **settings: Any) -> RefreshHarness:
    """Return an engine that serves the adapters in `paths`."""
    defaults = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": 4, "staging": "host"}
    defaults |= {"enable_return_routed_experts": False, "skip_tokenizer_init": True, "max_lora_rank": 8}
    return RefreshHarness(checkpoint, scratch=scratch, **defaults | settings)


def answer(harness: RefreshHarness, name: str | None) -> tuple[list[int], list[float]]:
    """Return the ids and log-probabilities of a short answer by adapter `name`; None: the model alone."""
    (result,) = harness.generate([IDS], {"max_new_tokens": 4}, lora_name=name)
    assert result.finished is not None and result.finished.reason.status_code is None, result.finished
    return result.token_ids, result.logprobs


# --- transports -------------------------------------------------------------------------------------------------------


def of_calls(send: transports.Send) -> Callable[[RefreshHarness, Content], Sequence[Verb]]:
    """Return the function that brings a content in two calls of a transport."""

    def verbs(engine: RefreshHarness, content: Content) -> list[Verb]:
        named, calls = content.named, []
        middle = len(named) // 2
        for part in (named[:middle], named[middle:]):
            verb = send(engine, Call(engine.number(), part))
            assert verb is not None
            calls.append(verb)
        return calls

    return verbs


def folder(engine: RefreshHarness, content: Content) -> Sequence[Verb]:
    copy = engine.scratch / f"call{engine.number()}"
    shutil.copytree(content.folder, copy)
    return [(UpdateWeightsFromDiskReqInput, {"model_path": str(copy)})]


def with_value(named: Named, name: str, value: float) -> Named:
    """Return the tensors with one element changed."""
    changed = {each: tensor.clone() for each, tensor in named}
    changed[name].view(-1)[1] = torch.tensor(value)
    return list(changed.items())


TRANSPORTS = {name: of_calls(send) for name, send in transports.SENDS.items() if name not in ("delta", "disk")}
TRANSPORTS |= {"tensor inline": of_calls(transports.tensor_inline), "folder": folder}
