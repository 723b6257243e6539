"""Room for the partial results of attention with fixed splits: attention takes as much, and engines leave it free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.attention.fixed_splits import FixedSplitsBackend
from rollout.attention.native_cpu import NativeCpuBackend
from rollout.core.specs.layer_specs import FullKV, KVKind, LatentKV, WindowKV
from rollout.engine import build, build_graphs
from rollout.memory.cache_manager import MAX_STEPS_AHEAD
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.fixed_numerics import SETTINGS, SPLIT, OnInterpreter, deterministic_ops, fixed_numerics
from tests.gpu.engines import called_instead_of_captured
from tests.interpreted import kernels
from tests.model_zoo import tiny_checkpoint
from tests.mtp_zoo import mtp_checkpoint
from tests.scheduler_harness import Harness

attention = kernels("fixed_attention")
CONTEXT, REQUESTS = 96, 7  # three splits
LAYERS = {
    "grouped heads": LayerCase(FullKV(2, 24), 6),
    "window": LayerCase(WindowKV(1, 16, 37), 3),
    "latents": LayerCase(LatentKV(136, 8), 20),
}


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with fixed_numerics() as patch:
        yield patch


@pytest.fixture
def taken(patch: pytest.MonkeyPatch) -> list[int]:
    """Let attention note the bytes of memory that it is given for parts, and return zeros."""
    found: list[int] = []

    def noted(*arguments: Any) -> None:
        parts = arguments[10]
        memory = {} if parts is None else {each.data_ptr(): each for each in map(torch.Tensor.untyped_storage, parts)}
        found.append(sum(each.nbytes() for each in memory.values()))
        arguments[5].zero_()

    patch.setattr(attention, "attend", noted)
    return found


def stated(case: LayerCase, counts: list[int], longest: int) -> int:
    return FixedSplitsBackend.partial_bytes([(case.num_heads, case.kind)], torch.float32, counts, longest)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_bytes_that_are_stated_are_the_ones_that_are_taken(layer: str, taken: list[int]) -> None:
    case = LAYERS[layer]
    steps = AttentionSteps([case], torch.float32, max_requests=REQUESTS, max_context=CONTEXT)
    backend, wanted = OnInterpreter(steps.pool), []
    for count in (1, 3, REQUESTS):
        for longest in (5, SPLIT, SPLIT + 1, CONTEXT):
            layout = Layout(decodes=[(request, longest - request % 5) for request in range(count)])
            batch = steps.batch(layout)
            for planned, context in ((backend, longest), (backend.for_graph(count), CONTEXT)):
                planned.plan(batch)
                steps.attend(planned, 0, layout)
                wanted.append(stated(case, [count], context))
    assert taken == wanted and len(set(wanted)) > 5 and 0 in wanted


def test_prompts_take_no_partial_results(taken: list[int]) -> None:
    steps = AttentionSteps([LAYERS["latents"]], torch.float32, max_requests=REQUESTS, max_context=CONTEXT)
    backend, layout = OnInterpreter(steps.pool), Layout([(0, 76, 20)])
    backend.plan(steps.batch(layout))
    steps.attend(backend, 0, layout)
    assert taken == [0]


def test_the_step_that_takes_most_is_not_the_largest(patch: pytest.MonkeyPatch) -> None:
    """A step of many tokens has enough programs without splits."""
    case, counts = LAYERS["grouped heads"], [1, 4, 8, 16]
    patch.setattr(attention, "ENOUGH_PROGRAMS", 20)
    each = [stated(case, [count], CONTEXT) for count in counts]
    assert each[3] == 0 and each == [each[0], 4 * each[0], 8 * each[0], 0]
    assert stated(case, counts, CONTEXT) == each[2]
    both = [(case.num_heads, case.kind), (1, FullKV(1, 16))]
    assert FixedSplitsBackend.partial_bytes(both, torch.float32, counts, CONTEXT) == each[2]


def test_the_longest_context_of_deepseek_v3_takes_gigabytes(patch: pytest.MonkeyPatch) -> None:
    """Eight programs serve a token: up to 63 tokens are fewer than 512 programs, of 160 splits each."""
    patch.setattr(attention, "SPLIT", 1024)
    layers: list[tuple[int, KVKind]] = [(128, LatentKV(512, 64))] * 61
    of = FixedSplitsBackend.partial_bytes(layers, torch.bfloat16, range(1, 257), 163_840)
    assert of == 4 * 63 * 128 * (512 + 2) * 160 == 2_652_733_440


# --- engines ----------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """The engine has stated the bytes that it leaves free."""


def kept(patch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> dict[str, int]:
    """Start an engine and return the bytes that its KV pool leaves free, by reason."""
    found: dict[str, int] = {}

    def noted(**fields: int) -> None:
        found.update(fields)
        raise Stop

    patch.setattr(build, "Kept", noted)
    usual = {"max_running_requests": REQUESTS, "context_length": CONTEXT, "enable_return_routed_experts": False}
    with pytest.raises(Stop):
        Harness(folder, **usual | SETTINGS | settings)
    return found


def without(patch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> dict[str, int]:
    """Return the same where the backend states no partial results."""
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(OnInterpreter, "partial_bytes", NativeCpuBackend.partial_bytes)
        return kept(inner, folder, **settings)


SIZES = {"heads": 6, "kv_heads": 2, "head_dim": 16, "layers": 1}
KIND = LayerCase(FullKV(2, 16), 6)
LONGEST = CONTEXT + MAX_STEPS_AHEAD


def test_an_engine_leaves_room_for_parts_in_captured_steps_and_in_others(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Captures take it a second time."""
    folder = tiny_checkpoint(tmp_path / "m", "dense", **SIZES)
    most = stated(KIND, list(range(1, REQUESTS + 1)), LONGEST)
    assert kept(patch, folder)["activations"] == most > 0, "on a CPU nothing else is measured"
    patch.setattr(build_graphs, "graph_pools", lambda device: object)
    with_captures, less = kept(patch, folder), without(patch, folder)
    sizes = build_graphs.graph_batch_sizes(REQUESTS)
    assert with_captures["activations"] - less["activations"] == most
    assert with_captures["graphs"] - less["graphs"] == stated(KIND, sizes, LONGEST) > 0 and less["graphs"] > 0
    off = kept(patch, folder, disable_cuda_graph=True)
    assert (off["activations"], off["graphs"]) == (most, 0)


