"""Prompts by FlashAttention 3's own module, on its stand-in: arguments, results, refusals, and the vote of ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from rollout.attention import flash_attention_3
from rollout.attention.flash_attention_3 import MODULE, Fa3Heads
from rollout.attention.flashinfer import FlashInferBackend
from rollout.attention.flashinfer_kinds import GroupedHeads
from rollout.attention.registry import ATTENTION_BACKENDS
from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.specs.layer_specs import FullKV, KVKind, LatentKV, WindowKV
from rollout.memory.kv_pool import KVPool, slot_table_bytes
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.flash_attention_3_stand_in import FlashAttention3
from tests.flashinfer_stand_in import stand_in
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
WINDOW = 5
CASES = [
    LayerCase(FullKV(2, 64), 8),
    LayerCase(WindowKV(2, 64, WINDOW), 8, has_sinks=True),
    LayerCase(FullKV(1, 128), 5, scale=0.3),
]
LAYERS: list[KVKind | None] = [None, *(case.kind for case in CASES)]
LAYOUTS = {
    "prompts of one request": Layout([(0, 0, 9)]),
    "prompts and chunks": Layout([(0, 0, 9), (3, 17, 30), (1, 95, 1)]),
    "a mixed step": Layout([(2, 3, 1), (3, 17, 30)], [(5, 70), (4, 8)]),
    "decodes alone": Layout(decodes=[(5, 70), (4, 8)]),
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FlashAttention3:
    build = FlashAttention3()
    monkeypatch.setitem(sys.modules, MODULE, build.module())
    return build


def backend_of(pool: KVPool, *, is_hopper: bool = True, other_ranks: bool = True) -> FlashInferBackend:
    """Return a backend that has chosen, in a vote in which the other ranks vote as is given."""
    library = stand_in()
    library.utils.is_hopper, library.jit.built = is_hopper, set()
    backend = FlashInferBackend(pool, library, library.Event)
    backend.settle(lambda mine: mine and other_ranks)
    return backend


def pool_of(layers: list[KVKind | None], dtype: torch.dtype = HALF, stored: torch.dtype | None = None) -> KVPool:
    return KVPool(8, layers, dtype, stored=stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_agrees_with_float64(module: FlashAttention3, name: str, dtype: torch.dtype) -> None:
    """Slots that no sequence reads hold NaN, so that one slot too many is noticed."""
    steps = AttentionSteps(CASES, dtype)
    backend = backend_of(steps.pool)
    assert backend.prompts == f"FlashAttention 3, {MODULE}"
    module.calls.clear()
    steps.check(backend, LAYOUTS[name])
    assert all(isinstance(kind, Fa3Heads) and kind._extend is None for kind in backend._kinds.values())
    assert len(module.calls) == (2 * len(CASES) if LAYOUTS[name].extends else 0)


def test_what_is_handed_over(module: FlashAttention3) -> None:
    """Keys are never split; of a layer with a window only the slots that a query sees are handed over."""
    steps = AttentionSteps(CASES, HALF)
    backend = backend_of(steps.pool)
    module.calls.clear()
    steps.check(backend, LAYOUTS["prompts and chunks"])
    assert {call.num_splits for call in module.calls} == {1}
    assert {call.window for call in module.calls} == {(-1, -1), (WINDOW - 1, 0)}
    slots = {call.window[0]: call.pages for call in module.calls}
    spans = {-1: [(0, 0, 9), (3, 0, 47), (1, 0, 96)], WINDOW - 1: [(0, 0, 9), (3, 13, 47), (1, 91, 96)]}
    for left, tables in ((-1, steps.req_to_token), (WINDOW - 1, steps.window_table)):
        found = slots[left]
        assert found.shape == (3, max(end - first for _, first, end in spans[left]))
        for row, (request, first, end) in zip(found, spans[left]):
            wanted = tables[request, first:end].tolist()
            assert row.tolist() == wanted + [0] * (found.shape[1] - len(wanted))


def test_the_slots_that_attention_takes_fit_in_the_memory_kept_for_tables(module: FlashAttention3) -> None:
    """A step has one long prompt and short ones: each takes a row of the longest.  Captured steps keep as much."""
    steps = AttentionSteps(CASES[:1], HALF)
    backend = backend_of(steps.pool)
    num_rows, longest = steps.req_to_token.shape
    rest = [(row, 0, 1) for row in range(1, num_rows)]
    module.calls.clear()
    steps.check(backend, Layout([(0, longest - 1, 1), *rest]))
    captured = backend.for_graph(num_rows)
    steps.check(captured, Layout(decodes=[(row, longest) for row in range(num_rows)]))
    (pages,) = {call.pages.nbytes for call in module.calls}
    kept = backend._shared.indices(None, 0).nbytes
    assert pages + kept == slot_table_bytes(num_rows, longest, 1) - steps.req_to_token.nbytes


def test_steps_are_planned_one_after_the_other(module: FlashAttention3) -> None:
    steps = AttentionSteps(CASES, HALF)
    backend = backend_of(steps.pool)
    for layout in (*LAYOUTS.values(), Layout(), *LAYOUTS.values()):
        steps.check(backend, layout) if layout.spans else backend.plan(steps.batch(layout))


def test_captured_steps_have_no_prompts(module: FlashAttention3) -> None:
    steps = AttentionSteps(CASES, HALF)
    backend = backend_of(steps.pool)
    steps.check(backend, LAYOUTS["a mixed step"])
    captured: Any = backend.for_graph(2)
    steps.check(captured, LAYOUTS["decodes alone"])
    assert {type(kind) for kind in captured._kinds.values()} == {GroupedHeads}


REFUSED: dict[str, tuple[dict[str, Any], tuple[str | int, ...], str]] = {
    "another device": ({"is_hopper": False}, (), "FlashInfer has no other module for heads of 64"),
    "keys in FP8": ({"pool": pool_of(LAYERS, stored=FP8)}, (), "keys in torch.float8_e4m3fn on this device"),
    "another size of heads": ({"pool": pool_of([FullKV(2, 64), FullKV(2, 96)])}, (), "for heads of 96"),
    "latents": ({"pool": pool_of([LatentKV(128, 64)])}, (), "latents have modules of their own"),
    "a build without windows": ({}, ("windows",), f"{MODULE} cannot be used (This flash attention build does not"),
    "a build without pages": ({}, ("pages",), "does not support paged KV.); FlashInfer's module"),
    "a build without a size": ({}, (128,), "does not support head dimension 128."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_runs_flash_attention_2(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, without, reason = REFUSED[name]
    monkeypatch.setitem(sys.modules, MODULE, FlashAttention3(*without).module())
    found = backend_of(**{"pool": pool_of(LAYERS)} | given).prompts
    assert found.startswith("FlashAttention 2: ") and reason in found and "\n" not in found


def test_a_module_that_is_not_there_or_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert f"{MODULE} cannot be used (import of {MODULE} halted" in backend_of(pool_of(LAYERS)).prompts
    older = FlashAttention3().module()
    older.flash_attn_with_kvcache = lambda q, k, v, *, cache_seqlens: q
    monkeypatch.setitem(sys.modules, MODULE, older)
    assert "unexpected keyword argument" in backend_of(pool_of(LAYERS)).prompts
    older.flash_attn_with_kvcache = lambda q, *args, **named: (q[:, :1], torch.zeros(1, 1))
    assert "a result of [1, 1, 64] with sums of [1, 1]" in backend_of(pool_of(LAYERS)).prompts


def test_one_rank_without_it_is_enough(module: FlashAttention3) -> None:
    found = backend_of(pool_of(LAYERS), other_ranks=False)
    assert found.prompts.startswith(f"FlashAttention 2: another rank has no {MODULE}; ")
    assert found._shared.own_fa3 is None


@pytest.mark.parametrize("built", [True, False])
def test_ranks_without_it_take_flash_infers(module: FlashAttention3, built: bool) -> None:
    """The ranks vote on one way after the other, as often on each."""
    library = stand_in()
    library.utils.is_hopper, library.jit.built = True, None if built else set()
    votes: list[bool] = []

    def all_agree(mine: bool) -> bool:
        votes.append(mine)
        return mine and len(votes) > 1  # another rank lacks the own module alone

    backend = FlashInferBackend(pool_of(LAYERS), library, library.Event)
    backend.settle(all_agree)
    assert votes == [True, built]
    assert backend.prompts.startswith("FlashAttention 3" if built else "FlashAttention 2: another rank has no")
    assert (backend._shared.own_fa3, backend._shared.prompts) == (None, "fa3" if built else "fa2")


def test_a_tensor_is_no_shorter_than_the_call_reads(module: FlashAttention3) -> None:
    """The stand-in refuses what the module does not take."""
    call, kv = module.flash_attn_with_kvcache, torch.zeros(4, 1, 2, 64, dtype=HALF)
    q, one = torch.zeros(1, 4, 64, dtype=HALF), torch.ones(1, dtype=torch.int32)
    right: dict[str, Any] = {
        "cache_seqlens": one,
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "max_seqlen_q": 1,
        "causal": True,
    }
    assert call(q, kv, kv, **right).shape == q.shape
    for wrong in (
        {"cache_seqlens": one.long()},
        {"page_table": torch.zeros(1, 2, dtype=torch.int32).t()},
        {"page_table": torch.zeros(2, 1, dtype=torch.int32)},
        {"cu_seqlens_q": torch.tensor([0, 1])},
        {"max_seqlen_q": None},
    ):
        with pytest.raises(RuntimeError):
            call(q, kv, kv, **right | wrong)
    for tensors in ((q.float(), kv, kv), (q, kv.half(), kv), (q, kv[:, 0], kv[:, 0]), (q[..., :32], kv, kv)):
        with pytest.raises(RuntimeError):
            call(*tensors, **right)
    assert list(inspect.signature(call).parameters)[:3] == ["q", "k_cache", "v_cache"]


class OnHopper(FlashInferBackend):
    """The backend that `create_attention_backend` makes, for an engine in float32 on a CPU."""

    def __init__(self, kv: KVPool) -> None:
        library = stand_in((torch.float32,))
        library.utils = SimpleNamespace(determine_attention_backend=lambda *given, **sizes: "fa3")
        super().__init__(kv, library, library.Event)

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None


def test_an_engine_answers_as_with_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in chunks while other requests decode."""
    build = FlashAttention3(dtypes=(torch.float32,))
    monkeypatch.setitem(sys.modules, MODULE, build.module())
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", (__name__, "OnHopper"))
    folder = tiny_checkpoint(tmp_path / "model", "moe", head_dim=64)
    prompts, found = [list(range(5, 45)), [7, 8, 9], list(range(60, 83))], {}
    for name in ("flashinfer", "torch_native"):
        harness = Harness(folder, attention_backend=name, disable_native_kernels=True, chunked_prefill_size=16)
        words = harness.control(GetStateReqInput).data["prompt_attention"]
        assert words == ("" if name == "torch_native" else f"FlashAttention 3, {MODULE}")
        found[name] = harness.generate(prompts, {"max_new_tokens": 6, "temperature": 0.0})
    assert len(build.calls) > 10
    for one, other in zip(*found.values(), strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-4)


