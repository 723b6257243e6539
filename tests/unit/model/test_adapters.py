"""Adapters in a served model: parity with PEFT, bits that no neighbour changes, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.adapters.peft_folder import Adapter, LoraWeights, read_adapter
from rollout.core.errors import AdapterError, NotFound, StartupError
from rollout.layers.lora import SlotSizes
from rollout.model.adapters import AdapterTable
from rollout.scheduler.req import Req
from tests.adapters import ATTENTION, DENSE, logprobs_of, merged_logprobs, save_adapter, write_adapter
from tests.family_zoo import family_checkpoint, family_model
from tests.invariance import ROOMY, assert_same, differences
from tests.model_zoo import load_tiny, tiny_checkpoint
from tests.scheduler_harness import Harness
from tests.served_adapters import IDS, NEAR, answers, asks, distance, scores, served

SEED = 3
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FAMILIES: dict[str, Sequence[str]] = {
    "qwen3": ATTENTION + DENSE,
    "qwen2": ATTENTION + DENSE,
    "llama": ATTENTION + DENSE,
    "glm4_moe": ATTENTION,
    "deepseek_v3": LATENT,
    "deepseek_v3, Moonlight": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "glm4_moe_lite": LATENT,
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"),
    "qwen3_5": (*ATTENTION, *DENSE, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "qwen3_5_moe": (*ATTENTION, "in_proj_qkv", "in_proj_z", "out_proj", "shared_expert_gate"),
    "qwen3_moe": ATTENTION,
    "qwen2_moe": (*ATTENTION, "shared_expert_gate"),
    "gpt_oss": ATTENTION,
}
QUICK = ("qwen3", "deepseek_v3", "qwen3_5")
SETTINGS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rank 8": {"r": 8, "lora_alpha": 16},
    "rank 64": {"r": 64, "lora_alpha": 16},
    "rsLoRA": {"r": 8, "lora_alpha": 4, "use_rslora": True},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "rank_pattern": {"q_proj": 3, r".*\.1\.mlp.*": 17},
        "alpha_pattern": {"o_proj": 1, r"layers\.2\.mlp.*": 5},
    },
}


# --- parity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in FAMILIES]
)
def test_every_family_agrees_with_peft(family: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "model", family, SEED)
    adapter = save_adapter(tmp_path / "a", family, SEED, target_modules=list(FAMILIES[family]), r=8, lora_alpha=16)
    harness = served(folder, {"a": adapter})
    assert distance(scores(harness, None), base := logprobs_of(family, SEED, None, IDS)) < NEAR
    with_adapter = logprobs_of(family, SEED, adapter, IDS)
    assert distance(scores(harness, "a"), with_adapter) < NEAR
    assert distance(with_adapter, base) > 100 * NEAR, "the adapter must count"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_next"])
def test_shared_experts_agree_with_merged_weights(family: str, tmp_path: Path) -> None:
    """PEFT's judge fails here: with transformers 5 it adapts routed experts wherever it is asked for shared ones."""
    folder = family_checkpoint(tmp_path / "model", family, SEED)
    generator, modules = torch.Generator().manual_seed(0), {}
    for name, module in family_model(family, SEED).named_modules():
        if "shared_expert" in name and isinstance(module, torch.nn.Linear):
            a_RD = 0.2 * torch.randn(5, module.in_features, generator=generator)
            modules[name] = (a_RD, 0.2 * torch.randn(module.out_features, 5, generator=generator))
    harness = served(folder, {"a": write_adapter(tmp_path / "a", modules, 0.5)})
    want = merged_logprobs(family, SEED, modules, 0.5, IDS)
    assert distance(scores(harness, "a"), want) < NEAR
    assert distance(want, logprobs_of(family, SEED, None, IDS)) > 100 * NEAR


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", SEED)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of every rank and rule, for all linear layers."""
    return {
        name.replace(" ", "-"): save_adapter(
            tmp_path_factory.mktemp("adapter"), "qwen3", SEED, seed, target_modules=[*ATTENTION, *DENSE], **settings
        )
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }


def test_ranks_and_patterns_agree_with_peft(folder: Path, adapters: dict[str, Path]) -> None:
    harness = served(folder, adapters)
    for name, path in adapters.items():
        assert distance(scores(harness, name), logprobs_of("qwen3", SEED, path, IDS)) < NEAR, name


