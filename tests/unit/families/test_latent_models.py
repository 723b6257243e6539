"""Models with latent attention: configurations as published, what the cache holds, refreshes of absorbed weights, the
norms' epsilon, tensors that are left out, and more experts than a byte counts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from capture.codec import encode_npy
from capture.routed_experts import RoutedExperts
from rollout.control.weight_sources import SOURCES
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from rollout.core.messages.weights import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightsFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
)
from rollout.core.specs.layer_specs import DenseSpec, LatentAttentionSpec, LatentKV, MoESpec, YarnScaling
from rollout.core.specs.model_config import ModelConfig, with_latent_norm_eps
from rollout.families.registry import model_config_from_dict
from rollout.memory.kv_pool import KVPool, kv_bytes_per_token
from tests import family_zoo
from tests.family_zoo import family_checkpoint, family_config, family_model
from tests.forward_harness import ForwardHarness
from tests.invariance import Ask, Server, assert_same, compute_threads
from tests.kernels import native_ops
from tests.loopback_refresh import LoopbackTrainer
from tests.model_zoo import load_tiny
from tests.scheduler_harness import Harness

LATENT = ["deepseek_v3", "deepseek_v3, Moonlight", "deepseek_v3, all sparse", "glm4_moe_lite"]
IDS = torch.randint(0, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()

# The fields of the published config.json that describe the model.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def _attention(config: ModelConfig) -> LatentAttentionSpec:
    (spec,) = {layer.attention for layer in config.layers}
    assert isinstance(spec, LatentAttentionSpec)
    return spec


@pytest.mark.parametrize(
    ("raw", "dense", "experts", "shared", "ignored", "token_bytes"),
    [
        (DEEPSEEK_V3, 3, 256, 2048, ("model.layers.61.",), 61 * 1152),
        (KIMI_K2, 1, 384, 2048, (), 61 * 1152),
        (MOONLIGHT, 1, 64, 2816, ("model.layers.27.",), 27 * 1152),
        (FLASH, 1, 64, 1536, ("model.layers.47.",), 47 * 1152),
    ],
    ids=["DeepSeek-V3", "Kimi-K2", "Moonlight", "GLM-4.7-Flash"],
)
def test_fields_of_published_configurations_are_read(
    raw: dict[str, Any], dense: int, experts: int, shared: int, ignored: tuple[str, ...], token_bytes: int
) -> None:
    config = model_config_from_dict(raw)
    assert [isinstance(layer.mlp, DenseSpec) for layer in config.layers].count(True) == dense
    assert all(isinstance(layer.mlp, MoESpec) for layer in config.layers[dense:])
    assert config.moe is not None and (config.num_experts, config.moe.shared_inner) == (experts, shared)
    assert config.moe.router.scaling == raw["routed_scaling_factor"]
    assert (config.moe.router.num_groups, config.moe.router.top_groups) == (raw["n_group"], raw["topk_group"])
    assert config.ignored_names == ignored
    spec = _attention(config)
    assert (spec.query_rank, spec.kv_rank, spec.value_size) == (raw["q_lora_rank"], 512, raw["v_head_dim"])
    assert (spec.rotary.dim, spec.rotary.theta, spec.rotary.interleaved) == (64, raw["rope_theta"], True)
    assert spec.latent_eps == 1e-6
    kept = [LatentKV(spec.kv_rank, spec.rotary.dim)] * len(config.layers)
    assert kv_bytes_per_token(kept, torch.bfloat16) == token_bytes


def test_yarn_scales_scores_by_the_square_of_its_correction() -> None:
    spec = _attention(model_config_from_dict(DEEPSEEK_V3))
    assert isinstance(spec.rotary.scaling, YarnScaling) and spec.rotary.scaling.attention_factor == 1.0
    assert math.isclose(spec.scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert math.isclose(_attention(model_config_from_dict(MOONLIGHT)).scale, 192**-0.5)


def test_both_forms_of_the_rotation_are_read() -> None:
    """transformers 5 writes `rope_parameters`, published checkpoints `rope_scaling`."""
    rope = {**DEEPSEEK_V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000.0}
    new = {**DEEPSEEK_V3, "rope_parameters": rope, "head_dim": 64, "num_local_experts": 256}
    for old in ("rope_scaling", "rope_theta", "n_routed_experts"):
        del new[old]
    assert model_config_from_dict(new) == model_config_from_dict(DEEPSEEK_V3)


def test_layers_with_experts_by_name() -> None:
    kinds = ["dense", "sparse", "dense"] + ["sparse"] * 44
    config = model_config_from_dict({**FLASH, "mlp_layer_types": kinds})
    assert [isinstance(layer.mlp, DenseSpec) for layer in config.layers[:4]] == [True, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear' is not supported"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"rope_interleave": False}, "rope_interleave false is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"n_routed_experts": None}, "config.json: "),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"n_group": 7}, "n_group"),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as refused:
        model_config_from_dict({**DEEPSEEK_V3, **change})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kinds", [["dense"] * 46, ["dense"] * 46 + ["linear"]])
def test_wrong_layer_types_are_refused(kinds: list[str]) -> None:
    with pytest.raises(StartupError, match="mlp_layer_types"):
        model_config_from_dict({**FLASH, "mlp_layer_types": kinds})


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_takes_a_latent_a_layer(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = load_tiny(family_checkpoint(tmp_path / "model", name, 0), dtype)
    assert kv_bytes_per_token(model.kv_layers, dtype) == (32 + 8) * dtype.itemsize * 3
    pool = KVPool(50, model.kv_layers, dtype)
    assert sum(tensor.nbytes for tensor in pool.tensors) == 51 * (32 + 8) * dtype.itemsize * 3  # and the padding slot
    for keys, values in zip(pool.k, pool.v, strict=True):
        keys.fill_(1)
        assert values.shape == (51, 1, 32) and values.eq(1).all()


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
def test_memory_that_was_released_comes_back(tmp_path: Path, name: str) -> None:
    """Weights come back from their copy, and the cache is empty.  It has no second part for values."""
    settings = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    harness = Harness(family_checkpoint(tmp_path / "model", name, 0), **settings)

    def answer() -> tuple[list[int], list[float]]:
        (result,) = harness.generate([IDS], {"max_new_tokens": 6})
        return result.token_ids, result.logprobs

    before, pool = answer(), harness.scheduler.runner.kv_pool
    held = sum(tensor.nbytes for tensor in pool.tensors)
    released = harness.control(ReleaseMemoryOccupationReqInput, tags=["kv_cache"])
    assert released.success and held <= released.data["num_bytes"] < 2 * held
    assert harness.control(ReleaseMemoryOccupationReqInput, tags=["weights"]).success
    assert harness.control(ResumeMemoryOccupationReqInput).success
    assert answer() == before


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("query_rank", [None, 96])
def test_heads_as_published_have_the_same_bits_in_every_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, query_rank: int | None
) -> None:
    """A request alone without a cache equals one among others with a cache, in every chunk size, beyond 512 keys."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    shape = {**family_zoo.FAMILIES["deepseek_v3"], **sizes, "q_lora_rank": query_rank, "max_position_embeddings": 1024}
    monkeypatch.setitem(family_zoo.FAMILIES, "as published", shape)
    folder = family_checkpoint(tmp_path / "model", "as published", 0)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (600, 70, 9)]
    prompts.append(prompts[0][:550] + prompts[1])
    asks = [Ask(tuple(prompt), {"max_new_tokens": 8, "temperature": 0.0}) for prompt in prompts]
    want = Server(folder, dtype, disable_radix_cache=True, skip_tokenizer_init=True).alone(asks)
    for chunk in (1, 7, 64, -1):
        for without_cache in (False, True):
            settings = {"chunked_prefill_size": chunk, "disable_radix_cache": without_cache}
            server = Server(folder, dtype, skip_tokenizer_init=True, **settings)
            with compute_threads(2 if without_cache else 1):
                got = server.together(asks, gaps=[3, 0, 40])
                assert_same(got, want)
                assert_same(server.rescored(asks, got), want)


