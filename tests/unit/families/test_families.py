"""Every model family against transformers: tokens, log-probabilities, routes; loading, refresh, ranks, batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout.core.errors import StartupError
from rollout.core.messages.io_struct import FlushCacheReqInput, GetStateReqInput
from rollout.core.specs.layer_specs import AttentionSpec, ClampedSwiGLU, LatentAttentionSpec, NormSpec, RotarySpec
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.layout import ParallelLayout
from rollout.families.registry import FAMILIES as REGISTERED
from rollout.families.registry import load_model_config, model_config_from_dict
from rollout.kernels import ops
from rollout.kernels.operators import OPERATORS
from rollout.kernels.ops import plain_ops
from rollout.layers.linear import Linear
from rollout.model.decoder import DecoderForCausalLM
from tests import model_zoo
from tests.family_zoo import FAMILIES, family_checkpoint, family_model
from tests.forward_harness import ForwardHarness, StepOutput
from tests.invariance import Ask, Server, any_differs, assert_same
from tests.kernels import native_ops
from tests.model_zoo import load_tiny
from tests.parallel_engine import MIXED, largest_difference, one_rank, several_ranks
from tests.scheduler_harness import Harness
from weight_sync.errors import UnknownTensorError
from weight_sync.intake import load_weights
from weight_sync.ledger import WeightLedger
from weight_sync.staging import DirectSink
from weight_sync.tensor_meta import TensorMeta

SEEDS = [0, 1, 2]
LENGTH = 40


CASES = [
    pytest.param((name, seed), marks=[pytest.mark.full] if seed else [], id=f"{name} {seed}")
    for name in FAMILIES
    for seed in SEEDS
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, Path]:
    name, seed = request.param
    return name, seed, family_checkpoint(tmp_path_factory.mktemp("family") / "model", name, seed)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("family") / "model", family, 7)


def _ids(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _ours(model: DecoderForCausalLM, ids: list[int], backend: str) -> StepOutput:
    """Run a prefill in two chunks, then decode token by token."""
    harness, half = ForwardHarness(model, backend=backend), len(ids) // 2
    steps = [harness.step({0: ids[: half // 2]})[0], harness.step({0: ids[half // 2 : half]})[0]]
    steps += [harness.step(decodes={0: token})[0] for token in ids[half:]]
    return StepOutput(torch.cat([s.log_probs for s in steps]), torch.cat([s.routes for s in steps]))


def _theirs(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return log-probabilities [T, V], and by MoE layer the ids of the chosen experts [T, K], best first."""
    chosen: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        weights_TK, ids_TK = output[1], output[2]
        order_TK = weights_TK.argsort(dim=-1, descending=True, stable=True)
        chosen.append(ids_TK.gather(1, order_TK))

    hooks = [m.register_forward_hook(note) for k, m in model.named_modules() if k.endswith(("mlp.gate", "mlp.router"))]
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    return log_probs, chosen


def _best_first(config: ModelConfig, routes_TLK: torch.Tensor, chosen: list[torch.Tensor]) -> torch.Tensor:
    """Return our routes in the order of their weights.  With a correction bias experts are listed by biased score."""
    assert config.moe is not None
    if not config.moe.router.correction_bias:
        return routes_TLK
    assert torch.equal(routes_TLK.sort(-1).values, torch.stack(chosen, dim=1).sort(-1).values)
    return torch.stack(chosen, dim=1)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_log_probabilities_and_routes_agree_with_transformers(case: tuple[str, int, Path], compiled: bool) -> None:
    name, seed, path = case
    ids, theirs = _ids(seed), family_model(name, seed)
    ops, backend = (native_ops(), "native_cpu") if compiled else (plain_ops(), "torch_native")
    model = load_tiny(path, torch.float32, ops=ops)
    ours = _ours(model, ids, backend)
    log_probs, chosen = _theirs(theirs, ids)
    assert (ours.log_probs - log_probs).abs().max() < 1e-4
    assert torch.equal(ours.log_probs.argmax(-1), log_probs.argmax(-1))
    assert len(chosen) == ours.routes.shape[1]
    if chosen:
        ordered = _best_first(model.config, ours.routes, chosen)
        assert torch.equal(ordered, torch.stack(chosen, dim=1))


# Windows of 7 and of 128, states with snapshots every 64 tokens, latents beyond several blocks.
LONG = ["gpt_oss", "gpt_oss, long window", "qwen3_next", "qwen3_5_moe", "deepseek_v3"]


