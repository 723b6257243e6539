"""The largest step runs on models of every kind; counters of a device give the bytes that the KV pool must leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.distributed.parallel import Parallel
from rollout.engine import build, warm_up
from rollout.engine.build_drafts import LoadedDraft
from rollout.engine.warm_up import StepSize, activation_bytes, run_largest_step
from rollout.executor.model_runner import ModelRunner
from rollout.kernels.ops import plain_ops
from rollout.layers.lora import SlotSizes
from rollout.memory.kv_pool import kv_bytes_per_token
from rollout.model.adapters import AdapterTable
from rollout.model.model_state import ModelState
from rollout.sampling.native_sampler import select_sampler
from tests.model_zoo import load_tiny, tiny_checkpoint, trivial_placement
from tests.scheduler_harness import Harness


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelState]:
    torch.set_num_threads(1)
    base, found = tmp_path_factory.mktemp("models"), {}
    for kind in ("moe", "dense"):
        model = load_tiny(tiny_checkpoint(base / kind, kind), torch.float32, ops=plain_ops())
        found[kind] = ModelState(model, trivial_placement(model.config), "v")
    return found


def arguments(**changes: Any) -> dict[str, Any]:
    common = {"attention": "torch_native", "kernels_available": False, "wants_routes": True}
    return {"device": torch.device("cpu"), "parallel": Parallel()} | common | changes


@pytest.mark.parametrize("kind", ["moe", "dense"])
@pytest.mark.parametrize("context_length", [16, 64], ids=["many_sequences", "one_sequence"])
def test_the_largest_step_has_all_tokens_and_reaches_to_the_longest_context(
    states: dict[str, ModelState], kind: str, context_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    forward = ModelRunner.forward

    def noted(self: ModelRunner, batch: Any) -> Any:
        seen.append(
            (batch.num_tokens, [a + b for a, b in zip(batch.extend_prefix_lens, batch.extend_lens, strict=True)])
        )
        assert len(set(batch.out_cache_loc.tolist())) == batch.num_tokens, "every token has a slot of its own"
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    state, sampler = states[kind], select_sampler(torch.float32, torch.device("cpu"), False)
    size = StepSize(num_tokens=40, num_rows=8, context_length=context_length)
    pool_bytes = run_largest_step(state, sampler, size, **arguments())
    num_sequences = -(-40 // context_length)
    assert seen == [(40, [context_length] * num_sequences)]
    assert pool_bytes >= 40 * kv_bytes_per_token(state.model.kv_layers, torch.float32)
    assert state.epoch.weight_epoch == 0


def test_the_largest_step_has_rows_for_adapters_where_there_are_slots(
    states: dict[str, ModelState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts take memory for all rows of a step with adapters: it must be there when the first adapter is used."""
    seen: list[Any] = []
    forward = ModelRunner.forward

    def noted(self: ModelRunner, batch: Any) -> Any:
        seen.append(batch.adapters)
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    plain, sampler = states["moe"], select_sampler(torch.float32, torch.device("cpu"), False)
    adapted = ModelState(plain.model, plain.placement, "v", AdapterTable(plain.model, SlotSizes(2, 4)))
    for state in (plain, adapted):
        run_largest_step(state, sampler, StepSize(num_tokens=8, num_rows=2, context_length=16), **arguments())
    assert seen[0] is None and seen[1].tolist() == [-1] * 8


def test_a_draft_computes_the_largest_step_before_the_model(
    states: dict[str, ModelState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its activations count, and its pool does not: the KV pool is sized with a token of both."""
    seen: list[Any] = []
    forward = ModelRunner.forward

    class Draft:
        """A draft that reads the served model's hidden states, as a layer of its checkpoint does."""

        needs_hidden = True
        kv_layers = states["dense"].model.kv_layers

        def __call__(self, batch: Any, context: Any, hidden_TD: torch.Tensor) -> torch.Tensor:
            seen.append(("draft", batch.num_tokens, hidden_TD.shape))
            assert context.attention.kv.padding_slot == batch.num_tokens, "on a pool of its own"
            return states["dense"].model(batch, context)

        compute_logits = states["dense"].model.compute_logits

    def noted(self: ModelRunner, batch: Any) -> Any:
        seen.append(("model", batch.num_tokens))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", noted)
    state, sampler = states["moe"], select_sampler(torch.float32, torch.device("cpu"), False)
    size = state.model.config.hidden_size
    draft = LoadedDraft(
        Draft(), states["dense"].model.weights, size, torch.float32, torch.device("cpu"), state.model.parallel
    )
    step = StepSize(num_tokens=40, num_rows=8, context_length=64)
    alone = run_largest_step(state, sampler, step, **arguments())
    seen.clear()
    both = run_largest_step(state, sampler, step, **arguments(), draft=draft)
    assert seen == [("draft", 40, (40, size)), ("model", 40)]
    assert both - alone == 41 * kv_bytes_per_token(Draft.kv_layers, torch.float32)


def test_a_cpu_is_not_measured(states: dict[str, ModelState]) -> None:
    sampler = select_sampler(torch.float32, torch.device("cpu"), False)
    assert activation_bytes(states["moe"], sampler, StepSize(8, 2, 16), **arguments()) == 0


class FakeCuda:
    """The counters of torch's allocator: allocated bytes, and their peak since the last reset."""

    def __init__(self, weights: int) -> None:
        self.now, self.peak = weights, 10 * weights

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, function in {
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": self._reset,
            "memory_allocated": lambda device: self.now,
            "max_memory_allocated": lambda device: self.peak,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _reset(self, device: torch.device) -> None:
        self.peak = self.now


@pytest.mark.parametrize("peak", [700, 100], ids=["usual", "nothing_beside_the_pools"])
def test_the_peak_counts_without_weights_and_pools(peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The count leaves out the peak of loading, the weights and the small pool."""
    cuda = FakeCuda(weights=5000)
    cuda.install(monkeypatch)

    def step(*_: Any, **__: Any) -> int:
        cuda.peak = max(cuda.peak, cuda.now + peak)
        return 100

    monkeypatch.setattr(warm_up, "run_largest_step", step)
    taken = activation_bytes(None, None, StepSize(8, 2, 16), **arguments(device=torch.device("cuda")))  # type: ignore[arg-type]
    assert taken == peak - 100


def test_ranks_agree_on_the_same_number_of_tokens() -> None:
    parallel = Parallel()
    batch = warm_up._largest_batch(StepSize(20, 2, 8), torch.device("cpu"), parallel)
    assert batch.extend_lens == [8, 8, 4] and batch.extend_prefix_lens == [0, 0, 4]
    assert batch.global_num_tokens is None


@pytest.mark.parametrize(("settings", "rows"), [({}, 6), ({"speculative_algorithm": "NGRAM"}, 24)])
def test_the_largest_step_has_logits_for_drafts_where_they_are_verified(
    settings: dict[str, Any], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StepSize] = []

    def measured(state: Any, sampler: Any, size: StepSize, *others: Any, **more: Any) -> int:
        seen.append(size)
        return 0

    monkeypatch.setattr(build, "activation_bytes", measured)
    folder = tiny_checkpoint(tmp_path / "m", "dense", seed=1)
    Harness(
        folder, max_running_requests=6, speculative_num_draft_tokens=3, enable_return_routed_experts=False, **settings
    )
    assert [size.num_rows for size in seen] == [rows]
