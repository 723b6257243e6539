"""Adapters of `kv_b_proj`, which latent attention applies to queries and to the result of attention.

Judges are PEFT's forward, the engine with other batches, and one rank for two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.adapters.peft_folder import read_adapter
from rollout.layers import latent_heads
from rollout.layers.latent_heads import LatentSlots
from tests.adapters import logprobs_of, save_adapter
from tests.family_zoo import family_checkpoint
from tests.invariance import ROOMY, assert_same
from tests.parallel_harness import ParallelHarness
from tests.scheduler_harness import Harness
from tests.served_adapters import IDS, NEAR, answers, asks, distance, scores, served

SEED, FAMILY = 3, "deepseek_v3"
RANKS = (1, 8, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), FAMILY, SEED)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of `kv_b_proj` alone, by rank, and one of `o_proj` alone."""
    base = tmp_path_factory.mktemp("adapters")
    found = {
        f"r{rank}": save_adapter(
            base / f"r{rank}", FAMILY, SEED, rank, target_modules=["kv_b_proj"], r=rank, lora_alpha=16
        )
        for rank in RANKS
    }
    found["other"] = save_adapter(base / "other", FAMILY, SEED, 2, target_modules=["o_proj"], r=4, lora_alpha=8)
    return found


@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
def test_every_rank_agrees_with_peft(folder: Path, adapters: dict[str, Path], plain: bool) -> None:
    harness, base = served(folder, adapters, disable_native_kernels=plain), logprobs_of(FAMILY, SEED, None, IDS)
    for name, path in adapters.items():
        want = logprobs_of(FAMILY, SEED, path, IDS)
        assert distance(scores(harness, name), want) < NEAR, name
        assert distance(want, base) > 100 * NEAR, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_has_the_bits_that_it_has_alone(folder: Path, adapters: dict[str, Path], dtype: str) -> None:
    """Requests without an adapter, or with one of other modules, have the bits of a server without `kv_b_proj`'s."""
    names = [None, *adapters, None, "r8", "other"]
    batch = list(zip(asks(len(names)), names, strict=True))
    settings = ROOMY | {"dtype": dtype, "disable_radix_cache": True}
    alone = served(folder, adapters, **settings)
    want = [answers(alone, [each])[0] for each in batch]
    for chunk in (-1, 7):
        together = served(folder, adapters, **settings | {"chunked_prefill_size": chunk})
        assert_same(answers(together, batch), want)
    plain = served(folder, {"other": adapters["other"]}, **settings)
    without = [index for index, name in enumerate(names) if name in (None, "other")]
    assert_same([answers(plain, [batch[index]])[0] for index in without], [want[index] for index in without])


class Calls:
    """Counts calls of the operator, which otherwise computes as before."""

    def __init__(self, operator: Callable[..., torch.Tensor]) -> None:
        self.operator, self.count = operator, 0

    def __call__(self, *given: Any) -> torch.Tensor:
        self.count += 1
        return self.operator(*given)


def test_a_step_without_adapters_makes_no_calls_more(folder: Path, adapters: dict[str, Path]) -> None:
    harness = served(folder, adapters, disable_radix_cache=True)
    harness.scheduler.runner.recorded = None
    slots = [each.lora for each in _latent_heads(harness)]
    calls = Calls(slots[0]._ops.add_head_lora)
    for each in slots:
        each._ops = each._ops.replace(add_head_lora=calls)
    scores(harness, None)
    assert calls.count == 0
    scores(harness, "r8")
    assert calls.count == 2 * len(slots), "one call for queries and one for values in each layer"


def _latent_heads(harness: Harness) -> list[Any]:
    layers = harness.scheduler.runner.state.model.named_layers()
    return [layer for _, layer in layers if isinstance(layer, latent_heads.LatentHeads)]


def test_a_slot_is_written_anew(folder: Path, adapters: dict[str, Path]) -> None:
    """The version that takes a slot keeps nothing of the one before, which had a greater rank."""
    harness = served(folder, {"poet": adapters["r64"]}, max_loras_per_batch=1)
    harness.scheduler.runner.state.adapters.load("poet", read_adapter(adapters["r1"]))
    assert distance(scores(harness, "poet"), logprobs_of(FAMILY, SEED, adapters["r1"], IDS)) < NEAR


def test_two_ranks_split_the_heads(folder: Path, adapters: dict[str, Path]) -> None:
    paths = ",".join(f"{name}={path}" for name, path in adapters.items())
    settings = {"enable_lora": True, "lora_paths": paths, "enable_return_routed_experts": False}
    with ParallelHarness(folder, tp_size=2, **settings) as harness:
        for name in ("r8", "other"):
            (result,) = harness.generate([IDS], {"max_new_tokens": 4}, lora_name=name)
            want = logprobs_of(FAMILY, SEED, adapters[name], [*IDS, *result.token_ids])[len(IDS) - 1 :]
            assert distance(result.logprobs, want) < NEAR


# --- mistakes are noticed ---------------------------------------------------------------------------------------------


def _exchanged(b: torch.Tensor) -> torch.Tensor:
    """Return B with the rows for keys and for values of each head exchanged."""
    by_head = b.unflatten(0, (4, -1))
    return torch.cat((by_head[:, 16:], by_head[:, :16]), 1).flatten(0, 1)


def _shifted(b: torch.Tensor) -> torch.Tensor:
    return b.unflatten(0, (4, -1)).roll(1, 0).flatten(0, 1)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [_exchanged, _shifted])
def test_rows_of_other_heads_are_noticed(
    folder: Path,
    adapters: dict[str, Path],
    wrong: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = LatentSlots.write
    monkeypatch.setattr(LatentSlots, "write", lambda self, slot, part, a, b: write(self, slot, part, a, wrong(b)))
    harness = served(folder, {"r8": adapters["r8"]})
    assert distance(scores(harness, "r8"), logprobs_of(FAMILY, SEED, adapters["r8"], IDS)) > 10 * NEAR


@pytest.mark.mutant
@pytest.mark.parametrize("left_out", ["add_to_queries", "add_to_values"])
def test_a_half_that_is_left_out_is_noticed(
    folder: Path, adapters: dict[str, Path], left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentSlots, left_out, lambda self, out, hidden, slots: out)
    harness = served(folder, {"r8": adapters["r8"]})
    assert distance(scores(harness, "r8"), logprobs_of(FAMILY, SEED, adapters["r8"], IDS)) > 10 * NEAR