@pytest.mark.full
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_parity_of_long_prompts_and_of_hits_within_them(tmp_path: Path, name: str, compiled: bool) -> None:
    long = {"max_position_embeddings": 1024}
    path, theirs = family_checkpoint(tmp_path / "model", name, 5, **long), family_model(name, 5, **long)
    harness = Harness(path, chunked_prefill_size=100, max_running_requests=8, disable_native_kernels=not compiled)
    prompt = _ids(5, 600)
    branches = [prompt, [*prompt[:500], *_ids(6, 70)], prompt[:400]]
    for number, branch in enumerate(branches):
        (result,) = harness.generate([branch], {"max_new_tokens": 5})
        assert result.finished is not None and (result.finished.cached_tokens >= 256) == (number > 0)
        log_probs, chosen = _theirs(theirs, [*branch, *result.token_ids])
        rows = log_probs[len(branch) - 1 : -1]
        assert result.token_ids == rows.argmax(-1).tolist()
        expected = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert (torch.tensor(result.logprobs) - expected).abs().max() < 1e-4
        routes_TLK = torch.from_numpy(result.routes.astype("int64"))
        ordered = _best_first(harness.scheduler.runner.state.model.config, routes_TLK, [x[:-1] for x in chosen])
        assert torch.equal(ordered, torch.stack([x[:-1] for x in chosen], dim=1))
    harness.check_idle()
    state = harness.control(GetStateReqInput).data
    kept = name != "deepseek_v3"  # which has neither recurrent states nor windows
    assert (0 < state["num_used_state_rows"] < state["num_state_rows"]) == kept
    assert harness.control(FlushCacheReqInput).success
    assert harness.control(GetStateReqInput).data["num_used_state_rows"] == 0


def test_float64_agrees_to_the_last_digits(family: str, folder: Path) -> None:
    theirs, ids = family_model(family, 7).double(), _ids(3)
    model = load_tiny(folder, torch.float64)
    # transformers computes rotary angles in float32 whatever the model's dtype is, and norms with an offset, too.
    tolerance = 1e-5 if model.config.norm.weight_offset is None else 1e-4
    assert (_ours(model, ids, "torch_native").log_probs - _theirs(theirs, ids)[0]).abs().max() < tolerance


@pytest.mark.parametrize("form", ["published", "fused"])
def test_refresh_by_wire_names(family: str, folder: Path, form: str) -> None:
    """A refresh takes the names of published checkpoints or of transformers' state dict: all of them, and no others."""
    config = load_model_config(folder)
    wire: Mapping[str, torch.Tensor]
    if form == "published":
        wire = load_file(family_checkpoint(folder.parent / "next", family, 11) / "model.safetensors")
    else:
        wire = family_model(family, 11).state_dict()
    model = load_tiny(folder, torch.float32)
    names = {name for name in wire if not (config.tie_word_embeddings and name == "lm_head.weight")}
    ledger = WeightLedger(model.weights.metas())
    load_weights(
        model.weights, [(name, wire[name]) for name in sorted(names)], DirectSink(model.weights), ledger, cast=True
    )
    ledger.settle()
    ours = _ours(model, _ids(5), "torch_native")
    assert (ours.log_probs - _theirs(family_model(family, 11), _ids(5))[0]).abs().max() < 1e-4


def _attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    layers = tuple(
        replace(layer, attention=replace(layer.attention, **changes))
        if isinstance(layer.attention, AttentionSpec | LatentAttentionSpec)
        else layer
        for layer in config.layers
    )
    return replace(config, layers=layers)


def _router(config: ModelConfig, **changes: Any) -> ModelConfig:
    moe = config.moe
    assert moe is not None
    wrong = replace(moe, router=replace(moe.router, **changes))
    return replace(config, layers=tuple(replace(x, mlp=wrong if x.mlp == moe else x.mlp) for x in config.layers))


def _experts(config: ModelConfig, **changes: Any) -> ModelConfig:
    assert config.moe is not None
    wrong = replace(config.moe, **changes)
    return replace(config, layers=tuple(replace(layer, mlp=wrong) for layer in config.layers))


def _windows(config: ModelConfig, window: int | None) -> ModelConfig:
    """Return `config` with this window in the layers that have one."""
    changed = []
    for layer in config.layers:
        attention: Any = layer.attention
        changed.append(replace(layer, attention=replace(attention, window=attention.window and window)))
    return replace(config, layers=tuple(changed))


def _scaling(config: ModelConfig, **changes: Any) -> ModelConfig:
    rotary = config.layers[0].attention.rotary
    assert rotary is not None and rotary.scaling is not None
    return _attention(config, rotary=replace(rotary, scaling=replace(rotary.scaling, **changes)))


def _halves(config: ModelConfig) -> ModelConfig:
    rotary = config.layers[0].attention.rotary
    assert rotary is not None
    return _attention(config, rotary=replace(rotary, interleaved=False))


