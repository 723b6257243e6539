"""`--json-model-override-args`, or `--hf-overrides`: settings in the place of those in config.json."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, args_of_call, server_args_from_namespace
from rollout.core.errors import BadRequest, StartupError, UnsupportedFeature
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.families.registry import load_model_config, model_config_from_dict
from rollout.http.server_info import flag_words, launch_command, resolved_args
from rollout.integrations.openrlhf import AsyncEngineArgs
from rollout.numerics import use_engine_numerics
from rollout.server.engine import Engine
from tests.config_judge import rotation_of
from tests.family_zoo import family_checkpoint, family_model, published_config
from tests.http_harness import live_server
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


# --- merged settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("stated", ["rope_parameters", "rope_scaling", "rope_theta"])
def test_scaling_is_merged_with_the_theta_of_the_file(key: str, stated: str) -> None:
    """B7: wherever the file states its rotation, and whichever name the override has."""
    raw = {**published_config("qwen3"), "max_position_embeddings": 512}
    raw[stated] = 1e6 if stated == "rope_theta" else {"rope_type": "default", "rope_theta": 1e6}
    config = model_config_from_dict(raw, overrides={key: YARN})
    edited = {**published_config("qwen3"), "max_position_embeddings": 512, "rope_scaling": {**YARN, "rope_theta": 1e6}}
    assert config == model_config_from_dict(edited)
    assert rotation_of(config).theta == 1e6 and config.max_position_embeddings == 2048
    again = model_config_from_dict(raw, overrides={key: {**YARN, "rope_theta": 5e5}})
    assert rotation_of(again).theta == 5e5


def test_of_scaling_of_the_same_kind_only_what_is_given_changes() -> None:
    raw = published_config("deepseek_v3")
    rope = {**raw["rope_parameters"], "factor": 16.0}
    assert model_config_from_dict(raw, overrides={"rope_scaling": {"factor": 16.0}}) == model_config_from_dict(
        {**raw, "rope_parameters": rope}
    )


def test_scaling_of_another_kind_leaves_nothing_of_the_first() -> None:
    raw = published_config("llama")
    found = model_config_from_dict(raw, overrides={"rope_parameters": {"type": "linear", "factor": 2.0}})
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": raw["rope_parameters"]["rope_theta"]}
    assert found == model_config_from_dict({**raw, "rope_parameters": linear})


@pytest.mark.parametrize("overrides", [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_scaling_can_be_taken_away(overrides: dict[str, Any]) -> None:
    raw = published_config("llama")
    plain = {"rope_type": "default", "rope_theta": raw["rope_parameters"]["rope_theta"]}
    assert model_config_from_dict(raw, overrides=overrides) == model_config_from_dict({**raw, "rope_parameters": plain})


@pytest.mark.parametrize(
    ("name", "overrides", "edited"),
    [
        ("qwen3", {"rope_theta": 7e4}, {"rope_theta": 7e4}),
        ("qwen3", {"max_position_embeddings": 4096}, {"max_position_embeddings": 4096}),
        ("qwen3", {"torch_dtype": "float16"}, {"dtype": "float16"}),
        ("qwen3", {"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-5}),
        ("qwen3", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ("qwen3", {"num_hidden_layers": 2}, {"num_hidden_layers": 2}),
        ("qwen3_moe", {"num_experts_per_tok": 2}, {"num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_local_experts": 4}, {"num_experts": 4}),
        ("deepseek_v3", {"num_experts": 32}, {"n_routed_experts": 32}),
        ("glm4_moe", {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}),
        ("gpt_oss", {"sliding_window": 64}, {"sliding_window": 64}),
    ],
)
def test_an_override_is_the_edited_file(name: str, overrides: dict[str, Any], edited: dict[str, Any]) -> None:
    raw = published_config(name)
    assert model_config_from_dict(raw, overrides=overrides) == model_config_from_dict({**raw, **edited})
    assert model_config_from_dict(raw, overrides=overrides) != model_config_from_dict(raw)


@pytest.mark.parametrize("inside", [True, False])
def test_of_a_model_that_sees_the_text_model_is_meant(inside: bool) -> None:
    """SGLang's way is to name the setting alone, vLLM's to name it inside of text_config."""
    raw = published_config("qwen3_5 that sees")
    given: dict[str, Any] = {"rope_parameters": YARN, "rms_norm_eps": 1e-5}
    text = {**raw["text_config"], "rope_parameters": {**YARN, "rope_theta": 1e4}, "rms_norm_eps": 1e-5}
    found = model_config_from_dict(raw, overrides={"text_config": given} if inside else given)
    assert found == model_config_from_dict({**raw, "text_config": text})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scalling": YARN}, "this model has no setting 'rope_scalling'; did you mean 'rope_scaling'?"),
        ({"rope_scaling": {**YARN, "facter": 2}}, "rope_scaling has no setting 'facter'; did you mean 'factor'?"),
        ({"n_group": 4}, "this model has no setting 'n_group'"),
        ({"text_config": {"rms_eps": 1}}, "this model has no setting 'rms_eps'"),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
            "and rope_parameters .* differ",
        ),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4 and num_local_experts is 8"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_parameters have factor 2.0 but rope_type 'default'"),
        ({"architectures": ["NoSuchModel"]}, "architecture NoSuchModel is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
    ],
)
def test_an_override_that_nothing_reads_or_that_contradicts_itself_is_refused(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        model_config_from_dict(published_config("qwen3_moe"), overrides=overrides)


def test_an_override_of_a_key_that_the_engine_does_not_read_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = {**published_config("qwen3"), "attention_dropout": 0.0}
    with caplog.at_level(logging.WARNING):
        assert model_config_from_dict(raw, overrides={"attention_dropout": 0.1}) == model_config_from_dict(raw)
    assert "--json-model-override-args: attention_dropout has no effect on this engine" in caplog.text


# --- the setting of the server ---------------------------------------------------------------------------------------


def parsed(*words: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return server_args_from_namespace(parser.parse_args(["--model-path", "m", *words]))


@pytest.mark.parametrize("flag", ["--json-model-override-args", "--hf-overrides"])
def test_both_flags_are_one_setting(flag: str) -> None:
    args = parsed(flag, json.dumps({"rope_scaling": YARN}))
    assert args.model_overrides == {"rope_scaling": YARN}
    assert json.loads(resolved_args(args)["json_model_override_args"]) == {"rope_scaling": YARN}
    words = flag_words({flag.removeprefix("--").replace("-", "_"): {"rope_scaling": YARN}})
    assert parsed(*words).model_overrides == args.model_overrides
    assert "--json-model-override-args" in launch_command(args)
    assert parsed().model_overrides == {} and parsed(flag, "{}").model_overrides == {}


def test_server_info_shows_settings_as_they_were_given() -> None:
    args = ServerArgs(model_path="m", quantization="fp8", base_gpu_id=2)
    shown = resolved_args(args)
    assert (shown["quantization"], shown["base_gpu_id"]) == ("fp8", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[1]", "must be a JSON object, got '\\[1\\]'"), ("yarn", "is not JSON")],
)
def test_what_is_no_json_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"--json-model-override-args {message}"):
        parsed("--hf-overrides", text)


@pytest.mark.parametrize("name", ["hf_overrides", "json_model_override_args"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_call_in_python_takes_either_name_and_an_object(name: str, as_text: bool) -> None:
    args = args_of_call({"model_path": "m", name: json.dumps(YARN) if as_text else YARN})
    assert args.model_overrides == YARN and dataclasses.is_dataclass(args)
    with pytest.raises(StartupError, match="hf_overrides and json_model_override_args are the same setting"):
        args_of_call({"model_path": "m", "hf_overrides": {}, "json_model_override_args": "{}"})


def test_openrlhf_s_engine_takes_them_by_vllm_s_name() -> None:
    settings = AsyncEngineArgs(model="m", hf_overrides={"rope_scaling": YARN}).settings
    assert parsed(*flag_words(settings)).model_overrides == {"rope_scaling": YARN}
    with pytest.raises(BadRequest, match="does not have these arguments of vLLM's engine: hf_overrides"):
        AsyncEngineArgs(model="m", hf_overrides=lambda config: config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "dense", 1)


def edited_copy(folder: Path, target: Path, **settings: Any) -> Path:
    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | settings))
    return target


def logprobs_of(engine: Engine) -> list[float]:
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    ids = list(range(5, 60))
    answer = engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    assert isinstance(answer, dict)
    meta = answer["meta_info"]
    return [entry[0] for entry in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])]


def test_an_engine_in_process_computes_with_them(folder: Path, tmp_path: Path) -> None:
    """B7: the engine computes the bits of an edited file, which differ from the bits without an override."""
    rope = {**YARN, "original_max_position_embeddings": 32}
    edited = edited_copy(folder, tmp_path / "edited", rope_scaling=rope)
    common = {"dtype": "float32", "max_total_tokens": 512}
    found = [
        Engine(model_path=str(folder), hf_overrides={"rope_scaling": rope}, **common),
        Engine(model_path=str(edited), **common),
        Engine(model_path=str(folder), **common),
    ]
    assert found[0].ready.context_length == 128
    overridden, right, plain = (logprobs_of(engine) for engine in found)
    assert overridden == right != plain


def test_a_server_says_what_it_was_told(folder: Path) -> None:
    overrides = json.dumps({"max_position_embeddings": 96})
    with live_server(folder, json_model_override_args=overrides) as live:
        assert live.client.get("/server_info").json()["json_model_override_args"] == overrides
        assert live.client.get("/model_info").json()["config_digest"] == load_model_config(folder).digest


# --- silent disagreements -------------------------------------------------------------------------------------------


def test_a_refresh_from_disk_reads_the_file_as_the_start_did(folder: Path, tmp_path: Path) -> None:
    """The trainer's folder has the configuration without the override, or with it; one of another model is refused."""
    rope = {**YARN, "original_max_position_embeddings": 32}
    overrides = json.dumps({"rope_parameters": rope})
    harness = Harness(folder, enable_return_routed_experts=False, json_model_override_args=overrides)

    def answer(path: Path) -> Any:
        return harness.control(UpdateWeightsFromDiskReqInput, model_path=str(path), weight_version="2")

    assert answer(folder).success
    assert answer(edited_copy(folder, tmp_path / "with", rope_scaling=rope)).success
    refused = answer(edited_copy(folder, tmp_path / "other", rms_norm_eps=1e-2))
    assert not refused.success and "norm.eps" in refused.message
    plain = Harness(folder, enable_return_routed_experts=False)
    refused = plain.control(UpdateWeightsFromDiskReqInput, model_path=str(tmp_path / "with"), weight_version="2")
    assert not refused.success and "rotary.scaling" in refused.message


def test_a_trainer_s_model_with_another_configuration_is_refused(tmp_path: Path) -> None:
    """By the digest in /model_info: engine numerics read the model's own configuration."""
    rope = {"rope_parameters": {**YARN, "original_max_position_embeddings": 32, "rope_theta": 1e4}}
    folder = family_checkpoint(tmp_path / "model", "qwen3", 1)
    served = load_model_config(folder, rope).digest
    model = family_model("qwen3", 1)
    with pytest.raises(UnsupportedFeature, match="the engine computes by the configuration"):
        use_engine_numerics(model, dtype=torch.float32, allow_inexact=True, config_digest=served)
    with use_engine_numerics(model, dtype=torch.float32, allow_inexact=True) as numerics:
        assert numerics.config_digest == load_model_config(folder).digest != served
    with use_engine_numerics(
        family_model("qwen3", 1, **rope), dtype=torch.float32, allow_inexact=True, config_digest=served
    ):
        pass
