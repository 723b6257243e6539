"""One value for each setting of a `config.json`, wherever it stands: as transformers reads it, or refused."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.errors import StartupError
from rollout.core.specs import config_json
from rollout.core.specs.layer_specs import Llama3Scaling
from rollout.families.registry import model_config_from_dict
from tests.config_judge import UNUSABLE, difference, ours, rotation_of
from tests.family_zoo import FAMILIES, family_checkpoint, family_model, published_config
from tests.forward_harness import ForwardHarness
from tests.model_zoo import load_tiny
from tests.tiers import examples

# One configuration of each family, without its settings of the rotation.
ALONE = [name for name in FAMILIES if "," not in name and "sees" not in name]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "default": {"rope_type": "default"},
    "yarn": YARN,
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 2.0},
}
LEFT_OUT = object()


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """transformers warns of most of these."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def bare(name: str) -> dict[str, Any]:
    raw = published_config(name)
    for key in ("rope_parameters", "partial_rotary_factor"):
        raw.pop(key, None)
    return raw


def rotations() -> Iterator[Any]:
    """Yield every kind of value that may stand under either key."""
    yield from (LEFT_OUT, None, {})
    for rope in KINDS.values():
        yield rope
        yield {**rope, "rope_theta": 5e5}
        yield {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    yield {**KINDS["default"], "partial_rotary_factor": 0.5, "rope_theta": 5e5}
    yield {**YARN, "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    yield {"rope_type": "dynamic", "factor": 2.0}


def with_rotation(raw: Mapping[str, Any], scaling: Any, parameters: Any, theta: float | None) -> dict[str, Any]:
    stated = {"rope_scaling": scaling, "rope_parameters": parameters, "rope_theta": theta or LEFT_OUT}
    return {**raw, **{key: value for key, value in stated.items() if value is not LEFT_OUT}}


# --- the rotation ----------------------------------------------------------------------------------------------------


@pytest.mark.full(but="llama")
@pytest.mark.parametrize("name", ALONE)
def test_every_combination_of_rotations_is_transformers_or_refused(name: str) -> None:
    """B5: `rope_scaling`, `rope_parameters` and `rope_theta`, each of many forms; 972 combinations a family."""
    raw, taken = bare(name), 0
    for scaling, parameters, theta in itertools.product(rotations(), rotations(), (None, 1e4, 5e5)):
        case = with_rotation(raw, scaling, parameters, theta)
        assert difference(case) is None, case
        taken += not isinstance(ours(case), str)
    assert taken > 150


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "qwen2", "glm4_moe"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_rotation_in_one_place_is_taken(name: str, key: str, kind: str) -> None:
    """B5, B7: with theta inside or outside, and under the older name of its kind."""
    old = {("type" if k == "rope_type" else k): v for k, v in KINDS[kind].items()}
    found = [
        model_config_from_dict({**bare(name), key: {**KINDS[kind], "rope_theta": 5e5}}),
        model_config_from_dict({**bare(name), key: {**KINDS[kind], "rope_theta": 5e5}, "rope_theta": 5e5}),
        model_config_from_dict({**bare(name), key: old, "rope_theta": 5e5}),
    ]
    assert found[0] == found[1] == found[2]
    assert rotation_of(found[0]).theta == 5e5


def test_scaling_that_a_user_adds_to_a_saved_checkpoint_is_applied() -> None:
    """B5: transformers 5 saved the plain rotation; a user added the model card's scaling."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    raw = {**bare("llama"), "rope_parameters": plain, "rope_scaling": LLAMA3}
    spec = rotation_of(model_config_from_dict(raw))
    assert isinstance(spec.scaling, Llama3Scaling) and spec.theta == 10000.0
    assert difference(raw) is None


@pytest.mark.parametrize(
    "change",
    [
        # transformers would forget the theta of the one in favour of 10000
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
        {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}, "rope_scaling": {**YARN, "rope_theta": 1e4}},
        {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": KINDS["default"]},
        {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": {**YARN, "factor": 2.0}},
    ],
    ids=["theta", "kinds", "scaled and plain", "factors"],
)
def test_two_rotations_that_differ_are_refused_with_both_names(change: dict[str, Any]) -> None:
    """B5."""
    with pytest.raises(StartupError, match=r"rope_scaling .* and rope_parameters .* differ"):
        model_config_from_dict({**bare("qwen3"), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.rope_type is 'yarn' and rope_scaling.type is"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 128},
            "position_embeddings is 128 and rope_scaling",
        ),
        ({"rope_scaling": YARN, "initial_context_length": 128}, "initial_context_length is 128 and"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters by layer type .full_attention."),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}},
            "have factor 8.0 but rope_type 'default'",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "factor must be a number above 0, got 0"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor must be a number above 0, got '4'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            "rope_theta is 1000000.0 and rope_param",
        ),
    ],
)
def test_a_rotation_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    """B5: one fact in two places, inside of one dictionary or next to it."""
    with pytest.raises(StartupError, match=message) as refused:
        model_config_from_dict({**bare("qwen3"), **change})
    assert "\n" not in str(refused.value)


def test_the_context_is_the_original_one_times_the_factor() -> None:
    """B7: published Qwen3 states 40960, and YaRN of 4 x 32768; gpt-oss states the extended context."""
    rope = {**YARN, "original_max_position_embeddings": 32768}
    raw = {**bare("qwen3"), "max_position_embeddings": 40960, "rope_theta": 1e6, "rope_scaling": rope}
    assert model_config_from_dict(raw).max_position_embeddings == 131072
    without = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    assert model_config_from_dict({**raw, "rope_scaling": without}).max_position_embeddings == 4 * 40960
    stated = {**bare("gpt_oss"), "max_position_embeddings": 1024, "rope_parameters": {**YARN, "rope_theta": 15e4}}
    assert model_config_from_dict(stated).max_position_embeddings == 1024
    assert model_config_from_dict({**raw, "rope_scaling": KINDS["linear"]}).max_position_embeddings == 40960


def test_a_key_that_nothing_reads_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    try:
        model_config_from_dict({**bare("qwen3"), "rope_scaling": {**YARN, "beta_fats": 16}})
    finally:
        logging.disable(logging.WARNING)
    assert "rope_scaling.beta_fats has no effect; did you mean 'beta_fast'?" in caplog.text


SCALED = {
    "qwen2": {**YARN, "rope_theta": 1e6, "beta_fast": 24, "beta_slow": 2.0},
    "qwen3": {**YARN, "rope_theta": 1e6},
    "qwen3_moe": {**YARN, "rope_theta": 1e4, "attention_factor": 1.3, "truncate": False},
    "llama": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5},
    "glm4_moe": {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mscale": 1.2, "mscale_all_dim": 0.8},
}


@pytest.mark.parametrize("name", list(SCALED))
def test_log_probabilities_under_scaled_rotations_are_transformers(name: str, tmp_path: Path) -> None:
    """B7: positions lie beyond the original context, so every factor and ramp of the scaling counts."""
    settings = {"rope_parameters": SCALED[name], "max_position_embeddings": 256}
    folder = family_checkpoint(tmp_path / "model", name, 5, **settings)
    ids = torch.randint(0, 320, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        right = family_model(name, 5, **settings)(torch.tensor([ids])).logits[0].log_softmax(-1)
    model = load_tiny(folder, torch.float32)
    harness = ForwardHarness(model, max_context=256)
    found = torch.cat([harness.step({0: ids[:150]})[0].log_probs, harness.step({0: ids[150:]})[0].log_probs])
    assert (found - right).abs().max() < 1e-4
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": SCALED[name]["rope_theta"]}}
    with torch.no_grad():
        wrong = family_model(name, 5, **plain)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert (found - wrong).abs().max() > 1e-2


# --- other settings --------------------------------------------------------------------------------------------------

DROPPED = (
    *("rms_norm_eps", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "n_shared_experts"),
    *("first_k_dense_replace", "tie_word_embeddings", "attention_bias", "use_qk_norm", "layer_types", "sliding_window"),
    *("partial_rotary_factor", "mlp_only_layers", "decoder_sparse_step", "rope_parameters", "swiglu_limit"),
)
OTHER_NAMES = [
    ("num_experts", "num_local_experts"),
    ("n_routed_experts", "num_local_experts"),
    ("num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "experts_per_token"),
    ("dtype", "torch_dtype"),
    ("qk_rope_head_dim", "head_dim"),
    ("hidden_act", "hidden_activation"),
]
GIVEN: list[tuple[str, Any]] = [
    ("layer_types", ["full_attention"] * 3),
    ("layer_types", ["sliding_attention"] * 3),
    ("use_sliding_window", True),
    ("use_sliding_window", False),
    ("sliding_window", 4),
    ("rms_norm_eps", 1e-5),
    ("rms_norm_eps", 1e-3),
    ("full_attention_interval", 2),
    ("mlp_layer_types", ["dense", "sparse", "sparse"]),
    ("first_k_dense_replace", 2),
    ("qk_head_dim", 40),
    ("partial_rotary_factor", 0.5),
    ("rope_theta", 12345.0),
    ("text_config", None),
    ("tie_word_embeddings", True),
    ("num_nextn_predict_layers", 2),
    ("num_mtp_layers", 3),
]


@settings(max_examples=examples(600), deadline=None)
@given(st.data())
def test_any_setting_left_out_or_given_twice_is_transformers_or_refused(data: st.DataObject) -> None:
    """B5: like a rotation, other settings have two places; and a missing key has a default of transformers."""
    raw = {**published_config(data.draw(st.sampled_from(ALONE), "family"))}
    for key in data.draw(st.lists(st.sampled_from(DROPPED), max_size=3, unique=True), "dropped"):
        raw.pop(key, None)
    for name, other in data.draw(st.lists(st.sampled_from(OTHER_NAMES), max_size=2, unique=True), "twice"):
        if name in raw:
            raw[other] = data.draw(st.sampled_from([raw[name], raw[name], None, 4, "float16"]), other)
    raw |= dict(data.draw(st.lists(st.sampled_from(GIVEN), max_size=3), "given"))
    assert difference(raw) in (None, UNUSABLE)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 16}, "num_experts is 8 and num_local_experts is 16"),
        ("deepseek_v3", {"num_local_experts": 8}, "n_routed_experts is 16 and num_local_experts is 8"),
        ("gpt_oss", {"experts_per_token": 2}, "num_experts_per_tok is 3 and experts_per_token is 2"),
        ("llama", {"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype is 'float32' and torch_dtype is 'bfloat16'"),
        (
            "llama",
            {"quantization_config": {}, "compression_config": {"quant_method": "x"}},
            "and compression_config",
        ),
        ("llama", {"compression_config": {"quant_method": "gptq"}}, "quantization_config with quant_method 'gptq'"),
        ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "quantization_config with no format"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer type 'sliding_attention' is not supported"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but num_hidden_layers is 3"),
        (
            "deepseek_v3",
            {"head_dim": 24},
            "head_dim is 24, but 8 follows from qk_nope_head_dim 16 and qk_rope_head_dim 8",
        ),
        ("deepseek_v3", {"qk_head_dim": 32}, "qk_head_dim is 32, but 24 follows"),
        ("llama", {"text_config": {"vocab_size": 4}}, "text_config is not supported for LlamaForCausalLM"),
    ],
)
def test_a_setting_with_two_values_is_refused_with_both_names(name: str, change: dict[str, Any], message: str) -> None:
    """B5: the same holds for other facts that can stand in two places."""
    with pytest.raises(StartupError, match=message) as refused:
        model_config_from_dict({**published_config(name), **change})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("torch.float", "float32"), (None, "bfloat16")])
def test_a_dtype_has_one_name(name: str | None, dtype: str) -> None:
    """Torch has two for some, and a table of sizes has one."""
    assert model_config_from_dict({**published_config("qwen3_moe"), "dtype": name}).torch_dtype == dtype


def test_equal_values_in_two_places_are_one() -> None:
    twice = {"num_local_experts": 8, "torch_dtype": "bfloat16", "dtype": "torch.bfloat16", "head_dim": None}
    raw = published_config("qwen3_moe")
    assert ours({**raw, **twice}) == ours({**raw, "dtype": "bfloat16", "head_dim": None})
    oss = {"experts_per_token": 3, "initial_context_length": 32, "num_experts": 8}
    assert ours({**published_config("gpt_oss"), **oss}) == ours(published_config("gpt_oss"))


SEES = "qwen3_5 that sees"
IN_EITHER: list[tuple[str, Any]] = [
    *(setting for setting in GIVEN if setting[0] != "text_config"),
    *(("rope_scaling", rope) for rope in rotations() if rope is not LEFT_OUT),
    *(("rope_parameters", rope) for rope in rotations() if rope is not LEFT_OUT),
    *(("vocab_size", 320), ("vocab_size", 64), ("dtype", "float16"), ("num_local_experts", 4)),
]


@settings(max_examples=examples(600), deadline=None)
@given(st.data())
def test_any_setting_beside_or_inside_of_the_text_model_is_transformers_or_refused(data: st.DataObject) -> None:
    raw = published_config(data.draw(st.sampled_from([SEES, "qwen3_5_moe that sees"]), "family"))
    for name, value in data.draw(st.lists(st.sampled_from(IN_EITHER), max_size=3), "given"):
        place = raw["text_config"] if data.draw(st.booleans(), f"{name} inside") else raw
        place[name] = copy.deepcopy(value)
    assert difference(raw) in (None, UNUSABLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False and text_config.tie_word_embeddings is True"),
        ({"rope_scaling": {**YARN, "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_theta": 5.0}, "rope_parameters"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps stands outside of text_config"),
        ({"vocab_size": 64}, "vocab_size is 64 and text_config.vocab_size is 320"),
        ({"dtype": "float16"}, "dtype is 'float16' and text_config.dtype is 'float32'"),
    ],
)
def test_a_setting_beside_the_text_model_s_is_equal_or_refused(change: dict[str, Any], message: str) -> None:
    raw = published_config(SEES)
    raw["text_config"] = {**raw["text_config"], "dtype": "float32"}
    assert not isinstance(ours(raw), str)
    with pytest.raises(StartupError, match=message):
        model_config_from_dict({**raw, **change})
    equal = {"vocab_size": 320, "tie_word_embeddings": True, "dtype": "float32"}
    assert ours({**raw, **equal}) == ours(raw)


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["parameters first", "theta of the loser", "spellings unread"])
def test_a_wrong_reading_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "parameters first":
        first: Callable[..., Any] = lambda stated, *_: dict(next(iter(reversed(stated.values())), {}))  # noqa: E731
        monkeypatch.setattr(config_json, "_one_rotation", first)
    elif wrong == "theta of the loser":
        merged: Callable[..., Any] = lambda stated, *_: {k: v for r in reversed(stated.values()) for k, v in r.items()}  # noqa: E731
        monkeypatch.setattr(config_json, "_one_rotation", merged)
    else:
        monkeypatch.setattr(config_json, "_CANONICAL", {"n_routed_experts": "num_experts"})
        assert difference({**published_config("deepseek_v3"), "num_local_experts": 8}) is not None
        return
    cases = itertools.product(rotations(), rotations(), (None, 1e4, 5e5))
    assert any(difference(with_rotation(bare("llama"), *case)) is not None for case in cases)