# --- refresh ---------------------------------------------------------------------------------------------------------


def _log_probs(model: Any, backend: str = "native_cpu") -> torch.Tensor:
    return ForwardHarness(model, backend=backend).step({0: IDS})[0].log_probs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_refresh_of_what_is_absorbed_is_used_at_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """The model computes the bits that a load of the new weights computes, and returns the weights as sent."""
    old, new = (family_checkpoint(tmp_path / str(seed), "glm4_moe_lite", seed, dtype) for seed in (1, 2))
    model, sent = load_tiny(old, dtype, ops=native_ops()), load_file(new / "model.safetensors")
    before = _log_probs(model)
    absorbed = [name for name in model.weights.metas() if name.endswith("kv_b_proj.weight")]
    assert len(absorbed) == 3
    for name in absorbed:
        model.weights.write(name, sent[name])
        (place,) = model.weights.places(name)
        assert torch.equal(place.read(), sent[name])
    assert (_log_probs(model) - before).abs().max() > 1e-2
    for name in model.weights.metas():
        model.weights.write(name, sent[name])
    assert torch.equal(_log_probs(model), _log_probs(load_tiny(new, dtype, ops=native_ops())))


# --- the epsilon of latents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LATENT)
def test_the_epsilon_of_latents_is_the_trainers(tmp_path: Path, name: str) -> None:
    folder, theirs = family_checkpoint(tmp_path / "model", name, 3), family_model(name, 3)
    for key, module in theirs.named_modules():
        if key.endswith(("q_a_layernorm", "kv_a_layernorm")):
            assert module.variance_epsilon == 1e-6
            module.variance_epsilon = 0.5
    with torch.no_grad():
        want = theirs(torch.tensor([IDS])).logits[0].log_softmax(-1)
    found = {}
    for eps in (None, 0.5):
        harness = Harness(folder, latent_norm_eps=eps)
        found[eps] = _log_probs(harness.scheduler.runner.state.model)
    assert (found[0.5] - want).abs().max() < 1e-4
    assert (found[None] - want).abs().max() > 1e-2


