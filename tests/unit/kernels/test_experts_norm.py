"""The norm that sums the outputs of experts itself, interpreted: the bits of the sum and of the norm behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import interpreted  # before any kernel

# isort: split
from rollout.kernels.gpu import add_rms_norm, experts_grouped, experts_norm, fused_experts
from tests.family_zoo import family_checkpoint
from tests.forward_harness import ForwardHarness
from tests.gpu_expert_cases import Case, draw, with_empty_slots
from tests.model_zoo import load_tiny

CASES = {
    "few": draw(3),
    "planned": draw(40, top_k=3),
    "half precision": draw(9, dtype=torch.float16, top_k=4, clamped=True),
    "empty slots": with_empty_slots(draw(9, dtype=torch.float16, top_k=3), (-1, 4)),
    "a single slot": draw(5, top_k=1),
}


def results(case: Case, offset: float | None, norm: Any = experts_norm) -> list[torch.Tensor]:
    """Return residual and norm of the deferred sum, and the same of the two operators, one after the other."""
    generator = torch.Generator().manual_seed(1)
    size, dtype = case.hidden.shape[1], case.hidden.dtype
    residual = torch.randn(len(case.hidden), size + 5, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    arguments: list[Any] = case.arguments()
    found = []
    for is_deferred in (True, False):
        stream = residual.clone()[:, :size]  # rows lie apart
        if is_deferred:
            normed = norm.experts_norm(stream, fused_experts.expert_outputs(*arguments), weight, 1e-6, offset)
        else:
            hidden = fused_experts.fused_experts(*arguments)
            normed = add_rms_norm.add_rms_norm(stream, hidden, weight, 1e-6, offset)
        found += [stream, normed]
    return found


def is_right(found: list[torch.Tensor]) -> bool:
    return torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("offset", [None, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_a_deferred_sum_has_the_bits_of_sum_and_norm(name: str, offset: float | None) -> None:
    assert is_right(results(CASES[name], offset))


def test_outputs_of_grouped_products_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of float32 agree in bits where there are two slots at most, as plain torch adds these in one order."""
    monkeypatch.setattr(fused_experts, "choose_implementation", lambda *_: "grouped_mm")
    monkeypatch.setattr(fused_experts, "has_grouped", lambda _: True)
    case = draw(6)
    outputs = fused_experts.expert_outputs(*case.arguments())  # type: ignore[arg-type]
    rows = experts_grouped.grouped_experts(*replace(case, weights=None).arguments())  # type: ignore[arg-type]
    assert torch.equal(outputs.rows_TKD, rows)
    assert is_right(results(case, None))


def test_a_deferred_sum_takes_an_empty_batch() -> None:
    assert is_right(results(draw(0), None))


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + rounded(added, dtype)", "x + added"),
        ("P=hidden.num_experts", "P=hidden.num_experts + 1"),
        ("K=hidden.ids_TK.shape[1]", "K=hidden.ids_TK.shape[1] - 1"),
        ("tl.store(residual + row * residual_stride", "tl.store(residual + row * D"),
    ],
)
def test_wrong_norms_are_caught(old: str, new: str, tmp_path: Path) -> None:
    wrong = interpreted.mutated(experts_norm, tmp_path, (old, new))
    assert not is_right(results(CASES["empty slots"], None, wrong))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_has_the_same_bits_with_deferred_sums(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = family_checkpoint(tmp_path / "model", name, seed=3)
    ops, found = interpreted.interpreted_ops(), []
    for each in (ops, ops.replace(deferred_sum=None)):
        model = load_tiny(path, torch.float32, ops=each)
        harness = ForwardHarness(model, max_requests=2, max_context=8)
        steps = [harness.step({0: [5, 17, 2], 1: [9]}), harness.step(decodes={0: 64, 1: 65})]
        found.append([step[request].log_probs for step in steps for request in sorted(step)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