WRONG: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "other theta": ("qwen2", lambda c: _attention(c, rotary=RotarySpec(dim=16, theta=20000.0))),
    "unscaled rotation": ("llama", lambda c: _attention(c, rotary=RotarySpec(dim=16, theta=500000.0))),
    "whole heads rotated": ("glm4_moe", lambda c: _attention(c, rotary=RotarySpec(dim=16, theta=10000.0))),
    "unscaled weights": ("glm4_moe", lambda c: _router(c, scaling=1.0)),
    "weights as they are": ("glm4_moe", lambda c: _router(c, normalise=False)),
    "no groups": ("glm4_moe, no QK norm", lambda c: _router(c, num_groups=1, top_groups=1)),
    "a quarter more rotated": ("qwen3_next", lambda c: _attention(c, rotary=RotarySpec(dim=8, theta=10000.0))),
    "norms of the weight alone": ("qwen3_5", lambda c: replace(c, norm=replace(c.norm, weight_offset=0.0))),
    "top 2": ("qwen3_moe", lambda c: _router(c, top_k=2)),
    "weights divided by their sum": ("qwen2_moe", lambda c: _router(c, normalise=True)),
    "a window longer by one": ("gpt_oss", lambda c: _windows(c, 8)),
    "no window": ("gpt_oss", lambda c: _windows(c, None)),
    "a softmax over all experts": ("gpt_oss", lambda c: _router(c, scoring="softmax", normalise=False)),
    "SwiGLU": ("gpt_oss", lambda c: _experts(c, activation=None)),
    "clamped later": ("gpt_oss", lambda c: _experts(c, activation=ClampedSwiGLU(limit=2.0, alpha=1.702))),
    "another alpha": ("gpt_oss", lambda c: _experts(c, activation=ClampedSwiGLU(limit=1.5, alpha=1.0))),
    "truncated ramp": ("gpt_oss", lambda c: _scaling(c, truncate=True)),
    "scores not corrected for YaRN": ("deepseek_v3", lambda c: _attention(c, scale=24**-0.5)),
    "halves of a head rotated": (
        "deepseek_v3",
        _halves,
    ),
    "rotation of latents as it is": ("deepseek_v3, all sparse", lambda c: _scaling(c, attention_factor=1.0)),
    "all groups": ("deepseek_v3", lambda c: _router(c, top_groups=4)),
    "another scaling of weights": ("glm4_moe_lite", lambda c: _router(c, scaling=2.0)),
    "rotation as it is": ("gpt_oss", lambda c: _scaling(c, attention_factor=1.0)),
}


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_kind_is_noticed(tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = WRONG[wrong]
    path = family_checkpoint(tmp_path / "model", name, 7)
    want, _ = _theirs(family_model(name, 7), _ids(3))
    assert (_ours(load_tiny(path, torch.float32), _ids(3), "torch_native").log_probs - want).abs().max() < 1e-4
    monkeypatch.setattr(model_zoo, "load_model_config", lambda folder: change(load_model_config(folder)))
    assert (_ours(load_tiny(path, torch.float32), _ids(3), "torch_native").log_probs - want).abs().max() > 1e-2


OF_GPT_OSS = [
    *("self_attn.sinks", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    *("self_attn.o_proj.bias", "mlp.router.bias", "mlp.router.weight", "experts.3.gate_proj.bias"),
    *("experts.3.up_proj.bias", "experts.3.down_proj.bias", "experts.3.down_proj.weight"),
]


@pytest.mark.mutant
@pytest.mark.parametrize("part", OF_GPT_OSS)
def test_every_part_of_gpt_oss_counts(tmp_path: Path, part: str) -> None:
    """Without one of them parity would not hold."""
    model = load_tiny(family_checkpoint(tmp_path / "model", "gpt_oss", 7), torch.float32)
    before = _ours(model, _ids(3), "torch_native").log_probs
    (name,) = [name for name in model.weights.metas() if name.startswith("model.layers.0.") and name.endswith(part)]
    model.weights.write(name, torch.zeros(model.weights.metas()[name].shape))
    assert (_ours(model, _ids(3), "torch_native").log_probs - before).abs().max() > 1e-2


GPT_OSS = {**family_model("gpt_oss", 0).config.to_dict(), "architectures": ["GptOssForCausalLM"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "layer type 'linear_attention' is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": None}, "config.json: "),
    ],
)
def test_what_is_not_built_of_gpt_oss_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    model_config_from_dict(GPT_OSS)
    with pytest.raises(StartupError, match=message) as refused:
        model_config_from_dict({**GPT_OSS, **change})
    assert "\n" not in str(refused.value)


