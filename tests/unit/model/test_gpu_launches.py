"""The launches of an MoE layer on a GPU, counted: interpreted kernels, and calls of torch's operators but views."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.interpreted import interpreted_ops  # before any kernel

# isort: split
from triton.runtime import interpreter

from capture.capturer import RoutedExpertsCapturer
from rollout.kernels.gpu import fused_experts
from rollout.kernels.ops import Ops, plain_ops
from rollout.layers.lora import SlotSizes
from rollout.layers.moe import layer
from rollout.layers.moe.experts import Experts
from rollout.layers.moe.layer import MoELayer
from tests.family_zoo import family_checkpoint
from tests.forward_harness import ForwardHarness
from tests.model_zoo import load_tiny

SIZES = SlotSizes(slots=3, rank=4)
NO_LAUNCH = {"empty", "new_empty", "select", "slice", "unbind", "view", "alias", "expand", "unsqueeze", "detach"}


class Launches(TorchDispatchMode):
    """Notes the names of launches.  A kernel counts once; the calls of its interpreter do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not self.inside and name not in NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def of_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Return the launches of each call of an MoE layer."""
    found: list[list[str]] = []
    launches = Launches()
    run, compute = interpreter.GridExecutor.__call__, MoELayer.__call__

    def kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.names.append(self.fn.__name__)
        launches.inside = True
        run(self, *args, **kwargs)
        launches.inside = False

    def counted(self: MoELayer, *args: Any) -> Any:
        launches.names = []
        with launches:
            out = compute(self, *args)
        found.append(launches.names)
        launches.names = []
        return out

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", kernel)
    monkeypatch.setattr(MoELayer, "__call__", counted)
    yield found


ROUTER = ["add_rms_norm_kernel", "route_kernel"]
EXPERTS = ["gate_up_kernel", "down_kernel"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("form", ["few", "planned", "many"])
def test_launches_of_a_layer(
    form: str, captured: bool, of_layers: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step copies the routes of all layers at its end; few assignments have no plan; few tokens no sum."""
    if form != "few":
        monkeypatch.setattr(fused_experts, "few_assignments", lambda _: 0)
    if form == "many":
        monkeypatch.setattr(layer, "_MAX_DEFERRED", 1)
    model = load_tiny(family_checkpoint(tmp_path / "model", "qwen3_moe", 3), torch.float32, ops=interpreted_ops())
    config, layers = model.config, len(model.moe_layer_ids)
    capturer = RoutedExpertsCapturer(layers, config.num_experts_per_tok, config.num_experts)
    if captured:
        capturer.begin_step_in(torch.empty((2, layers, capturer.top_k), dtype=capturer.dtype))
    else:
        capturer.begin_step(2)
    harness = ForwardHarness(model, max_requests=1, max_context=8)
    context = harness.context
    monkeypatch.setattr(harness, "context", lambda batch, hooks: context(batch, [capturer.record]))
    harness.step({0: [5, 17]})
    assert capturer.finish_step().shape == (2, layers, capturer.top_k)
    routes, plan = [] if captured else ["copy_"], ["plan_kernel"] if form != "few" else []
    own_sum = ["weighted_sum_kernel"] if form == "many" else []
    assert of_layers == [[*ROUTER, *routes, *plan, *EXPERTS, *own_sum]] * layers


def adapted_harness(folder: Path, ops: Ops) -> ForwardHarness:
    """Return a model whose experts have random adapters, in steps whose tokens have the slots 1, none, 0, 1, none."""
    model = load_tiny(folder, torch.float32, ops=ops)
    generator = torch.Generator().manual_seed(4)
    for experts in (found for _, found in model.named_layers() if isinstance(found, Experts)):
        lora = experts.reserve_lora(SIZES)
        for tensor in lora.tensors[:4]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
        lora.ranks.copy_(torch.randint(0, 5, lora.ranks.shape, generator=generator))
    harness = ForwardHarness(model, max_requests=1, max_context=8)
    context = harness.context

    def with_adapters(batch: Any, hooks: Any) -> Any:
        batch.adapters = torch.tensor([1, -1, 0, 1, -1])
        return context(batch, hooks)

    harness.context = with_adapters  # type: ignore[method-assign]
    return harness


@pytest.mark.parametrize("form", ["few", "planned", "many"])
def test_adapters_of_experts_take_four_launches_more(
    form: str, of_layers: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_checkpoint(tmp_path / "model", "qwen3_moe", 3)
    wanted = adapted_harness(folder, plain_ops()).step({0: [5, 17, 3, 8, 4]})[0].log_probs
    of_layers.clear()
    if form != "few":
        monkeypatch.setattr(fused_experts, "few_assignments", lambda _: 0)
    if form == "many":
        monkeypatch.setattr(layer, "_MAX_DEFERRED", 1)
    harness = adapted_harness(folder, interpreted_ops())
    torch.testing.assert_close(harness.step({0: [5, 17, 3, 8, 4]})[0].log_probs, wanted, atol=1e-5, rtol=0)
    plan = ["plan_kernel"] if form != "few" else []
    own_sum = ["weighted_sum_kernel"] if form == "many" else []
    product = ["experts_shrink_kernel", "experts_expand_kernel"]
    experts = [*plan, *product, *EXPERTS, *product, *own_sum]
    assert [[name for name in names if name.endswith("_kernel")] for names in of_layers] == [
        [*ROUTER, *experts] for _ in of_layers
    ]
