"""`--enable-deterministic-inference` on the device: products, attention and a whole engine, with the same bits in every
batch, and right ones.

A dry run interprets the same kernels (`tests/fixed_numerics.py`), and splits sequences after fewer positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.attention.base import AttentionBackend
from rollout.attention.registry import create_attention_backend
from rollout.core.specs.layer_specs import FullKV, LatentKV, WindowKV
from rollout.kernels.gpu.register import load_gpu_kernels
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.gpu.engines import CAPTURED_MAX, checkpoint
from tests.gpu.numbers import EPS, Numbers, close, exact, plain
from tests.invariance import Ask, Facts, Server, any_differs, assert_same
from tests.model_zoo import tiny_checkpoint

FIXED: dict[str, Any] = {"attention_backend": "fixed_splits", "enable_deterministic_inference": True}
LAYERS = {  # on a device, and in a dry run
    "grouped heads": (LayerCase(FullKV(2, 128), 16), LayerCase(FullKV(2, 24), 6, scale=0.2)),
    "window and sinks": (LayerCase(WindowKV(1, 64, 37), 8, True), LayerCase(WindowKV(1, 16, 37), 3, True)),
    "latents": (LayerCase(LatentKV(512, 64), 16, scale=0.07), LayerCase(LatentKV(40, 8), 6, scale=0.1)),
}
TINY: dict[str, Any] = {"hidden_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 1}
TINY |= {"experts": 4, "top_k": 2, "moe_intermediate_size": 16}


@pytest.fixture(autouse=True)
def _kernels(on_cuda: bool) -> Iterator[None]:
    if on_cuda:
        assert load_gpu_kernels().available, load_gpu_kernels().reason
        yield
        return
    with import_module("tests.fixed_numerics").fixed_numerics():  # it interprets triton where it is loaded
        yield


@pytest.mark.parametrize("wide", [False, True], ids=["narrow tiles", "wide tiles"])
def test_products_match_float64_and_do_not_depend_on_the_batch(
    wide: bool, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """A row has the bits that it has alone, in any place; the norm ahead of a product changes nothing."""
    fixed, rand = import_module("rollout.kernels.gpu.fixed_product"), Numbers(dtype, device)
    depth, rows = (2048, 16500 if wide else 1280) if on_cuda else (70, 90 if wide else 67)
    hidden, weight, bias = rand(70, depth), rand(rows, depth, scale=depth**-0.5), rand(rows)
    got = fixed.linear(hidden, weight, rows, bias)
    assert close(got, plain.linear(exact(hidden), exact(weight), rows, exact(bias)), dtype)
    for first, count in ((0, 1), (5, 1), (3, 17), (69, 1)):
        part = hidden[first : first + count].contiguous()
        assert torch.equal(fixed.linear(part, weight, rows, bias), got[first : first + count])
    norm, residual = rand(depth), rand(70, depth)
    normed = fixed.norm_linear(residual.clone(), hidden, norm, EPS, weight, rows)
    want = plain.norm_linear(exact(residual), exact(hidden), exact(norm), EPS, exact(weight), rows)
    assert close(normed, want, dtype)


def last_token(steps: AttentionSteps, backend: AttentionBackend, layout: Layout, row: int) -> torch.Tensor:
    backend.plan(steps.batch(layout))
    return steps.attend(backend, 0, layout)[row].cpu()


def ways(steps: AttentionSteps, length: int) -> list[torch.Tensor]:
    """Compute the last of `length` tokens of one request as a prompt's, behind a prefix, and decoding in three ways."""
    backend = create_attention_backend("fixed_splits", steps.pool)
    others = Layout(decodes=[(0, length + 20), (2, length), (3, 1)])
    return [
        last_token(steps, backend, Layout([(2, length - 3, 3)]), 2),
        last_token(steps, backend, Layout([(1, 0, 4), (2, 33, length - 33)]), 4 + length - 34),
        last_token(steps, backend, Layout(decodes=[(2, length)]), 0),
        last_token(steps, backend, others, 1),
        last_token(steps, backend.for_graph(3), others, 1),
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_attention_matches_float64_and_does_not_depend_on_the_batch(
    layer: str, dtype: torch.dtype, device: torch.device, on_cuda: bool
) -> None:
    """The sequences have three splits."""
    length, case = (2100, LAYERS[layer][0]) if on_cuda else (70, LAYERS[layer][1])
    steps = AttentionSteps([case], dtype, max_requests=4, max_context=length + 26, device=str(device))
    backend = create_attention_backend("fixed_splits", steps.pool)
    steps.check(backend, Layout([(0, 0, 9), (3, length - 20, 20)], [(1, 1), (2, length)]))
    first, *others = ways(steps, length)
    assert all(torch.equal(other, first) for other in others)


PROMPT = tuple((7 * i) % 300 for i in range(35))
ASKS = [
    Ask(PROMPT, {"max_new_tokens": 3, "temperature": 1.0}),
    Ask((5, 9), {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 5, "top_p": 0.9}),
    Ask(PROMPT[3:20], {"max_new_tokens": 3}),
]


def model(folder: Path, device: torch.device) -> Path:
    if device.type == "cuda":
        return checkpoint(folder, device)
    return tiny_checkpoint(folder, "moe", **TINY)


def server(folder: Path, device: torch.device, **settings: Any) -> Server:
    """Start an engine; it must state that it is batch invariant."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return Server(folder, dtype, device=str(device), cuda_graph_max_bs=CAPTURED_MAX, **FIXED | settings)


def alone(folder: Path, device: torch.device) -> list[Facts]:
    one = server(folder, device, disable_radix_cache=True, disable_cuda_graph=True)
    return one.alone(ASKS, every_token=False)


def test_an_engine_gives_a_token_the_same_bits_in_every_batch(tmp_path: Path, device: torch.device) -> None:
    """Requests alone in an engine without graphs, and together, in chunks, in an engine with graphs where it has some.

    A weight that is scaled by 1.01 shows.
    """
    folder = model(tmp_path / "model", device)
    want = alone(folder, device)
    both = server(folder, device, chunked_prefill_size=9)
    assert device.type == "cpu" or both.harness.scheduler.runner.graphs is not None, "fixed splits are captured"
    assert_same(both.together(ASKS, [1], every_token=False), want)
    wrong = server(folder, device, chunked_prefill_size=9)
    wrong.harness.scheduler.runner.state.model.model.layers[0].input_layernorm.weight.mul_(1.01)
    assert any_differs(wrong.together(ASKS[1:2], every_token=False), want[1:2])