def test_keys_that_published_gpt_oss_checkpoints_have() -> None:
    """The keys are openai/gpt-oss-20b's: older names for the rotation and for the number of experts per token."""
    published = dict(GPT_OSS)
    rope = dict(published.pop("rope_parameters"))
    published |= {"rope_scaling": rope, "rope_theta": rope.pop("rope_theta"), "swiglu_limit": 7.0}
    published["experts_per_token"] = published.pop("num_experts_per_tok")
    config = model_config_from_dict(published)
    assert config.layers[0].attention == model_config_from_dict(GPT_OSS).layers[0].attention
    assert config.num_experts_per_tok == 3 and config.norm == NormSpec(eps=1e-5, weight_offset=0.0)
    assert config.moe is not None and config.moe.activation == ClampedSwiGLU(limit=7.0, alpha=1.702)
    windows = [layer.attention.window for layer in config.layers if isinstance(layer.attention, AttentionSpec)]
    assert windows == [7, None]


@pytest.mark.mutant
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_gates_left_open_are_noticed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = family_checkpoint(tmp_path / "model", name, 7)
    want, _ = _theirs(family_model(name, 7), _ids(3))
    project = Linear.__call__
    gated = OPERATORS["sigmoid_gate"].plain

    def wide_open(self: Linear, hidden_TD: torch.Tensor) -> torch.Tensor:
        projected = project(self, hidden_TD)
        return torch.full_like(projected, 100.0) if self.out_features == 1 else projected

    of_attention = replace(OPERATORS["sigmoid_gate"], plain=lambda x, gate: x if gate.shape[1] > 1 else gated(x, gate))
    left_open = {
        "of the shared expert": (Linear, "__call__", wide_open),
        "of attention": (ops, "OPERATORS", {**OPERATORS, "sigmoid_gate": of_attention}),
    }
    for change in left_open.values():
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            found = _ours(load_tiny(path, torch.float32), _ids(3), "torch_native").log_probs
        assert (found - want).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "other"), [("qwen3_5", "qwen3_5 that sees"), ("qwen3_5_moe that sees", "qwen3_5_moe")]
)
def test_text_has_one_content_alone_and_with_images(tmp_path: Path, name: str, other: str) -> None:
    """Each model takes the tensor names of the other; tensors that see images or predict later tokens are not kept."""
    model = load_tiny(family_checkpoint(tmp_path / "model", name, 7), torch.float32)
    wire = load_file(family_checkpoint(tmp_path / "other", other, 11) / "model.safetensors")
    assert {key.startswith("model.language_model.") for key in wire} == {True, False} or "sees" not in other
    wire |= {"mtp.norm.weight": torch.ones(64), "model.visual.patch_embed.proj.bias": torch.ones(32)}
    ledger = WeightLedger(model.weights.metas())
    load_weights(model.weights, list(wire.items()), DirectSink(model.weights), ledger, cast=True)
    ledger.settle()
    for key in ("model.layers.0.linear_attn.A_log", "model.language_model.layers.0.linear_attn.A_log"):
        assert model.weights.canonical_name(key) == "model.layers.0.linear_attn.A_log"
    with pytest.raises(UnknownTensorError):
        model.weights.split(TensorMeta("language_model.layers.0.linear_attn.A_log", torch.float32, (4,)))


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    model = load_tiny(family_checkpoint(tmp_path / "model", "glm4_moe", 0), torch.float32)
    extra = TensorMeta("model.layers.3.eh_proj.weight", torch.float32, (64, 128))
    assert model.weights.split(extra) == []
    with pytest.raises(UnknownTensorError):
        model.weights.split(extra._replace(name="model.layers.4.eh_proj.weight"))


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [((2, 1, 1), "none"), ((2, 1, 2), "none"), ((2, 2, 2), "all_to_all"), ((2, 1, 2), "all_to_all")],
    ids=["tp2", "ep2", "dp2 ep2", "scattered"],
)
def test_ranks_change_no_result(folder: Path, sizes: tuple[int, int, int], backend: str) -> None:
    tp_size, dp_size, ep_size = sizes
    if not load_model_config(folder).is_moe:
        ep_size = 1
    layout = ParallelLayout(tp_size, dp_size, ep_size, enable_dp_attention=dp_size > 1)
    found = several_ranks(folder, layout, MIXED, moe_a2a_backend=backend)
    assert largest_difference(found, one_rank(folder, MIXED)) < 1e-12


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_token_has_the_same_bits_in_every_batch(folder: Path, dtype: str) -> None:
    asks = [Ask(tuple(_ids(i, 5 + 9 * i)), {"max_new_tokens": 6, "temperature": 0.0}) for i in range(4)]
    settings = {"skip_tokenizer_init": True}
    want = Server(folder, dtype, disable_radix_cache=True, **settings).alone(asks)
    for chunk in (-1, 7):
        server = Server(folder, dtype, chunked_prefill_size=chunk, **settings)
        got = server.together(asks)
        assert_same(got, want)
        assert_same(server.rescored(asks, got), want)
    assert any_differs(want[:1], want[1:2])


def test_every_registered_family_is_in_the_zoo() -> None:
    assert {type(family_model(name, 0)).__name__ for name in FAMILIES} == set(REGISTERED)
