"""The numbers of the benchmark of families: bytes of a step, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families import COLUMNS, StepBytes, markdown, step_bytes
from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.families.registry import load_model_config

SPEC = CheckpointSpec(
    vocab_size=384, hidden_size=64, layers=4, heads=4, kv_heads=2, head_dim=16, experts=16, top_k=3, dense_first=0,
    intermediate_size=96, moe_intermediate_size=32, context_length=512,
)  # fmt: skip


def test_a_step_reads_a_window_at_most() -> None:
    step = StepBytes(always=1000, expert=10, tokens=((4, 8), (4, None)), sequence=100)
    assert step.of_step(2, 20, 3.5) == 1000 + 35 + 2 * (4 * 8 + 4 * 20 + 100)
    assert step.of_step(1, 5, 0) == 1000 + 4 * 5 + 4 * 5 + 100


def bytes_of(tmp_path: Path, **changes: object) -> StepBytes:
    folder = make_checkpoint(tmp_path / "model", SPEC.__class__(**{**vars(SPEC), **changes}))  # type: ignore[arg-type]
    return step_bytes(folder, load_model_config(folder))


@pytest.mark.parametrize("tie", [False, True])
def test_bytes_of_a_qwen3_moe(tmp_path: Path, tie: bool) -> None:
    """The embedding counts only as the output head; experts have a count of their own."""
    step = bytes_of(tmp_path, tie=tie)
    attention = 64 * 64 * 2 + 2 * 64 * 32 + 2 * 16
    assert step.always == 2 * (4 * (attention + 2 * 64 + 16 * 64) + 64 + 384 * 64)
    assert step.expert == 2 * 3 * 64 * 32
    assert step.tokens == ((2 * 2 * 2 * 16, None),) * 4 and step.sequence == 0


def test_bytes_of_a_latent_a_window_and_a_state(tmp_path: Path) -> None:
    assert bytes_of(tmp_path / "a", family="deepseek_v3").tokens == ((2 * (64 + 8), None),) * 4
    gpt_oss = bytes_of(tmp_path / "b", family="gpt_oss")
    assert gpt_oss.tokens == ((128, 128), (128, None)) * 2
    assert gpt_oss.expert == 2 * (3 * 64 * 32 + 2 * 32 + 64)
    hybrid = bytes_of(tmp_path / "c", family="qwen3_next")
    assert [size for size, _ in hybrid.tokens] == [0, 0, 0, 128]
    assert hybrid.sequence == 3 * 2 * (4 * 4 * 16 * 16 + 2 * 3 * (2 * 2 + 4) * 16)


def test_the_table_says_what_is_noise() -> None:
    row = {
        "family": "llama", "batch": 8, "lockstep": 30.0, "transformers": None, "ratio": None, "roofline": 0.25,
        "lockstep prefill": 200.0, "transformers prefill": 100.0, "prefill ratio": 2.0,
    }  # fmt: skip
    header, _, decode, prefill = markdown([row]).splitlines()
    assert header == f"| {' | '.join(COLUMNS)} |"
    assert decode == "| llama | 8 | 30 | noise | noise | 25% |"
    assert prefill == "| llama | prefill 1024 | 200 | 100 | 2.0x |  |"
