"""Adapters of routed experts in a served model: parity with PEFT in every layout, and bits without neighbours."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.adapters import expert_stacks
from rollout.adapters.peft_folder import Adapter, LoraWeights, read_adapter
from rollout.core.errors import AdapterError, StartupError
from rollout.layers.lora import SlotSizes
from rollout.model import adapter_places
from rollout.model.adapters import AdapterTable
from tests.adapters import ATTENTION, logprobs_of, save_adapter
from tests.expert_adapters import LAYOUTS, STACKS, configure, rewritten, shared
from tests.family_zoo import family_checkpoint
from tests.invariance import ROOMY, Ask, assert_same, differences
from tests.model_zoo import load_tiny, tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.unit.model.test_adapters import IDS, NEAR, SEED, answers, distance, scores, served

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
SETTINGS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rank 64": {"r": 64, "lora_alpha": 16},
    "rsLoRA": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": list(ATTENTION)},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"experts.gate_up_proj": 3, r"model\.layers\.1\.mlp\.experts\.down_proj": 17},
        "alpha_pattern": {"down_proj": 5},
    },
    "down alone": {"r": 4, "lora_alpha": 8, "target_parameters": [STACKS[1]]},
    "old names": {"r": 2, "lora_alpha": 4, "target_parameters": None, "target_modules": ["gate_proj", "up_proj"]},
}


def peft_adapter(folder: Path, family: str, seed: int = 1, **settings: Any) -> Path:
    given = {"r": 8, "lora_alpha": 16, "target_modules": [], "target_parameters": list(STACKS)} | settings
    return save_adapter(folder, family, SEED, seed, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", SEED)


@pytest.mark.parametrize(
    "family", [each if each == "gpt_oss" else pytest.param(each, marks=pytest.mark.full) for each in FAMILIES]
)
def test_every_family_and_layout_agrees_with_peft(family: str, tmp_path: Path) -> None:
    """One content has the same bits in all layouts."""
    folder = family_checkpoint(tmp_path / "model", family, SEED)
    paths = {"peft": peft_adapter(tmp_path / "peft", family)}
    for layout in LAYOUTS:
        paths[layout] = rewritten(paths["peft"], tmp_path / layout, layout, 8, family == "gpt_oss")
    harness = served(folder, paths, max_loras_per_batch=4)
    want = logprobs_of(family, SEED, paths["peft"], IDS)
    got = {name: scores(harness, name) for name in paths}
    assert distance(got["peft"], want) < NEAR
    assert all(each == got["peft"] for each in got.values())
    assert distance(scores(harness, None), base := logprobs_of(family, SEED, None, IDS)) < NEAR
    assert distance(want, base) > 100 * NEAR, "the adapter must count"


def test_ranks_and_patterns_agree_with_peft(folder: Path, tmp_path: Path) -> None:
    paths = {
        name.replace(" ", "-"): peft_adapter(tmp_path / name, "qwen3_moe", seed, **settings)
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }
    harness = served(folder, paths)
    plain = served(folder, paths, disable_native_kernels=True)
    for name, path in paths.items():
        want = logprobs_of("qwen3_moe", SEED, path, IDS)
        assert distance(scores(harness, name), want) < NEAR and distance(scores(plain, name), want) < NEAR, name


def test_sides_that_all_experts_share(folder: Path, tmp_path: Path) -> None:
    stacked, flat = shared(peft_adapter(tmp_path / "peft", "qwen3_moe"), tmp_path, 8)
    harness = served(folder, {"stacked": stacked, "flat": flat})
    got, want = scores(harness, "stacked"), logprobs_of("qwen3_moe", SEED, flat, IDS)
    assert got == scores(harness, "flat") and distance(got, want) < NEAR


@pytest.mark.mutant
def test_gate_and_up_in_each_other_s_place_are_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expert_stacks.of_expert

    def swapped(tensors: Any, expert: int, part: int, num_parts: int, layout: Any) -> Any:
        return right(tensors, expert, num_parts - 1 - part, num_parts, layout)

    monkeypatch.setattr(adapter_places, "of_expert", swapped)
    path = peft_adapter(tmp_path / "peft", "qwen3_moe")
    want = logprobs_of("qwen3_moe", SEED, path, IDS)
    assert distance(scores(served(folder, {"a": path}), "a"), want) > 10 * NEAR


# --- mixed batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "cpu_weight_format": "w8"}], ids=str
)
def test_adapters_of_experts_and_none_in_one_batch(folder: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    """Each request has the bits that it has alone, and those without an adapter the bits of a server without any."""
    many = {f"a{i}": peft_adapter(tmp_path / f"a{i}", "qwen3_moe", i, r=1 + 7 * i, lora_alpha=4 + i) for i in range(3)}
    many["attention"] = save_adapter(tmp_path / "b", "qwen3_moe", SEED, 9, r=2, lora_alpha=4, target_modules=["q_proj"])
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(5, 300, (n,), generator=generator).tolist()) for n in (3, 20, 9, 5, 14, 7)]
    names = [None, *many, None]
    batch = [(Ask(prompt, {"max_new_tokens": 4, "temperature": 0.0}), name) for prompt, name in zip(prompts, names)]
    settings = ROOMY | form | {"disable_radix_cache": True}
    alone = served(folder, many, **settings)
    want = [answers(alone, [each])[0] for each in batch]
    together = served(folder, many, **settings | {"chunked_prefill_size": 7})
    assert_same(answers(together, batch), want)
    assert_same(answers(together, batch[::-1])[::-1], want)
    plain = Harness(folder, enable_return_routed_experts=False, **settings)
    assert_same([answers(plain, [batch[index]])[0] for index in (0, 5)], [want[0], want[5]])
    assert all(differences(*pair) for pair in pairwise(want))


@torch.inference_mode()
def test_recorded_forwards_serve_adapters_of_experts(folder: Path, tmp_path: Path) -> None:
    adapters = {"a": peft_adapter(tmp_path / "a", "qwen3_moe")}
    batch = [(Ask((5, 9, 200, 31), {"max_new_tokens": 6, "temperature": 0.0}), name) for name in (None, "a")]
    taped, in_python = (served(folder, adapters, disable_radix_cache=True) for _ in range(2))
    recorded = taped.scheduler.runner.recorded
    in_python.scheduler.runner.recorded = None
    for asked in (batch, batch[:1], batch):
        assert_same(answers(taped, asked), answers(in_python, asked))
    assert recorded is not None and recorded._tapes and not recorded._never


# --- memory and refusals ------------------------------------------------------------------------------------------


def test_memory_is_where_the_flag_says(folder: Path, tmp_path: Path) -> None:
    path = peft_adapter(tmp_path / "a", "qwen3_moe")
    for targets, has_experts in ((None, False), ("q_proj", False), ("q_proj,down_proj", True), ("all", True)):
        harness = Harness(folder, enable_lora=True, lora_target_modules=targets, max_lora_rank=8)
        table = harness.scheduler.runner.state.adapters
        assert any(".experts." in name for name in table.places.features) == has_experts, targets
        if targets != "all":
            with pytest.raises(AdapterError, match=r"start it with --lora-target-modules all$"):
                table.prepare("a", read_adapter(path))
    with pytest.raises(StartupError, match="the model has no module 'w1'"):
        Harness(folder, enable_lora=True, lora_target_modules="q_proj,w1")


E0 = "model.layers.1.mlp.experts"
WRONG: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], str]] = {
    "another number of experts": (f"{E0}.down_proj", (5, 2, 32), (5, 48, 2), "are not of the model's 8 experts"),
    "another width": (f"{E0}.down_proj", (8, 2, 40), (8, 48, 2), "is adapted from 40 to 48 features"),
    "half of a pair": (f"{E0}.gate_up_proj", (8, 2, 48), (8, 63, 2), "are not of the model's 8 experts"),
    "an expert that the model lacks": (f"{E0}.8.gate_proj", (2, 48), (32, 2), "belongs to another model"),
    "a dense layer": ("model.layers.0.mlp.experts.down_proj", (8, 2, 32), (8, 48, 2), "to another model"),
    "a rank over the slots'": (f"{E0}.w1", (1, 9, 48), (8, 32, 9), "rank 9; --max-lora-rank is 8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_experts_cannot_serve_is_refused(what: str, tmp_path: Path) -> None:
    name, a, b, reason = WRONG[what]
    model = load_tiny(tiny_checkpoint(tmp_path, "moe_dense_first"))
    shapes = {name: list(meta.shape) for name, meta in model.weights.metas().items()}
    assert shapes[f"{E0}.0.down_proj.weight"] == [48, 32], "the sizes that these cases are made for"
    table = AdapterTable(model, SlotSizes(1, 8), wanted=lambda _: True)
    with pytest.raises(AdapterError, match=reason) as caught:
        table.load("a", Adapter({name: LoraWeights(torch.ones(a), torch.ones(b), 1.0)}, "digest"))
    assert "\n" not in str(caught.value) and table.labels == []


def test_a_stack_without_a_name_is_refused(tmp_path: Path) -> None:
    path = peft_adapter(tmp_path / "a", "qwen3_moe", target_parameters=[STACKS[1]])
    configure(path, target_parameters=None)
    with pytest.raises(AdapterError, match=r"target_parameters of adapter_config\.json must name"):
        read_adapter(path)
