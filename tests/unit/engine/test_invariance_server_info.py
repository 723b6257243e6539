"""/server_info reports batch invariance by the operators in use, and names an operator that prevents it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.specs.layer_specs import FullKV
from rollout.engine import build, load_kernels
from rollout.engine.deterministic import batch_invariance
from rollout.kernels.build import KernelStatus
from rollout.kernels.ops import plain_ops
from rollout.memory.kv_pool import KVPool
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

POOL = KVPool(1, [FullKV(1, 8)], torch.float32, "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m")


def facts(folder: Path, **settings: Any) -> tuple[bool, str]:
    state = Harness(folder, **settings).control(GetStateReqInput).data
    return state["batch_invariant"], state["batch_invariance_note"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_holds_on_the_compiled_operators(folder: Path, dtype: str) -> None:
    assert facts(folder, dtype=dtype) == (True, "")


@pytest.mark.parametrize(
    ("settings", "parts", "reason"),
    [
        ({"disable_native_kernels": True}, "layers and attention and sampling", "--disable-native-kernels"),
        ({"dtype": "float64"}, "layers and attention and sampling", "torch.float64"),
        ({"dtype": "float16"}, "layers and sampling", "torch.float16"),
    ],
)
def test_it_does_not_hold_on_plain_torch(folder: Path, settings: dict[str, Any], parts: str, reason: str) -> None:
    holds, note = facts(folder, **settings)
    assert not holds and note.startswith(f"{parts} on plain torch: ") and reason in note


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "bfloat16"}, ""),
        ({"disable_native_kernels": True}, "--disable-native-kernels"),
        ({"dtype": "float64"}, "there are no compiled operators for torch.float64"),
    ],
)
def test_the_reason_for_plain_torch_is_a_fact_and_a_warning(
    folder: Path, settings: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Harness(folder, **settings).control(GetStateReqInput).data
    assert state["plain_torch_reason"] == reason
    is_chosen = "disable_native_kernels" in settings
    assert ("WARNING lockstep: running on plain torch" in capsys.readouterr().err) == (bool(reason) and not is_chosen)


def test_heads_that_the_attention_operator_does_not_take(tmp_path: Path) -> None:
    holds, note = facts(tiny_checkpoint(tmp_path / "model", head_dim=12))
    assert not holds and note.startswith("attention on plain torch: ") and "heads of 12" in note


def test_a_missing_compiler_is_the_reason_for_no_invariance(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_kernels, "load_kernels", lambda *_: KernelStatus(False, "no C++ compiler found: g++"))
    assert facts(folder) == (False, "layers and attention and sampling on plain torch: no C++ compiler found: g++")


def test_a_device_without_operators_is_the_reason_for_no_invariance() -> None:
    status = load_kernels.load_kernels_of(ServerArgs(), torch.device("mps"))
    assert batch_invariance({"layers": False}, status.reason, POOL) == {
        "batch_invariant": False,
        "batch_invariance_note": "layers on plain torch: no compiled operators for device mps",
    }


@pytest.mark.parametrize(
    ("settings", "status", "line"),
    [
        ({}, KernelStatus(True), "Triton kernels for adapted_experts, add_head_lora, add_lora, "),
        ({}, KernelStatus(False, "no triton"), "running on plain torch, several times slower: no triton"),
        ({"disable_native_kernels": True}, KernelStatus(True), ""),
    ],
)
def test_a_line_says_what_a_gpu_runs(
    settings: dict[str, Any], status: KernelStatus, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(load_kernels, "load_gpu_kernels", lambda: status)
    monkeypatch.setattr(load_kernels, "say", lambda words, *_: said.append(words))
    found = load_kernels.load_kernels_of(ServerArgs(device="cuda", **settings), torch.device("cuda"))
    assert found.available == (status.available and not settings)
    assert len(said) == bool(line) and all(words.startswith(line) for words in said)


def test_a_server_without_compiled_operators_warns_at_each_start_n8(monkeypatch: pytest.MonkeyPatch) -> None:
    """N8: only one quiet line warned, and the server was slow and not batch invariant."""
    said: list[str] = []
    monkeypatch.setattr(load_kernels, "load_kernels", lambda *_: KernelStatus(False, "no C++ compiler found"))
    monkeypatch.setattr(load_kernels, "say", lambda words, *_: said.append(words))
    for _ in range(2):
        load_kernels.load_kernels_of(ServerArgs(), torch.device("cpu"))
    assert len(said) == 2 and said[0].startswith("running on plain torch")
    assert "not batch invariant: no C++ compiler found. Run `lockstep build-kernels`" in said[0]


def test_what_was_chosen_counts_and_not_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "select_ops", lambda *_, **__: plain_ops())
    holds, note = facts(folder, dtype="bfloat16")
    assert not holds and note.startswith("layers on plain torch")
