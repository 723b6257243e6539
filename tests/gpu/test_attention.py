"""Attention backends on the device against float64: decode, prefill, chunks, mixed steps; windows, sinks, latents.

In bfloat16 a relative error of 1e-2 is allowed (8 bits of the mantissa, in keys, values and shares), in float32 1e-5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.attention.base import AttentionBackend
from rollout.attention.flashinfer import FlashInferBackend
from rollout.attention.registry import create_attention_backend
from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import FullKV, LatentKV
from tests.flashinfer_stand_in import stand_in
from tests.gpu.needs import need_cuda, need_module, not_run
from tests.gpu.paged_cases import Lengths, PagedCase, attended, relative_error

FLASHINFER_HOW = "docs/gpu_offline.md says how to install it"
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
STEPS = {
    "decode": Lengths(decodes=(1, 2, 17, 64, 65, 200, 129, 31)),
    "prefill": Lengths(extends=((0, 1), (0, 33), (0, 130))),
    "chunk": Lengths(extends=((64, 16), (5, 40), (200, 1))),
    "mixed": Lengths(extends=((0, 20), (96, 32)), decodes=(7, 150, 64)),
}
GROUPED = FullKV(num_heads=2, head_dim=128)
LATENT = LatentKV(rank=512, rope=64)


@pytest.fixture(params=["flashinfer", "torch_native"])
def name(request: pytest.FixtureRequest, on_cuda: bool) -> str:
    """Return the backend's name; in a dry run the package is its stand-in."""
    if request.param == "flashinfer" and on_cuda:
        need_module("flashinfer", FLASHINFER_HOW)
    return request.param


def backend_for(name: str, case: PagedCase) -> AttentionBackend:
    if name == "flashinfer" and case.device.type == "cpu":
        library = stand_in((torch.bfloat16,))
        return FlashInferBackend(case.pool, library, library.Event)
    return create_attention_backend(name, case.pool, kernels_available=False)


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "flashinfer" else torch.float32


@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("kind", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_attention_is_that_of_float64(
    kind: FullKV | LatentKV, step: str, name: str, device: torch.device, facts: dict[str, Any]
) -> None:
    case, lengths = PagedCase(kind, dtype_of(name), device), STEPS[step]
    case.hide_the_rest(lengths)
    q, scale = case.queries(lengths, 16), (128 + 64) ** -0.5 if kind is LATENT else None
    backend = backend_for(name, case)
    error = relative_error(attended(backend, case, lengths, q, scale=scale), case.wanted(q, lengths, scale))
    facts["error"], facts["prompts"] = error, backend.prompts
    assert error < TOLERANCE[case.dtype]


@pytest.mark.parametrize("sinks", [False, True], ids=["window", "window and sinks"])
@pytest.mark.parametrize("step", ["decode", "chunk"])
def test_windows_and_sinks_match_float64(step: str, sinks: bool, name: str, device: torch.device) -> None:
    kind = FullKV(num_heads=2, head_dim=128)
    case, lengths = PagedCase(kind, dtype_of(name), device), STEPS[step]
    try:
        backend = backend_for(name, case)
    except StartupError as error:
        not_run(str(error))
    q = case.queries(lengths, 8)
    one_a_head = torch.linspace(-1, 2, 8, device=device, dtype=case.dtype) if sinks else None
    got = attended(backend, case, lengths, q, window=20, sinks=one_a_head)
    assert relative_error(got, case.wanted(q, lengths, window=20, sinks=one_a_head)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("kind", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_a_captured_decode_follows_its_plan(kind: FullKV | LatentKV, name: str, device: torch.device) -> None:
    """Capture at some lengths; plan others, replay: what an eager step of these lengths gives, bit for bit."""
    need_cuda(device, "CUDA graphs")
    case = PagedCase(kind, dtype_of(name), device)
    backend = backend_for(name, case).for_graph(4)
    if backend is None:
        not_run(f"{name} says that it cannot be captured")
    first, second = Lengths(decodes=(3, 9, 17, 40)), Lengths(decodes=(130, 65, 300, 1))
    q, scale = case.queries(first, 16), (128 + 64) ** -0.5 if kind is LATENT else None
    batches = [case.batch(first), case.batch(second)]
    backend.plan(batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.attend(0, q, scale=scale)  # compiles and loads what the capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(0, q, scale=scale)
    for lengths, batch in zip((first, second, first), (*batches, batches[0]), strict=True):
        case.hide_the_rest(lengths)
        backend.plan(batch)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, case.wanted(q, lengths, scale)) < TOLERANCE[case.dtype]


def test_many_plans_in_a_row_do_not_meet(name: str, device: torch.device) -> None:
    """A plan reuses a buffer on the host while the device may still copy the plan before from it; nothing waits."""
    case = PagedCase(GROUPED, dtype_of(name), device)
    backend = backend_for(name, case)
    steps = [Lengths(decodes=(n, 300 - n, 7)) for n in range(1, 290, 17)]
    queries = [case.queries(lengths, 16, seed) for seed, lengths in enumerate(steps)]
    batches = [case.batch(lengths) for lengths in steps]
    found = []
    for batch, q in zip(batches, queries, strict=True):
        backend.plan(batch)
        found.append(backend.attend(0, q))
    for got, lengths, q in zip(found, steps, queries, strict=True):
        assert relative_error(got, case.wanted(q, lengths)) < TOLERANCE[case.dtype]


def test_a_wrong_slot_shows(device: torch.device) -> None:
    """One entry of the table points to a slot that holds nothing of these sequences."""
    case, lengths = PagedCase(GROUPED, torch.float32, device), STEPS["decode"]
    case.hide_the_rest(lengths)
    q = case.queries(lengths, 16)
    want = case.wanted(q, lengths)
    case.table[3, 10] = case.table[20, 0]
    assert relative_error(attended(backend_for("torch_native", case), case, lengths, q), want) == float("inf")
