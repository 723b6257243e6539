"""Sixteen adapters and none in one batch of several ranks: the bits of each request alone, also while experts move.

All layouts here are batch invariant.  With replicas, ranks that add parts rank by rank do not: `all_tokens.py`.
Without replicas the place of an expert decides in which part it is added, so that experts stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.messages.experts import EplbRebalanceReqInput
from rollout.core.messages.io_struct import ContinueGenerationReqInput, GetStateReqInput, PauseGenerationReqInput
from rollout.layers.lora import LoraSlots
from rollout.layers.moe.experts import Experts
from tests.adapters import ATTENTION, DENSE, MIXED_RANKS, mixed_adapters
from tests.family_zoo import family_checkpoint
from tests.kernels import native_ops
from tests.parallel_harness import ParallelHarness

SEED = 3
EP: dict[str, Any] = {"tp_size": 2, "ep_size": 2}
DP: dict[str, Any] = {"dp_size": 2, "enable_dp_attention": True}
MOVING: dict[str, Any] = {"moe_a2a_backend": "all_to_all", "ep_num_redundant_experts": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "ep2": EP,
    "dp2": EP | DP,
    "ep2, replicas that move": EP | MOVING,
    "dp2, replicas that move": EP | DP | MOVING,
}
TARGETS = (ATTENTION, DENSE, ("q_proj", "experts.3.down_proj"), (*ATTENTION, *DENSE))
Asked = tuple[list[int], str | None]
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    native_ops()
    return family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", SEED)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return mixed_adapters(folder, tmp_path_factory.mktemp("adapters"), TARGETS)


def asked(adapters: dict[str, Path]) -> list[Asked]:
    generator = torch.Generator().manual_seed(1)
    names = [None, *adapters, None]
    lengths = torch.randint(3, 20, (len(names),), generator=generator).tolist()
    return [(torch.randint(5, 300, (n,), generator=generator).tolist(), name) for n, name in zip(lengths, names)]


def engine(folder: Path, adapters: dict[str, Path], layout: str, dtype: str, **settings: Any) -> ParallelHarness:
    paths = ",".join(f"{name}={path}" for name, path in adapters.items())
    slots = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": len(MIXED_RANKS)}
    given = {"dtype": dtype, "enable_return_routed_experts": False, "max_total_tokens": 1024}
    return ParallelHarness(folder, **LAYOUTS[layout], **given | slots | settings)


def submit(harness: ParallelHarness, batch: Sequence[Asked]) -> list[str]:
    return [
        harness.submit(prompt, params={"max_new_tokens": 4}, lora_name=name, dp_rank=number % harness.num_dp_ranks)
        for number, (prompt, name) in enumerate(batch)
    ]


def finished(harness: ParallelHarness, rids: Sequence[str]) -> list[Answer]:
    harness.run()
    harness.check_idle()
    return [(harness.results[rid].token_ids, harness.results[rid].logprobs) for rid in rids]


def alone(folder: Path, adapters: dict[str, Path], layout: str, dtype: str) -> list[Answer]:
    with engine(folder, adapters, layout, dtype, disable_radix_cache=True) as harness:
        return [finished(harness, submit(harness, [each]))[0] for each in asked(adapters)]


def together(folder: Path, adapters: dict[str, Path], layout: str, dtype: str) -> tuple[list[Answer], list[Answer]]:
    """Serve all at once in chunks, move experts and pause meanwhile; then all again, in reverse, with prefixes."""
    batch = asked(adapters)
    with engine(folder, adapters, layout, dtype, chunked_prefill_size=7, max_running_requests=12) as harness:
        state = harness.control(GetStateReqInput).data
        assert state["batch_invariant"], state["batch_invariance_note"]
        rids = submit(harness, batch)
        for shift in (3, 5):
            for _ in range(3):
                harness.tick()
            if "that move" in layout:
                moved = harness.control(EplbRebalanceReqInput, physical_to_logical_map=map_of(shift))
                assert moved.success and moved.data["rebalanced"], moved.message
        assert harness.control(PauseGenerationReqInput, mode="retract").success
        assert harness.control(ContinueGenerationReqInput).success
        assert any(scheduler.queues.all() for scheduler in harness.schedulers), "requests run meanwhile"
        return finished(harness, rids), finished(harness, submit(harness, batch[::-1]))[::-1]


def map_of(shift: int) -> list[list[int]]:
    """Return a map [L, P] of eight experts onto twelve slots of two ranks; six experts from `shift` on are first."""
    first = [(expert + shift) % 8 for expert in range(6)]
    second = [(expert + shift + 6) % 8 for expert in range(6)]
    return [[*first, *second[::-1]] for _ in range(2)]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "layout",
    [each if each == "dp2, replicas that move" else pytest.param(each, marks=pytest.mark.full) for each in LAYOUTS],
)
def test_sixteen_adapters_and_none_have_the_bits_of_each_alone(
    folder: Path, adapters: dict[str, Path], layout: str, dtype: str
) -> None:
    want = alone(folder, adapters, layout, dtype)
    assert together(folder, adapters, layout, dtype) == (want, want)
    assert len({tuple(logprobs) for _, logprobs in want}) == len(want), "every adapter counts"


@pytest.mark.mutant
def test_experts_that_move_without_adapters_are_noticed(
    folder: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = "dp2, replicas that move"
    want = alone(folder, adapters, layout, "bfloat16")
    monkeypatch.setattr(Experts, "slot_tensors", lambda self: [self.w13, self.w2])
    assert together(folder, adapters, layout, "bfloat16") != (want, want)


@pytest.mark.mutant
def test_slots_of_other_adapters_are_noticed(
    folder: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a batch with several adapters take the next slot."""
    want, right = alone(folder, adapters, "tp2", "bfloat16"), LoraSlots.add

    def beside(self: LoraSlots, out: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if slots[slots >= 0].unique().numel() > 1:
            slots = torch.where(slots >= 0, (slots + 1) % len(MIXED_RANKS), slots)
        return right(self, out, hidden, slots)

    monkeypatch.setattr(LoraSlots, "add", beside)
    assert together(folder, adapters, "tp2", "bfloat16") != (want, want)
