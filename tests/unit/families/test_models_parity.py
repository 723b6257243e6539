"""The engine's models against the float64 reference and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.families.registry import load_model_config
from rollout.kernels.ops import Ops, plain_ops
from tests.forward_harness import ForwardHarness, StepOutput
from tests.kernels import native_ops
from tests.model_zoo import KINDS, load_tiny, logical_tensors, tiny_checkpoint
from tests.reference import ReferenceOutput, reference_forward

SEEDS = (0, 1, 2)
LENGTH = 33
FLOAT64_TOLERANCE = 1e-12


@pytest.fixture(scope="module", params=[(kind, seed) for kind in KINDS for seed in SEEDS], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, seed = request.param
    return tiny_checkpoint(tmp_path_factory.mktemp("zoo") / "model", kind, seed)


def _ids(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _reference(folder: Path, ids: list[int]) -> ReferenceOutput:
    return reference_forward(load_model_config(folder), logical_tensors(folder), ids)


def _joined(steps: list[StepOutput]) -> StepOutput:
    return StepOutput(torch.cat([s.log_probs for s in steps]), torch.cat([s.routes for s in steps]))


def _assert_equals_reference(output: StepOutput, expected: ReferenceOutput) -> None:
    assert (output.log_probs - expected.log_probs).abs().max() < FLOAT64_TOLERANCE
    assert torch.equal(output.routes, expected.routes)


def test_single_prefill_equals_the_reference(folder: Path) -> None:
    ids = _ids(10)
    _assert_equals_reference(ForwardHarness(load_tiny(folder)).step({3: ids})[3], _reference(folder, ids))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_equals_the_reference(folder: Path, chunk: int) -> None:
    ids, harness = _ids(11), ForwardHarness(load_tiny(folder))
    steps = [harness.step({2: ids[i : i + chunk]})[2] for i in range(0, LENGTH, chunk)]
    _assert_equals_reference(_joined(steps), _reference(folder, ids))


def test_prefill_then_decode_equals_the_reference(folder: Path) -> None:
    ids, harness = _ids(12), ForwardHarness(load_tiny(folder))
    steps = [harness.step({5: ids[:20]})[5]] + [harness.step(decodes={5: token})[5] for token in ids[20:]]
    _assert_equals_reference(_joined(steps), _reference(folder, ids))


def test_mixed_batches_equal_the_reference(folder: Path) -> None:
    """Three requests of different lengths: prefill, chunk and decode share steps."""
    harness = ForwardHarness(load_tiny(folder))
    ids = {request: _ids(20 + request) for request in (0, 4, 6)}
    got: dict[int, list[StepOutput]] = {request: [] for request in ids}
    done = dict.fromkeys(ids, 0)

    def step(extends: dict[int, int], decodes: tuple[int, ...]) -> None:
        spans = {r: ids[r][done[r] : done[r] + n] for r, n in extends.items()}
        for request, output in harness.step(spans, {r: ids[r][done[r]] for r in decodes}).items():
            got[request].append(output)
            done[request] += output.log_probs.shape[0]

    step({4: 9}, ())
    step({0: 5, 6: 5}, (4,))
    step({6: 8, 0: 8}, (4,))
    step({0: 3}, (6, 4))
    while max(done.values()) < LENGTH:
        step({}, (4, 0, 6))
    for request, outputs in got.items():
        joined = _joined(outputs)
        expected = _reference(folder, ids[request][: done[request]])
        _assert_equals_reference(joined, expected)


@pytest.mark.parametrize("make_ops", [plain_ops, native_ops])
def test_log_probs_and_expert_sets_equal_transformers(folder: Path, make_ops: Callable[[], Ops]) -> None:
    ids = _ids(13)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
        for layer in theirs.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        log_probs = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    harness = ForwardHarness(load_tiny(folder, torch.float32, ops=make_ops()))
    ours = _joined([harness.step({1: ids[:17]})[1], *(harness.step(decodes={1: token})[1] for token in ids[17:])])
    assert len(hooks) == len(chosen) == ours.routes.shape[1]
    assert (ours.log_probs - log_probs).abs().max() < 1e-4
    assert torch.equal(ours.log_probs.argmax(-1), log_probs.argmax(-1))
    if chosen:
        assert torch.equal(ours.routes.sort(-1).values, torch.stack(chosen, dim=1).sort(-1).values)


@pytest.mark.parametrize(
    ("dtype", "make_ops"),
    [(torch.bfloat16, plain_ops), (torch.bfloat16, native_ops), (torch.float16, plain_ops)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_half_precision_stays_near_the_reference(folder: Path, dtype: torch.dtype, make_ops: Callable[[], Ops]) -> None:
    """Weights are rounded alike, so only arithmetic differs.  Tokens with other routes are left out, as far off."""
    ids = _ids(14)
    rounded = {name: tensor.to(dtype) for name, tensor in logical_tensors(folder).items()}
    expected = reference_forward(load_model_config(folder), rounded, ids)
    output = ForwardHarness(load_tiny(folder, dtype, ops=make_ops())).step({0: ids})[0]
    same = (output.routes.sort(-1).values == expected.routes.sort(-1).values).all(-1).all(-1)
    assert same.float().mean() > 0.5
    difference = (output.log_probs - expected.log_probs).abs().mean(-1)[same]
    assert difference.median() < (0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.parametrize("kind", ["moe", "moe_dense_first"])
def test_replicated_and_permuted_placement_changes_nothing(tmp_path: Path, kind: str) -> None:
    folder = tiny_checkpoint(tmp_path / "model", kind, 5)
    config = load_model_config(folder)
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.cat((torch.arange(8), torch.tensor([5, 0, 5])))[torch.randperm(11, generator=generator)]
        for _ in config.moe_layer_ids
    ]
    placement = ExpertPlacement(ExpertLocationMetadata(torch.stack(rows), config.num_experts))
    ids = _ids(15)
    output = ForwardHarness(load_tiny(folder, placement=placement)).step({0: ids})[0]
    _assert_equals_reference(output, _reference(folder, ids))


@pytest.mark.mutant
@pytest.mark.parametrize(
    "broken",
    ["mlp.gate.weight", "self_attn.k_norm.weight", "experts.3.up_proj.weight", "self_attn.v_proj.weight", "model.norm"],
)
def test_the_comparison_notices_a_wrong_tensor(tmp_path: Path, broken: str) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe", 1)
    ids, tensors = _ids(16), logical_tensors(folder)
    name = next(name for name in tensors if broken in name)
    tensors[name] = tensors[name] * (1 + 1e-6)
    wrong = reference_forward(load_model_config(folder), tensors, ids)
    with pytest.raises(AssertionError):
        _assert_equals_reference(ForwardHarness(load_tiny(folder)).step({0: ids})[0], wrong)


@pytest.mark.mutant
def test_the_comparison_notices_a_wrong_position(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "moe_dense_first", 0)
    ids, harness = _ids(17), ForwardHarness(load_tiny(folder))
    harness.step({0: ids[:10]})
    batch = harness.batch({}, {0: ids[10]})
    batch.positions += 1
    harness.lengths[0] -= 1
    harness.batch = lambda extends, decodes: batch  # type: ignore[method-assign]
    output = harness.step(decodes={0: ids[10]})[0]
    assert (output.log_probs - _reference(folder, ids[:11]).log_probs[-1:]).abs().max() > 1e-6