def test_captures_take_what_the_engine_left(patch: pytest.MonkeyPatch, tmp_path: Path, taken: list[int]) -> None:
    """The slot table is longer than a context, and so are the sequences that a capture makes room for."""
    folder = tiny_checkpoint(tmp_path / "m", "dense", **SIZES)
    settings = SETTINGS | {"max_running_requests": REQUESTS, "context_length": CONTEXT, "max_total_tokens": 512}
    patch.setattr(build, "select_ops", lambda *_, **__: deterministic_ops().replace(graph_safe=True))
    with called_instead_of_captured():
        Harness(folder, enable_return_routed_experts=False, piecewise_cuda_graph_max_tokens=0, **settings)
        left = kept(patch, folder)["graphs"] - without(patch, folder)["graphs"]
    assert max(taken) == left > stated(KIND, [REQUESTS], CONTEXT)


def test_an_engine_leaves_room_for_the_parts_of_its_draft(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "dense", **SIZES)
    draft = tiny_checkpoint(tmp_path / "d", "dense", heads=2, kv_heads=1, head_dim=24)
    by_model = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    rows = list(range(1, 4 * REQUESTS + 1))
    own = stated(LayerCase(FullKV(1, 24), 2), rows, LONGEST)
    found = kept(patch, folder, speculative_num_steps=3, **by_model)
    assert found["activations"] == stated(KIND, rows, LONGEST) + own


def test_an_engine_leaves_room_for_the_parts_of_a_layer_that_drafts(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The layer attends as the model's own do."""
    folder, rows = mtp_checkpoint(tmp_path / "m", "deepseek_v3", 3), {"speculative_num_steps": 1}
    alone = kept(patch, folder, speculative_algorithm="NGRAM", speculative_num_draft_tokens=1)
    both = kept(patch, folder, speculative_algorithm="NEXTN", **rows)
    assert both["activations"] == 2 * alone["activations"] > 0
