"""The FlashInfer backend on the stand-in: plans without reading the device, page-locked memory, captured steps, an
engine; and that wrong backends are noticed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.attention.flashinfer import FlashInferBackend
from rollout.attention.flashinfer_kinds import GroupedHeads, KindOfLayer, Latents
from rollout.attention.flashinfer_sequences import CsrPart, StepSequences
from rollout.attention.registry import ATTENTION_BACKENDS, create_attention_backend
from rollout.core.errors import StartupError
from rollout.core.forward_batch import ForwardBatch, WindowOperands
from rollout.core.specs.layer_specs import FullKV, KVKind, LatentKV, WindowKV
from rollout.executor.input_builder import DecodeInput, ExtendInput, build_forward_batch
from rollout.memory.kv_pool import KVPool, KVScale, ReqToTokenPool
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.flashinfer_signatures import differences
from tests.flashinfer_stand_in import stand_in
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

LAYERS = [
    LayerCase(FullKV(2, 64), 8),
    LayerCase(WindowKV(2, 64, 5), 8, has_sinks=True),
    LayerCase(FullKV(1, 128), 5, scale=0.3),
]
LATENT = [LayerCase(LatentKV(128, 64), 16, scale=0.1)]
MIXED = Layout([(0, 0, 9), (3, 17, 30)], [(5, 70), (4, 8)])
PADDING = (2, 1)  # request and length of the rows that fill up a captured batch


def on_stand_in(steps: AttentionSteps) -> tuple[FlashInferBackend, Any]:
    library = stand_in()
    return FlashInferBackend(steps.pool, library, library.Event), library


def test_a_batch_holds_the_lengths_on_the_host() -> None:
    """The batch holds the live arrays without a copy, because most backends do not read them."""
    pool = ReqToTokenPool(4, 8, 0)
    for _ in range(3):
        pool.alloc()
    arrays = [torch.tensor(x) for x in ([2, 0], [3, 5], [4, 6], [0, 1])]
    decode = DecodeInput(*arrays)
    for extends in ([], [ExtendInput([7, 8], 1, 0, True)]):
        batch = build_forward_batch(extends, decode, torch.tensor([4, 5]), pool)
        assert batch.decode.req_pool_indices_host is arrays[0] and batch.decode.seq_lens_host is arrays[2]


def test_a_plan_reads_nothing_of_the_device() -> None:
    """Tensors without content stand for tensors of a device that is still busy."""
    steps = AttentionSteps(LAYERS, torch.float16)
    batch = steps.batch(MIXED)
    for name in ("input_ids", "positions", "out_cache_loc", "req_to_token"):
        setattr(batch, name, getattr(batch, name).to("meta"))
    on_meta = {name: getattr(batch.decode, name).to("meta") for name in ("req_pool_indices", "seq_lens")}
    batch.decode = batch.decode._replace(**on_meta)
    batch.window = WindowOperands(batch.out_cache_loc, steps.window_table.to("meta"))
    sequences = StepSequences(batch)
    for window, num_extends, num_decodes in ((None, 9 + 47, 70 + 8), (5, 9 + 34, 5 + 5)):
        extends, decodes = sequences.parts(window)
        assert extends is not None and decodes is not None
        assert (len(extends.kv_indices), len(decodes.kv_indices)) == (num_extends, num_decodes)
        assert extends.kv_indices.is_meta and extends.kv_indices.dtype == torch.int32
        assert decodes.kv_lens.tolist() == (decodes.kv_indptr[1:] - decodes.kv_indptr[:-1]).tolist()


def test_a_step_without_tokens_plans_nothing() -> None:
    steps = AttentionSteps(LAYERS, torch.float16)
    backend, _ = on_stand_in(steps)
    steps.check(backend, MIXED)
    backend.plan(steps.batch(Layout()))
    steps.check(backend, MIXED)


def test_lengths_that_advance_after_the_plan() -> None:
    """The next step of the batch is counted while layers of this one have not been planned yet."""
    steps = AttentionSteps(LAYERS, torch.float16)
    backend, _ = on_stand_in(steps)
    batch = steps.batch(MIXED)
    batch.decode = batch.decode._replace(seq_lens_host=batch.decode.seq_lens.clone())
    backend.plan(batch)
    batch.decode.seq_lens_host.add_(1)
    batch.decode = batch.decode._replace(req_pool_indices_host=batch.decode.req_pool_indices_host.flip(0))
    for layer in range(len(LAYERS)):
        steps.compare(steps.attend(backend, layer, MIXED), layer, MIXED)


def test_heads_that_a_tile_would_cut() -> None:
    """A model of 20 heads runs with 32 heads in prefill, and with 20 in decode."""
    steps = AttentionSteps([LayerCase(LatentKV(128, 64), 20)], torch.bfloat16)
    backend, _ = on_stand_in(steps)
    for cached in range(60, 68):
        steps.check(backend, Layout([(0, cached, 9), (1, 0, 4)], [(2, 31)]))


@pytest.mark.parametrize("layers", [LAYERS, LATENT], ids=["heads", "latents"])
def test_a_plan_waits_for_the_copy_of_the_one_before(layers: list[LayerCase]) -> None:
    """The host may be some steps ahead of the device."""
    assert not stale_steps(layers)


def stale_steps(layers: list[LayerCase]) -> list[int]:
    """Return the steps with wrong results, where the host plans and launches all before the device has done any."""
    steps = AttentionSteps(layers, torch.float16)
    backend, library = on_stand_in(steps)
    everything = [(request, 96) for request in range(5)]
    launched = [Layout(decodes=[(request, 90 - 7 * turn - request) for request, _ in everything]) for turn in range(5)]
    steps.check(backend, Layout(decodes=everything))  # the KV of all steps is there, and kinds are known
    batch = steps.batch(Layout(decodes=everything))
    library.stream.late = True
    outs = []
    for layout in launched:
        lengths = torch.tensor([length for _, length in layout.decodes])
        batch.decode = batch.decode._replace(seq_lens=lengths, seq_lens_host=lengths)
        backend.plan(batch)
        outs.append(steps.attend(backend, 0, layout))
    library.stream.progress()
    wrong = []
    for turn, (out, layout) in enumerate(zip(outs, launched)):
        try:
            steps.compare(out, 0, layout)
        except AssertionError:
            wrong.append(turn)
    return wrong


@pytest.mark.parametrize("layers", [LAYERS, LATENT], ids=["heads", "latents"])
def test_captured_steps_replay_correctly_while_requests_come_and_go(layers: list[LayerCase]) -> None:
    """Steps are replayed while requests advance, leave and are replaced by padding, between steps that extend."""
    assert not wrong_replays(layers, lambda backend, batch: backend.plan(batch))


def test_layers_with_other_scales_share_a_plan_and_can_be_captured() -> None:
    """The scale of the values is a launch of its own, which there is not for a scale of 1."""
    layers, scales = [LAYERS[0], LAYERS[1], LAYERS[0]], [KVScale(0.31, 1.7), KVScale(2.0, 0.5), KVScale()]
    assert not wrong_replays(layers, lambda backend, batch: backend.plan(batch), scales)
    steps = AttentionSteps(layers, torch.bfloat16, stored=torch.float8_e4m3fn, scales=scales)
    backend, library = on_stand_in(steps)
    steps.check(backend, MIXED)
    assert len(backend._kinds) == 2
    decodes = Layout(decodes=[(5, 70), (4, 8)])
    made = backend.for_graph(2)
    assert made is not None
    made.plan(steps.batch(decodes))
    launches = []
    for layer in range(len(layers)):
        call = _call(steps, made, layer, steps.q(layer, decodes))
        call()
        launches.append(len(library.Graph(call)._kernels))
    assert launches == [2, 2, 1]


def wrong_replays(
    layers: list[LayerCase],
    plan: Callable[[Any, ForwardBatch], None],
    scales: list[KVScale] | None = None,
) -> list[str]:
    """List the replays that raised or got wrong results; `plan` prepares each replay.  With scales KV is in FP8."""
    stored = None if scales is None else torch.float8_e4m3fn
    steps = AttentionSteps(layers, torch.bfloat16, stored=stored, scales=scales)
    backend, library = on_stand_in(steps)
    steps.check(backend, MIXED)
    graphs = {}
    q = {}
    for size in (4, 2):
        made = backend.for_graph(size)
        assert made is not None
        q[size] = [torch.zeros(size, case.num_heads, case.kind.key_size, dtype=torch.bfloat16) for case in layers]
        made.plan(steps.batch(Layout(decodes=[PADDING] * size)))
        calls = [_call(steps, made, layer, q[size][layer]) for layer in range(len(layers))]
        graphs[size] = made, [library.Graph(call) for call in calls]
    turns = [
        Layout(decodes=[(0, 10), (3, 48), (5, 71), (4, 9)]),
        Layout(decodes=[(0, 11), (3, 49), (5, 72), PADDING]),
        Layout(decodes=[(5, 73), PADDING]),
        Layout(decodes=[(1, 96), (0, 12), PADDING, PADDING]),
        Layout(decodes=[(4, 1), (5, 74)]),
    ]
    found = []
    for turn, layout in enumerate(turns):
        captured, recorded = graphs[len(layout.decodes)]
        plan(captured, steps.batch(layout))
        for layer, graph in enumerate(recorded):
            q[len(layout.decodes)][layer].copy_(steps.q(layer, layout))
            try:
                steps.compare(graph.replay(), layer, layout)
            except (AssertionError, RuntimeError) as error:
                found.append(f"turn {turn}: {error}")
        steps.check(backend, MIXED)
    return found


def _call(steps: AttentionSteps, backend: Any, layer: int, q: torch.Tensor) -> Callable[[], torch.Tensor]:
    case = steps.layers[layer]
    return lambda: backend.attend(layer, q, case.scale, case.window, steps.sinks[layer])


def test_captured_steps_refuse_what_they_are_not_for() -> None:
    steps = AttentionSteps(LAYERS, torch.float16)
    backend, library = on_stand_in(steps)
    steps.check(backend, MIXED)
    captured = backend.for_graph(2)
    for layout in (MIXED, Layout(decodes=[(0, 5)])):
        with pytest.raises(AssertionError, match="captured step"):
            captured.plan(steps.batch(layout))
    layout = Layout(decodes=[(0, 5), (1, 6)])
    with library.stream.capture(), pytest.raises(RuntimeError, match="plan cannot be captured"):
        captured.plan(steps.batch(layout))
    backend.plan(steps.batch(layout))
    with library.stream.capture(), pytest.raises(RuntimeError, match="without fixed buffers"):
        steps.attend(backend, 0, layout)


def test_the_workspace_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was used before is zeroed before it becomes a workspace."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        on_stand_in(AttentionSteps(LAYERS, torch.float16))
        with pytest.raises(ValueError, match="initialised to 0"):
            stand_in().BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    finally:
        torch.use_deterministic_algorithms(False)


def _pool(kind: KVKind | None, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    """Return a stand-in for a pool on a device that this machine lacks, with the facts that a backend reads."""
    pool = KVPool(4, [None, kind], dtype)

    def elsewhere(x: torch.Tensor) -> Any:
        where = torch.device(device)
        return SimpleNamespace(device=where, dtype=dtype, shape=x.shape, numel=x.numel, data_ptr=x.data_ptr)

    return SimpleNamespace(dtype=dtype, k=[elsewhere(x) for x in pool.k], v=[elsewhere(x) for x in pool.v])


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    obstacles = {
        "not on cpu": _pool(None, device="cpu"),
        "not torch.float32": _pool(FullKV(2, 128), torch.float32),
        "not of 96": _pool(FullKV(2, 96)),
        "got 96 and 64": _pool(LatentKV(96, 64)),
        "got 512 and 32": _pool(LatentKV(512, 32)),
    }
    for reason, pool in obstacles.items():
        assert (FlashInferBackend.obstacle(pool, True) or "").endswith(reason)
    with pytest.raises(StartupError, match="--attention-backend flashinfer: it runs on CUDA, not on cpu"):
        create_attention_backend("flashinfer", _pool(FullKV(2, 128), device="cpu"))


def test_it_is_the_first_choice_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is taken where the package is installed, and plain torch where it is not."""
    pools = [_pool(kind) for kind in (FullKV(4, 128), WindowKV(1, 64, 7), LatentKV(512, 64))]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FlashInferBackend, "__init__", lambda self, kv: None)
    monkeypatch.setattr(FlashInferBackend, "settle", lambda self, all_agree: None)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    assert all(isinstance(create_attention_backend("auto", pool), FlashInferBackend) for pool in pools)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert type(create_attention_backend("auto", pools[0])).__name__ == "TorchNativeBackend"
    with pytest.raises(StartupError, match="this device has 7\\.5"):
        create_attention_backend("flashinfer", pools[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert type(create_attention_backend("auto", pools[0])).__name__ == "TorchNativeBackend"
    with pytest.raises(StartupError, match="lockstep-rl\\[cuda\\]"):
        create_attention_backend("flashinfer", pools[0])


class OnStandIn(FlashInferBackend):
    """The backend that `create_attention_backend` makes, for an engine in float32 on a CPU."""

    def __init__(self, kv: KVPool) -> None:
        library = stand_in((torch.float32,))
        super().__init__(kv, library, library.Event)

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", (__name__, "OnStandIn"))
    yield


def test_an_engine_answers_as_with_torch(engines: None, tmp_path: Path) -> None:
    """Requests that share prefixes, in chunks, among others that decode; `tests/gpu/test_parity.py` has families."""
    folder = tiny_checkpoint(tmp_path / "model", head_dim=64)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 300, 40).tolist()
    prompts = [shared[:n] + rng.integers(3, 300, m).tolist() for n, m in ((0, 3), (40, 5), (40, 21), (17, 1), (40, 9))]
    answers = []
    for name in ("torch_native", "flashinfer"):
        harness = Harness(folder, attention_backend=name, disable_native_kernels=True, chunked_prefill_size=16)
        assert (name == "flashinfer") == isinstance(harness.scheduler.runner.attention, OnStandIn)
        answers.append(harness.generate(prompts, {"max_new_tokens": 12}))
    for ours, theirs in zip(*answers):
        assert ours.token_ids == theirs.token_ids and len(ours.token_ids) == 12
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        assert np.array_equal(ours.routes, theirs.routes)


@pytest.mark.mutant
def test_another_signature_is_noticed() -> None:
    library = stand_in()
    assert not differences(library)

    def csr(kv_indptr: Any, qo_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> None: ...

    def plan(self: Any, *args: Any, causal: bool = True) -> None: ...

    library.mla.MLAPlanMetadata = type("MLAPlanMetadata", (), {"csr": staticmethod(csr)})
    library.BatchPrefillWithPagedKVCacheWrapper.plan = plan
    assert [line.split(":")[0] for line in differences(library)] == [
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "MLAPlanMetadata.csr",
    ]


def _rewritten(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """Return the method with a mistake: `new` stands for `old` in its source."""
    source = inspect.cleandoc("\n" + inspect.getsource(method))
    assert source.count(old) == 1, f"{old!r} is not once in {method.__qualname__}"
    names: dict[str, Any] = {}
    exec(source.replace(old, new), method.__globals__ | {"super": super}, names)
    return names[method.__name__]


WRONG: dict[str, tuple[Any, str, str, str]] = {
    "not causal": (GroupedHeads, "_plan_extends", "causal=True", "causal=False"),
    "default dtype": (GroupedHeads, "_plan_extends", "q_data_type=self.dtype,", ""),
    "default dtype in decode": (GroupedHeads, "_plan_decodes", "q_data_type=self.dtype,", ""),
    "window one too long": (GroupedHeads, "_plan_extends", "kind.window - 1", "kind.window"),
    "window one too short": (StepSequences, "_read", "(window - 1)", "(window - 2)"),
    "decodes one too many": (StepSequences, "_read", "(window - 1)", "window"),
    "scale of the keys": (GroupedHeads, "_plan_decodes", "sm_scale=kind.scale", "sm_scale=None"),
    "latents not causal": (Latents, "_plan_extends", "causal=True", "causal=False"),
    "all heads as they are": (Latents, "_plan_extends", "self._causal_heads", "self.kind.num_heads"),
    "rows swapped": (KindOfLayer, "run", "q[cut:], k, v, sinks, scales", "q[:-cut], k, v, sinks, scales"),
    "plans of the first kind": (FlashInferBackend, "plan", "in self._shared.kinds", "in list(self._shared.kinds)[:1]"),
    "table without windows": (StepSequences, "_read", "self._tables[window is not None]", "self._tables[0]"),
}


def check_everything() -> None:
    for layers in (LAYERS, LATENT, [LayerCase(LatentKV(128, 64), 20)]):
        steps = AttentionSteps(layers, torch.bfloat16)
        backend, _ = on_stand_in(steps)
        for layout in (MIXED, Layout([(0, 62, 9)]), Layout(decodes=[(4, 30), (0, 96)]), MIXED):
            steps.check(backend, layout)


def test_the_unbroken_backend_passes_every_check() -> None:
    check_everything()


@pytest.mark.mutant
@pytest.mark.parametrize("name", WRONG)
def test_wrong_plans_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, old, new = WRONG[name]
    monkeypatch.setattr(owner, method, _rewritten(getattr(owner, method), old, new))
    with pytest.raises((AssertionError, ValueError)):
        check_everything()


@pytest.mark.mutant
@pytest.mark.parametrize("layers", [LAYERS, LATENT], ids=["heads", "latents"])
def test_a_plan_that_does_not_wait_is_noticed(layers: list[LayerCase], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _rewritten(FlashInferBackend.plan, "self._copied.synchronize()", "pass")
    monkeypatch.setattr(FlashInferBackend, "plan", wrong)
    assert stale_steps(layers)


@pytest.mark.mutant
@pytest.mark.parametrize("layers", [LAYERS, LATENT], ids=["heads", "latents"])
def test_a_replay_without_a_plan_is_noticed(layers: list[LayerCase]) -> None:
    assert wrong_replays(layers, lambda backend, batch: None)


@pytest.mark.mutant
def test_buffers_that_change_between_replays_are_noticed() -> None:
    def plan(backend: Any, batch: ForwardBatch) -> None:
        backend._kinds.clear()  # makes wrappers with new buffers
        backend.plan(batch)

    assert any("another address" in line for line in wrong_replays(LAYERS, plan))


@pytest.mark.mutant
def test_keys_and_values_swapped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GroupedHeads._run
    monkeypatch.setattr(GroupedHeads, "_run", lambda self, w, q, k, v, *rest: right(self, w, q, v, k, *rest))
    with pytest.raises(AssertionError, match="layer 0"):
        check_everything()


@pytest.mark.mutant
def test_sinks_that_the_library_ignores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(
        self: GroupedHeads,
        wrapper: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        _: KVScale,
        out: torch.Tensor,
    ) -> None:
        wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)), out=out, sinks=sinks)

    monkeypatch.setattr(GroupedHeads, "_run", run)
    with pytest.raises(AssertionError, match="layer 1"):
        check_everything()


@pytest.mark.mutant
def test_indices_of_64_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StepSequences.parts

    def parts(self: StepSequences, window: int | None) -> tuple[CsrPart | None, ...]:
        both = right(self, window)
        return tuple(part and part._replace(kv_indices=part.kv_indices.long()) for part in both)

    monkeypatch.setattr(StepSequences, "parts", parts)
    with pytest.raises(ValueError, match="int32"):
        check_everything()