def _with(call: Callable[..., Any], **other: Any) -> Callable[..., Any]:
    return lambda *args, **named: call(*args, **named | other)


WRONG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a window that is one too long": lambda kind: {"window_size": (WINDOW, 0)} if kind.window else {},
    "no window": lambda kind: {"window_size": (-1, -1)},
    "the default scale": lambda kind: {"softmax_scale": None},
    "one page for all": lambda kind: {"page_table": None},
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_noticed(module: FlashAttention3, name: str) -> None:
    steps, original = AttentionSteps(CASES, HALF), flash_attention_3._call

    def wrong(library: Any, kind: Any, step: Any, *rest: Any, **named: Any) -> Any:
        changes = WRONG[name](kind)
        if changes.get("page_table", ...) is None:
            step, changes = step._replace(pages=step.pages[:1].expand_as(step.pages)), {}
        call = _with(library.flash_attn_with_kvcache, **changes)
        return original(mock.Mock(flash_attn_with_kvcache=call), kind, step, *rest, **named)

    backend = backend_of(steps.pool)
    with mock.patch.object(flash_attention_3, "_call", wrong), pytest.raises(AssertionError):
        steps.check(backend, LAYOUTS["prompts and chunks"])


@pytest.mark.mutant
def test_sinks_that_are_left_out_are_noticed(module: FlashAttention3) -> None:
    steps, original = AttentionSteps(CASES, HALF), flash_attention_3._attend
    backend = backend_of(steps.pool)
    without = mock.patch.object(flash_attention_3, "_attend", lambda *given: original(*given[:-1], None))
    with without, pytest.raises(AssertionError, match="layer 1"):
        steps.check(backend, LAYOUTS["a mixed step"])
