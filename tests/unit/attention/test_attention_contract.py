"""The contract of every attention backend: any mixture of extends and decodes, prefixes, grouped heads, windows,
latents, sinks and scales, against float64.  FlashInfer runs on its stand-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.attention.base import AttentionBackend
from rollout.attention.flashinfer import FlashInferBackend
from rollout.attention.native_cpu import NativeCpuBackend
from rollout.attention.torch_native import TorchNativeBackend
from rollout.core.specs.layer_specs import FullKV, LatentKV, WindowKV
from rollout.memory.kv_pool import KVPool, KVScale
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.flashinfer_stand_in import stand_in
from tests.kernels import native_ops
from tests.tiers import examples

MODELS = {
    "grouped heads": [LayerCase(FullKV(2, 64), 8)],
    "one group, scaled": [LayerCase(FullKV(1, 128), 5, scale=0.2)],
    "windows and sinks": [
        LayerCase(FullKV(2, 64), 8, has_sinks=True),
        LayerCase(WindowKV(2, 64, 7), 8, has_sinks=True),
    ],
    "windows, other heads": [
        LayerCase(WindowKV(1, 64, 1), 4),
        LayerCase(FullKV(4, 64), 4),
        LayerCase(FullKV(2, 64), 4),
    ],
    "latents": [LayerCase(LatentKV(128, 64), 16, scale=0.1)],
}
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.bfloat16, torch.float16))]
LAYOUTS = {
    "mixed": Layout([(0, 0, 9), (3, 17, 30), (2, 5, 1)], [(1, 1), (5, 70), (4, 8)]),
    "decodes": Layout(decodes=[(3, 12), (0, 7), (4, 8), (1, 96)]),
    "extends": Layout([(4, 0, 40), (1, 50, 46)]),
}


def native_cpu(pool: KVPool) -> AttentionBackend:
    native_ops()
    return NativeCpuBackend(pool)


def flashinfer(pool: KVPool) -> AttentionBackend:
    library = stand_in((torch.float16, torch.bfloat16, torch.float32))
    return FlashInferBackend(pool, library, library.Event)


BACKENDS: dict[str, Callable[[KVPool], AttentionBackend]] = {
    "native_cpu": native_cpu,
    "flashinfer": flashinfer,
    "torch_native": TorchNativeBackend,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_backend_agrees_with_float64(model: str, dtype: torch.dtype, backend: str) -> None:
    steps = AttentionSteps(MODELS[model], dtype)
    made = BACKENDS[backend](steps.pool)
    for layout in (*LAYOUTS.values(), LAYOUTS["mixed"]):
        steps.check(made, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keys_and_values_in_fp8(dtype: torch.dtype, backend: str) -> None:
    """Keys and values that were widened before would give the same results, times their scales if there are any."""
    for model in ("grouped heads", "one group, scaled", "windows and sinks"):
        for scales in (None, [KVScale(0.31, 1.7), KVScale(2.0, 0.013)]):
            layers = MODELS[model]
            steps = AttentionSteps(layers, dtype, stored=torch.float8_e4m3fn, scales=scales and scales[: len(layers)])
            assert steps.pool.k[0].dtype == torch.float8_e4m3fn
            made = BACKENDS[backend](steps.pool)
            for layout in LAYOUTS.values():
                steps.check(made, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("read", [KVScale(1.0, 1.7), KVScale(0.31, 1.0)], ids=["no scale of keys", "nor of values"])
def test_a_scale_that_is_left_out_is_noticed(read: KVScale, backend: str) -> None:
    steps = AttentionSteps(
        MODELS["grouped heads"], torch.float32, stored=torch.float8_e4m3fn, scales=[KVScale(0.31, 1.7)]
    )
    made = BACKENDS[backend](steps.pool)
    steps.check(made, LAYOUTS["mixed"])
    steps.pool.scales = (read,)
    with pytest.raises(AssertionError, match="layer 0"):
        steps.check(made, LAYOUTS["mixed"])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_every_backend_agrees_with_float64_in_any_layout(backend: str, data: st.DataObject) -> None:
    steps = AttentionSteps(MODELS[data.draw(st.sampled_from(sorted(MODELS)), "model")], torch.float32)
    made = BACKENDS[backend](steps.pool)
    for _ in range(data.draw(st.integers(1, 3), "steps")):
        steps.check(made, data.draw(layouts(steps.max_requests, steps.max_context), "layout"))


@st.composite
def layouts(draw: st.DrawFn, max_requests: int, max_context: int) -> Layout:
    requests = draw(st.lists(st.integers(0, max_requests - 1), min_size=1, max_size=max_requests, unique=True))
    num_extends = draw(st.integers(0, len(requests)))
    news = [draw(st.integers(1, 40)) for _ in requests[:num_extends]]
    extends = [(request, draw(st.integers(0, max_context - new)), new) for request, new in zip(requests, news)]
    return Layout(extends, [(request, draw(st.integers(1, max_context))) for request in requests[num_extends:]])


@pytest.mark.mutant
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_slot_is_noticed(backend: str) -> None:
    steps = AttentionSteps(MODELS["grouped heads"], torch.float32)
    made, layout = BACKENDS[backend](steps.pool), LAYOUTS["mixed"]
    batch = steps.batch(layout)
    batch.req_to_token = steps.req_to_token.clone()
    batch.req_to_token[5, 40:42] = steps.req_to_token[5, [41, 43]]
    made.plan(batch)
    with pytest.raises(AssertionError, match="layer 0"):
        steps.compare(steps.attend(made, 0, layout), 0, layout)
