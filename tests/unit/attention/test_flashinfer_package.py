"""The FlashInfer backend on the package's own wrappers, where it is installed; its kernels are the stand-in's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.attention.flashinfer import FlashInferBackend
from rollout.core.specs.layer_specs import FullKV, LatentKV, WindowKV
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.flashinfer_signatures import differences
from tests.flashinfer_without_kernels import without_kernels

pytestmark = pytest.mark.full

MODELS = {
    "heads": [
        LayerCase(FullKV(2, 64), 8),
        LayerCase(WindowKV(2, 64, 5), 8, has_sinks=True),
        LayerCase(FullKV(1, 128), 5, scale=0.3),
    ],
    "latents": [LayerCase(LatentKV(512, 64), 16, scale=0.1)],
    "20 latent heads": [LayerCase(LatentKV(128, 64), 20)],
}
LAYOUTS = [
    Layout([(0, 0, 9), (3, 17, 30)], [(5, 70), (4, 8)]),
    Layout([(0, 62, 9), (1, 0, 3)]),
    Layout(decodes=[(4, 30), (0, 96), (1, 1)]),
]


@pytest.fixture
def library() -> Iterator[Any]:
    pytest.importorskip("flashinfer", reason="the package flashinfer is not installed")
    with without_kernels() as library, warnings.catch_warnings():
        warnings.simplefilter("error")  # deprecated forms of a call
        yield library


def test_signatures_are_those_of_the_stand_in(library: Any) -> None:
    assert not differences(library)


def _backend(steps: AttentionSteps, library: Any) -> FlashInferBackend:
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    return FlashInferBackend(steps.pool, library, lambda: event)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_float64(model: str, dtype: torch.dtype, library: Any) -> None:
    steps = AttentionSteps(MODELS[model], dtype)
    backend = _backend(steps, library)
    for layout in (*LAYOUTS, LAYOUTS[0]):
        steps.check(backend, layout)


@pytest.mark.mutant
@pytest.mark.parametrize("model", ["heads", "latents"])
def test_plans_for_another_dtype_are_noticed(model: str, library: Any) -> None:
    steps = AttentionSteps(MODELS[model], torch.bfloat16)
    backend = _backend(steps, library)
    backend._shared.dtype = torch.float16
    with pytest.raises(ValueError, match=r"q_data_type|planned"):
        steps.check(backend, LAYOUTS[0])


@pytest.mark.parametrize("model", MODELS)
def test_steps_of_a_fixed_size(model: str, library: Any) -> None:
    """Planned again and again in the buffers of a captured step."""
    steps = AttentionSteps(MODELS[model], torch.bfloat16)
    backend = _backend(steps, library)
    steps.check(backend, LAYOUTS[0])
    captured = [backend.for_graph(size) for size in (4, 2)]
    for decodes in ([(0, 10), (3, 48), (5, 71), (4, 9)], [(2, 1), (2, 1), (5, 72), (4, 10)], [(5, 73), (2, 1)]):
        steps.check(captured[len(decodes) == 2], Layout(decodes=decodes))
        steps.check(backend, LAYOUTS[0])