def test_plain_torch_agrees_with_peft(folder: Path, adapters: dict[str, Path]) -> None:
    harness = served(folder, adapters, disable_native_kernels=True)
    for name, path in adapters.items():
        assert distance(scores(harness, name), logprobs_of("qwen3", SEED, path, IDS)) < NEAR, name


# --- mixed batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sixteen_adapters_and_none_in_one_batch(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Each request has the bits that it has alone, and those without an adapter the bits of a server without any."""
    many = {
        f"a{i}": save_adapter(
            tmp_path / f"a{i}", "qwen3", SEED, i, r=1 + 3 * i, lora_alpha=4 + i,
            target_modules=[*ATTENTION, *DENSE][i % 3 :],
        )
        for i in range(16)
    }  # fmt: skip
    names = [None, *many, None, "a0", "a15", *[None] * 3]
    batch = list(zip(asks(len(names)), names, strict=True))
    settings = {"dtype": dtype, "disable_radix_cache": True}
    alone = served(folder, many, **ROOMY | settings)
    want = [answers(alone, [each])[0] for each in batch]
    for chunk in (-1, 7):
        together = served(folder, many, **ROOMY | settings | {"chunked_prefill_size": chunk})
        assert_same(answers(together, batch), want)
        assert_same(answers(together, batch[::-1])[::-1], want)
    plain = Harness(folder, enable_return_routed_experts=False, **ROOMY | settings)
    without = [(index, each) for index, each in enumerate(batch) if each[1] is None]
    assert_same([answers(plain, [each])[0] for _, each in without], [want[index] for index, _ in without])
    assert any(differences(*pair) for pair in pairwise(want))


def test_adapters_keep_their_dtype_where_projections_are_held_in_8_bits(
    folder: Path, adapters: dict[str, Path]
) -> None:
    """The products of projections change by the error of their format, and adapters change what they changed."""
    plain = served(folder, adapters, dtype="bfloat16")
    held = served(folder, adapters, dtype="bfloat16", cpu_linear_format="w8")
    base, adapted = (distance(scores(held, name), scores(plain, name)) for name in (None, "rank-8"))
    assert 0 < base < 0.2 and 0 < adapted < 0.2
    assert distance(scores(held, "rank-8"), scores(held, None)) > 0.5, "this adapter changes much"


@torch.inference_mode()
def test_recorded_forwards_serve_adapters(folder: Path, adapters: dict[str, Path]) -> None:
    """Steps with and without adapters have tapes of their own; both give the bits of the model in Python."""
    batch = [(ask, name) for ask, name in zip(asks(6), [None, *adapters])]
    taped = served(folder, adapters, disable_radix_cache=True)
    recorded = taped.scheduler.runner.recorded
    assert recorded is not None
    got = [answers(taped, batch), answers(taped, batch[:1]), answers(taped, batch)]
    assert recorded._tapes and not recorded._never
    in_python = served(folder, adapters, disable_radix_cache=True)
    in_python.scheduler.runner.recorded = None
    for ours, theirs in zip(got, [batch, batch[:1], batch]):
        assert_same(ours, answers(in_python, theirs))


# --- KV belongs to an adapter -------------------------------------------------------------------------------------


def of_shared_prefix(folder: Path, adapters: dict[str, Path]) -> list[float]:
    """Serve one prompt without an adapter, then with two; return how far each is from PEFT."""
    harness = served(folder, adapters)
    prompt, found = [*IDS, 7, 8], []
    for name in (None, *list(adapters)[:2]):
        answer, again = (harness.generate([prompt], {"max_new_tokens": 2}, lora_name=name)[0] for _ in range(2))
        assert answer.token_ids == again.token_ids and answer.logprobs == again.logprobs
        assert again.finished is not None and again.finished.cached_tokens > 0, "its own prefix serves it again"
        want = logprobs_of("qwen3", SEED, None if name is None else adapters[name], [*prompt, answer.token_ids[0]])
        found.append(abs(answer.logprobs[0] - want[-1]))
    return found


def test_a_prefix_serves_only_its_adapter(folder: Path, adapters: dict[str, Path]) -> None:
    assert max(of_shared_prefix(folder, adapters)) < NEAR


