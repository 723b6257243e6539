"""Three more forms of attention on the device against float64: keys in FP8, FlashAttention 3's own module for prompts,
and prompts of latents in expanded form.

They have a step of their own: FlashInfer compiles a module at its first use, for a minute or more.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rollout.attention import flashinfer_expanded
from rollout.attention.base import AttentionBackend, LatentForm
from rollout.attention.flash_attention_3 import MODULE
from rollout.attention.flashinfer import FlashInferBackend
from rollout.attention.registry import create_attention_backend
from rollout.memory.kv_pool import KVScale
from tests.attention_steps import Layout
from tests.flash_attention_3_stand_in import FlashAttention3
from tests.flashinfer_stand_in import stand_in
from tests.gpu.needs import need_module, not_run
from tests.gpu.paged_cases import Lengths, PagedCase, attended, relative_error
from tests.gpu.test_attention import FLASHINFER_HOW, GROUPED, STEPS, TOLERANCE, backend_for, dtype_of
from tests.unit.attention.test_flashinfer_expanded import FORM, MIXED, Step

FA3_HOW = "docs/gpu_offline.md#flashattention-3 says how to install it"
HOPPER = 9
WINDOW = 20
DEEPSEEK = LatentForm(num_heads=16, nope=128, rotary=64, value=128, rank=512, scale=192**-0.5)


@pytest.fixture(params=["flashinfer", "torch_native"])
def name(request: pytest.FixtureRequest, on_cuda: bool) -> str:
    if request.param == "flashinfer" and on_cuda:
        need_module("flashinfer", FLASHINFER_HOW)
    return request.param


@pytest.mark.parametrize("scale", [KVScale(), KVScale(0.31, 1.7)], ids=["plain", "scaled"])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_keys_and_values_in_fp8_match_float64(
    step: str, scale: KVScale, name: str, device: torch.device, facts: dict[str, Any]
) -> None:
    """The numbers in the pool are exact: an error is one of reading them, or of the scales."""
    case = PagedCase(GROUPED, dtype_of(name), device, stored=torch.float8_e4m3fn, scale=scale)
    lengths = STEPS[step]
    case.hide_the_rest(lengths)
    q = case.queries(lengths, 16)
    facts["error"] = relative_error(attended(backend_for(name, case), case, lengths, q), case.wanted(q, lengths))
    assert facts["error"] < TOLERANCE[case.dtype]


def own_module(case: PagedCase, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """Return the backend with FlashAttention 3's own module; in a dry run over stand-ins of both packages."""
    if case.device.type == "cuda":
        need_module("flashinfer", FLASHINFER_HOW)
        need_module(MODULE, FA3_HOW)
        if (major := torch.cuda.get_device_capability(case.device)[0]) != HOPPER:
            not_run(f"FlashAttention 3 has kernels for compute capability 9, this device has {major}")
        return create_attention_backend("flashinfer", case.pool)
    library = stand_in((torch.bfloat16,))
    library.utils.is_hopper = True
    monkeypatch.setitem(sys.modules, MODULE, FlashAttention3().module())
    backend = FlashInferBackend(case.pool, library, library.Event)
    backend.settle(lambda mine: mine)
    return backend


@pytest.mark.parametrize("form", ["plain", "window", "window and sinks"])
@pytest.mark.parametrize("step", ["prefill", "chunk", "mixed"])
def test_prompts_by_flash_attention_3_match_float64(
    step: str, form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    """Require the module to be taken if it is installed.  The message has the reason for a refusal."""
    case, lengths = PagedCase(GROUPED, torch.bfloat16, device), STEPS[step]
    backend = own_module(case, monkeypatch)
    facts["prompts"] = backend.prompts
    assert backend.prompts == f"FlashAttention 3, {MODULE}"
    case.hide_the_rest(lengths)
    q, window = case.queries(lengths, 8), None if form == "plain" else WINDOW
    sinks = torch.linspace(-1, 2, 8, device=device, dtype=case.dtype) if form == "window and sinks" else None
    got = attended(backend, case, lengths, q, window=window, sinks=sinks)
    facts["error"] = relative_error(got, case.wanted(q, lengths, window=window, sinks=sinks))
    assert facts["error"] < TOLERANCE[case.dtype]


@pytest.mark.parametrize("most", [8192, 32], ids=["one round", "rounds of 32"])
def test_prompts_in_expanded_form_match_float64(
    most: int, device: torch.device, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are expanded, prefixes joined in one round and in several, next to tokens that decode."""
    if on_cuda:
        need_module("flashinfer", FLASHINFER_HOW)
    monkeypatch.setattr(flashinfer_expanded, "saves_products", lambda *_: True)
    monkeypatch.setattr(flashinfer_expanded, "_ROUND", most)
    step = Step(DEEPSEEK if on_cuda else FORM, str(device))
    for layout in (MIXED, Layout([(0, 0, 20)]), MIXED):
        step.check(layout)


def test_scales_that_are_left_out_would_be_seen(name: str, device: torch.device) -> None:
    case, lengths = PagedCase(GROUPED, dtype_of(name), device, 32, torch.float8_e4m3fn), Lengths(decodes=(17, 64))
    case.hide_the_rest(lengths)
    q = case.queries(lengths, 16)
    case.scale = KVScale(1.1, 1.1)
    assert relative_error(attended(backend_for(name, case), case, lengths, q), case.wanted(q, lengths)) > 0.05
