"""Whole models on the functions for CUDA tensors, interpreted on the CPU; and every kernel compiles.

The reference is the same model on plain torch, in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.kernels.ops import Ops, plain_ops
from rollout.model.decoder import DecoderForCausalLM
from tests.family_zoo import family_checkpoint
from tests.forward_harness import ForwardHarness, StepOutput
from tests.interpreted import compiling_environment, interpreted_ops
from tests.model_zoo import load_tiny

pytestmark = pytest.mark.full
# Every kind of layer, router and expert.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next"]
COMPILE_TIMEOUT_S = 1800.0


def _steps(model: DecoderForCausalLM) -> list[StepOutput]:
    """Run two prompts, then the rest of one with a token of the other, then a token of each."""
    harness = ForwardHarness(model, max_requests=2, max_context=32)
    steps = [
        harness.step({0: [5, 17, 300, 2], 1: [9, 9]}),
        harness.step({1: [40, 41, 7]}, {0: 11}),
        harness.step(decodes={0: 64, 1: 65}),
    ]
    return [step[request] for step in steps for request in sorted(step)]


def difference(ops: Ops, path: Path) -> float:
    """Return the largest difference of log-probabilities, or infinity if a route differs."""
    ours, theirs = (_steps(load_tiny(path, torch.float32, ops=each)) for each in (ops, plain_ops()))
    if not all(torch.equal(a.routes, b.routes) for a, b in zip(ours, theirs, strict=True)):
        return float("inf")
    return max(float((a.log_probs - b.log_probs).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    assert difference(interpreted_ops(), family_checkpoint(tmp_path / "model", name, seed=3)) < 1e-4


@pytest.mark.mutant
def test_a_wrong_operator_is_noticed(tmp_path: Path) -> None:
    path, ops = family_checkpoint(tmp_path / "model", "qwen3_moe", seed=3), interpreted_ops()

    def routes_backwards(*arguments: Any) -> Any:
        normed, weights, ids = ops.norm_route(*arguments)
        return normed, weights, ids.flip(1)

    def half(gate_up: torch.Tensor) -> torch.Tensor:
        return ops.silu_and_mul(gate_up) / 2

    def stays(residual: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return ops.norm_linear(residual.clone(), *arguments)

    for wrong in ({"norm_route": routes_backwards}, {"silu_and_mul": half}, {"norm_linear": stays}):
        assert difference(ops.replace(**wrong), path) > 1e-3, wrong


def test_every_kernel_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu_kernels_table", "--json", str(tmp_path / "table.json")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, env=compiling_environment(), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "table.json").read_text())
    assert not [row["name"] for row in rows if row["spilled_bytes"]]
    assert [row["name"] for row in rows if not row["waits_first"]] == [], "a kernel that may begin early has to wait"
    names = {row["name"].split()[0] for row in rows}
    assert {
        "add_rms_norm",
        "qk_norm_rope_store",
        "router",
        "silu_and_mul",
        "sigmoid_gate",
        "sum_in_order",
        "sample,",
        "experts",
    } <= names
    routers = [row for row in rows if row["name"].startswith("router ") and "bf16" in row["name"]]
    assert routers and all(row["matrix_instruction"] for row in routers)


_BOTH = """
from benchmarks.compile_cases import CompileCase, compile_for
from rollout.kernels.gpu.silu_and_mul import compile_cases
for capability in (80, 90, 100):
    ptx = compile_for(CompileCase(*compile_cases()[0]), capability).asm["ptx"]
    print(capability, *(ptx.count(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents")))
"""


def test_a_device_without_dependent_launch_gets_no_wait() -> None:
    """Compute capability 8.0 does not have the instructions; PTX with them would not compile for it."""
    environment = compiling_environment()
    done = subprocess.run([sys.executable, "-c", _BOTH], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:3] == ["80 0 0", "90 1 1", "100 1 1"]