@pytest.mark.mutant
def test_a_cache_that_adapters_share_is_noticed(
    folder: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Req, "cache_key", property(lambda self: self.source.extra_key))
    assert max(of_shared_prefix(folder, adapters)) > 10 * NEAR


def test_the_record_names_the_adapter(folder: Path, adapters: dict[str, Path]) -> None:
    harness = served(folder, adapters)
    sent = []
    harness._append = sent.append  # type: ignore[method-assign]
    harness.generate([IDS], {"max_new_tokens": 1}, lora_name="rank-8")
    harness.generate([IDS], {"max_new_tokens": 1})
    labels = [output.adapter for output in sent]
    assert [None if label is None else (label.name, label.version) for label in labels] == [("rank-8", 0), None]
    assert labels[0].content_digest == read_adapter(adapters["rank-8"]).digest
    assert [card.label for card in harness.ready.adapters] == harness.scheduler.runner.state.adapters.labels


def test_an_unknown_adapter_ends_its_request_alone(folder: Path, adapters: dict[str, Path]) -> None:
    harness = served(folder, adapters)
    (result,) = harness.generate([IDS], {"max_new_tokens": 1}, lora_name="gone")
    assert result.finished is not None and result.finished.reason.status_code == 404
    assert "no adapter 'gone'" in (result.finished.reason.message or "")


# --- refusals -----------------------------------------------------------------------------------------------------


def lora(out: int, into: int, rank: int = 4, value: float = 0.5) -> LoraWeights:
    sides = (torch.full(shape, value, dtype=torch.float64) for shape in ((rank, into), (out, rank)))
    return LoraWeights(*sides, 1.0)


Q = "model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[dict[str, LoraWeights], str]] = {
    "a module that the model lacks": ({"model.layers.9.self_attn.q_proj": lora(64, 64)}, "to another model"),
    "another width": ({Q: lora(64, 32)}, "the model has"),
    "routed experts": ({"model.layers.1.mlp.experts.0.gate_proj": lora(32, 64)}, "routed experts"),
    "the embedding": ({"model.embed_tokens": lora(320, 64)}, "the embedding"),
    "the output head": ({"lm_head": lora(320, 64)}, "the output head"),
    "a norm": ({"model.norm": lora(64, 64)}, "is not a linear layer"),
    "a router": ({"model.layers.1.mlp.gate": lora(8, 64)}, "is not a linear layer"),
    "a rank over the slots'": ({Q: lora(64, 64, rank=9)}, "rank 9; --max-lora-rank is 8"),
    "numbers beyond the dtype": ({Q: lora(64, 64, value=1e300)._replace(scale=1e10)}, "has values beyond"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_the_model_cannot_serve_is_refused(tmp_path: Path, what: str) -> None:
    model = load_tiny(tiny_checkpoint(tmp_path))
    shape = model.weights.metas()[f"{Q}.weight"].shape
    modules, reason = WRONG[what]
    table = AdapterTable(model, SlotSizes(2, 8))
    fits = {
        "model.layers.0.self_attn.o_proj": lora(*model.weights.metas()["model.layers.0.self_attn.o_proj.weight"].shape)
    }
    if what in ("a rank over the slots'", "numbers beyond the dtype"):
        modules = {
            Q: modules[Q]._replace(a=modules[Q].a[:, :1].repeat(1, shape[1]), b=modules[Q].b[:1].repeat(shape[0], 1))
        }
    with pytest.raises(AdapterError, match=reason) as caught:
        table.load("a", Adapter(fits | modules, "digest"))
    assert "\n" not in str(caught.value) and table.labels == []
    with pytest.raises(NotFound, match="no adapter 'a'; this server has none"):
        table.find("a")
    for name in "bc":
        table.load(name, Adapter(fits, "digest"))
    with pytest.raises(AdapterError, match=r"all 2 slots are taken .*: b@0 \(newest\); c@0 \(newest\)$"):
        table.load("d", Adapter(fits, "digest"))


def test_a_start_names_the_adapter_that_it_refuses(folder: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", "llama", SEED, target_modules=["q_proj"], r=2, lora_alpha=2)
    path = other / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"self_attn", b"selfattn_"))
    with pytest.raises(StartupError, match=r"^--lora-paths b=.*other: .*to another model$"):
        served(folder, {"a": adapters["rank-8"], "b": other})
