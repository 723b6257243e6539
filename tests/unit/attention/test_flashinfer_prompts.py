"""The module that FlashInfer computes prompts with, on the stand-in: FlashAttention 3 or 2, the same on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.attention.flashinfer import FlashInferBackend
from rollout.attention.flashinfer_kinds import GroupedHeads
from rollout.attention.registry import ATTENTION_BACKENDS, create_attention_backend
from rollout.core.messages.io_struct import GetStateReqInput
from rollout.core.specs.layer_specs import FullKV, KVKind, LatentKV, WindowKV
from rollout.memory.kv_pool import KVPool
from tests.attention_steps import AttentionSteps, LayerCase, Layout
from tests.flashinfer_stand_in import stand_in
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
PLAIN = "head_dim_qk_64_use_swa_False_sm90"
LAYERS: list[KVKind | None] = [FullKV(2, 64), None, WindowKV(2, 64, 5)]


def backend_of(
    layers: list[KVKind | None], stored: torch.dtype = HALF, *, is_hopper: bool = True, built: set[str] | None = None
) -> FlashInferBackend:
    library = stand_in()
    library.utils.is_hopper, library.jit.built = is_hopper, built
    return FlashInferBackend(KVPool(8, layers, HALF, stored=stored), library, library.Event)


def prompts_of(backend: FlashInferBackend, other_ranks: bool = True) -> str:
    """Return what prompts run, after a vote in which the other ranks vote as is given."""
    backend.settle(lambda mine: mine and other_ranks)
    return backend.prompts


def test_prompts_run_flash_attention_3_where_it_is_there() -> None:
    assert prompts_of(backend_of(LAYERS)) == "FlashAttention 3"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another device": ({"is_hopper": False}, "FlashInfer has no other module for heads of 64"),
    "keys in FP8": ({"stored": FP8}, "keys in torch.float8_e4m3fn on this device"),
    "another size of heads": ({"layers": [FullKV(2, 64), FullKV(2, 96)]}, "for heads of 96"),
    "latents": ({"layers": [LatentKV(128, 64)]}, "latents have modules of their own"),
    "no module": ({"built": set()}, f"module {PLAIN} is not built"),
    "no module of windows": ({"built": {PLAIN}}, "module head_dim_qk_64_use_swa_True_sm90 is not built"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_runs_flash_attention_2(name: str) -> None:
    given, reason = REFUSED[name]
    found = prompts_of(backend_of(**{"layers": LAYERS} | given))
    assert found.startswith("FlashAttention 2: ") and reason in found


@pytest.mark.parametrize("mine", [True, False])
def test_one_rank_without_it_is_enough(mine: bool) -> None:
    """The reason is the own one of a rank without the module.  A rank that has it names the others."""
    found = prompts_of(backend_of(LAYERS, is_hopper=mine), other_ranks=False)
    assert found.startswith("FlashAttention 2: ") and found.endswith("another rank of the engine has none") == mine


def test_all_ranks_vote_whatever_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without the package takes plain torch: the others must not wait for its vote."""
    votes: list[bool] = []
    barrier = Barrier(3, timeout=20.0)

    def all_agree(mine: bool) -> bool:
        votes.append(mine)
        barrier.wait()
        return all(votes)  # the first vote has a False, and so have all

    made: list[Any] = []
    library = stand_in()
    library.utils.is_hopper = True
    monkeypatch.setattr(FlashInferBackend, "obstacle", staticmethod(lambda kv, available: None))
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "Event", library.Event)

    def rank(name: str) -> None:
        ranks: Any = SimpleNamespace(all_agree=all_agree)
        made.append(create_attention_backend(name, KVPool(8, LAYERS, HALF), True, ranks))

    threads = [Thread(target=rank, args=(name,)) for name in ("flashinfer", "flashinfer", "torch_native")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(votes) == [False] * 4 + [True] * 2  # none has FlashAttention 3's own module
    words = {type(each).__name__: each.prompts.partition(":")[0] for each in made}
    assert words == {"FlashInferBackend": "FlashAttention 2", "TorchNativeBackend": ""}


def test_prompts_and_decodes_of_a_step_agree_with_float64() -> None:
    """The wrapper of prompts has the chosen module, and that of decodes FlashAttention 2."""
    steps = AttentionSteps([LayerCase(FullKV(2, 64), 8), LayerCase(WindowKV(2, 64, 5), 8, has_sinks=True)], HALF)
    library = stand_in()
    library.utils.is_hopper = True
    backend = FlashInferBackend(steps.pool, library, library.Event)
    backend.settle(lambda mine: mine)
    steps.check(backend, Layout([(0, 0, 9), (3, 17, 30)], [(5, 70), (4, 8)]))
    assert [kind._extend.backend for kind in backend._kinds.values()] == ["fa3", "fa3"]
    assert all(isinstance(kind, GroupedHeads) for kind in backend._kinds.values())


class OnHopper(FlashInferBackend):
    """The backend that `create_attention_backend` makes, for an engine in float32 on a CPU."""

    def __init__(self, kv: KVPool) -> None:
        library = stand_in((torch.float32,))
        library.utils.is_hopper = True
        super().__init__(kv, library, library.Event)

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None


def test_server_info_names_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", (__name__, "OnHopper"))
    folder = tiny_checkpoint(tmp_path / "model", head_dim=64)
    for name, words in (("flashinfer", "FlashAttention 3"), ("torch_native", "")):
        harness = Harness(folder, attention_backend=name, disable_native_kernels=True)
        assert harness.control(GetStateReqInput).data["prompt_attention"] == words


@pytest.mark.mutant
def test_a_choice_that_each_rank_takes_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = "FlashAttention 3"
    monkeypatch.setattr(FlashInferBackend, "settle", lambda self, _: setattr(self, "prompts", alone))
    with pytest.raises(AssertionError):
        test_one_rank_without_it_is_enough(True)
    with pytest.raises(AssertionError):
        test_what_it_does_not_take_runs_flash_attention_2("no module")