def test_an_epsilon_that_nothing_uses_is_refused() -> None:
    with pytest.raises(StartupError, match="--latent-norm-eps: Glm4MoeForCausalLM has no latent attention"):
        with_latent_norm_eps(family_config("glm4_moe"), 1e-5)
    with pytest.raises(StartupError, match="--latent-norm-eps must be positive"):
        check_settings(ServerArgs(model_path="x", latent_norm_eps=0.0))
    config = family_config("deepseek_v3")
    assert with_latent_norm_eps(config, None) == config


# --- tensors that are left out ---------------------------------------------------------------------------------------


def _with_more_layers(folder: Path) -> Mapping[str, torch.Tensor]:
    """Add a layer that predicts several tokens to the checkpoint, with sizes of no other layer; return all tensors."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.randn(5, 7)
    tensors["model.layers.3.self_attn.kv_b_proj.weight"] = torch.full((2, 2), torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_layers_behind_the_last_are_left_out_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load, a refresh from disk, and one that announces them in its manifest leave them out, fingerprints and all."""
    folders = [family_checkpoint(tmp_path / str(seed), "deepseek_v3, Moonlight", seed) for seed in (1, 2)]
    old, new = map(_with_more_layers, folders)
    harness = Harness(folders[0], latent_norm_eps=1e-5)
    done = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folders[1]), weight_version="v2")
    assert done.success, done.message
    model = harness.scheduler.runner.state.model
    assert set(model.weights.metas()) < set(new)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(model.weights.places(name)[0].read(), new[name])

    trainer = LoopbackTrainer(old)
    monkeypatch.setitem(SOURCES, UpdateWeightsFromDistributedReqInput, trainer.source)
    begun = harness.control(BeginWeightUpdateReqInput, weight_version="v3", manifest=trainer.manifest())
    assert begun.success, begun.message
    sent = trainer.send(harness)
    assert sent.success, sent.message
    ended = harness.control(EndWeightUpdateReqInput)
    assert ended.success, ended.message
    assert torch.equal(model.weights.places(name)[0].read(), old[name])


def test_a_layer_behind_those_is_not_left_out(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "model", "deepseek_v3", 1)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"model\.layers\.4\.eh_proj"):
        Harness(folder)


# --- 384 experts -----------------------------------------------------------------------------------------------------


def test_routes_of_more_experts_than_a_byte_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "384 experts"
    shape = {**family_zoo.FAMILIES["deepseek_v3, Moonlight"], "n_routed_experts": 384, "moe_intermediate_size": 8}
    monkeypatch.setitem(family_zoo.FAMILIES, name, shape)
    folder, theirs = family_checkpoint(tmp_path / "model", name, 0), family_model(name, 0)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    harness = Harness(folder)
    (result,) = harness.generate([IDS], {"max_new_tokens": 8})
    payload = result.finished.routed_experts  # type: ignore[union-attr]
    assert payload is not None and payload.dtype == "uint16"
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, args, output: chosen.append(output[2].sort(-1).values))
        for key, module in theirs.named_modules()
        if key.endswith("mlp.gate")
    ]
    with torch.no_grad():
        theirs(torch.tensor([IDS + result.token_ids[:-1]]))
    for hook in hooks:
        hook.remove()
    want = torch.stack(chosen, dim=1).numpy()
    assert want.max() > 255
    assert np.array_equal(np.sort(result.routes, axis=-1), want)
    record = RoutedExperts(result.routes, 384, (1, 2), 3)
    assert np.array_equal(record.logical_ids_TLK, result.routes) and encode_npy(record)
