"""Flags as vLLM's and SGLang's launch scripts spell them: taken, ignored with a warning, or refused by name."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import pytest

from rollout.core.args import speculative_config
from rollout.core.args.foreign_flags import (
    ALIASES,
    HARMLESS_VALUES,
    OPPOSITES,
    REFUSED,
    VALUES_OF_SWITCHES,
    WITHOUT_EFFECT,
    own_words,
)
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, args_of_call, server_args_from_namespace
from rollout.core.errors import StartupError
from rollout.http.server_info import launch_command
from rollout.integrations.sglang_launch import serve_words
from rollout.server import serve


def settings(line: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    given = own_words(line.split())
    return server_args_from_namespace(parser.parse_args(given.words))


def test_a_launch_script_of_vllm_n14() -> None:
    """N14: `--tensor-parallel-size`, `--max-model-len` and others were unrecognized arguments."""
    args = settings(
        "org/model --tokenizer t --tensor-parallel-size 4 --max-model-len 32k --gpu-memory-utilization 0.9"
        " --max-num-seqs 64 --max-num-batched-tokens 8K --seed 0 --enforce-eager --enable-sleep-mode --dtype half"
        " --trust-remote-code --disable-log-requests --generation-config vllm --no-enable-prefix-caching"
        " --enable-expert-parallel --logprobs-mode processed_logprobs --enable-auto-tool-choice"
    )
    assert (args.model_path, args.tokenizer_path, args.tp_size, args.ep_size) == ("org/model", "t", 4, 4)
    assert (args.context_length, args.mem_fraction_static, args.max_running_requests) == (32000, 0.9, 64)
    assert (args.chunked_prefill_size, args.random_seed, args.dtype) == (8192, 0, "float16")
    assert args.disable_cuda_graph and args.enable_memory_saver and args.disable_radix_cache


def test_a_launch_script_of_sglang_n14() -> None:
    args = settings("--model m --tp 2 --ep 2 --trust-remote-code --mem-fraction-static 0.8 --schedule-policy lpm")
    assert (args.model_path, args.tp_size, args.ep_size, args.mem_fraction_static) == ("m", 2, 2, 0.8)


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("-tp 2 --enable-expert-parallel", (2, 2)),
        ("--enable-expert-parallel --tp=8", (8, 8)),
        ("--enable-expert-parallel --tp 4 --ep-size 2", (4, 2)),
        ("--enable-expert-parallel", (1, 1)),
        ("--no-enable-expert-parallel --tp 4", (4, 1)),
    ],
)
def test_expert_parallel_of_vllm_is_over_all_ranks(line: str, sizes: tuple[int, int]) -> None:
    args = settings("--model-path m " + line)
    assert (args.tp_size, args.ep_size) == sizes


@pytest.mark.parametrize(
    ("flag", "disabled"),
    [
        ("--disable-radix-cache", True),
        ("--enable-radix-cache", False),
        ("--no-disable-radix-cache", False),
        ("--enable-prefix-caching", False),
        ("--no-enable-prefix-caching", True),
        ("--no-enable-radix-cache", True),
        ("", False),
    ],
)
def test_what_is_disabled_can_be_enabled_without_a_double_negative_n15(flag: str, disabled: bool) -> None:
    """N15: `--no-disable-radix-cache` was the only way."""
    assert settings(f"--model-path m {flag}").disable_radix_cache is disabled


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("", 2048),
        ("--disable-piecewise-cuda-graph", 0),
        ("--no-disable-piecewise-cuda-graph", 2048),
        ("--piecewise-cuda-graph-max-tokens 512 --disable-piecewise-cuda-graph", 0),
    ],
)
def test_a_flag_of_sglang_captures_no_pieces(line: str, tokens: int) -> None:
    assert settings(f"--model-path m {line}").piecewise_cuda_graph_max_tokens == tokens


def test_a_flag_of_sglang_captures_no_pieces_in_a_call() -> None:
    name = "disable_piecewise_cuda_graph"
    for value, tokens in ((True, 0), (False, 2048), (None, 2048)):
        assert args_of_call({"model": "m", name: value}).piecewise_cuda_graph_max_tokens == tokens
    with pytest.raises(StartupError, match="are the same setting: give only one"):
        args_of_call({"model": "m", name: True, "piecewise_cuda_graph_max_tokens": 512})
    with pytest.raises(StartupError, match="it must be true or false"):
        args_of_call({"model": "m", name: "false"})
    with pytest.raises(StartupError, match="must not be negative"):
        args_of_call({"model": "m", "piecewise_cuda_graph_max_tokens": -1})


def test_help_shows_no_double_negative_n15() -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    assert "--no-disable" not in parser.format_help() and "--enable-overlap-schedule" in parser.format_help()
    assert settings("--model-path m").disable_overlap_schedule is None
    assert settings("--model-path m --enable-overlap-schedule").disable_overlap_schedule is False


def test_the_launch_command_has_no_double_negative_n15() -> None:
    args = settings("--model-path m --enable-overlap-schedule --no-keep-staging-memory --disable-radix-cache")
    command = launch_command(args)
    assert command == (
        "lockstep serve --model-path m --disable-radix-cache --enable-overlap-schedule --no-keep-staging-memory"
    )
    assert settings(command.removeprefix("lockstep serve ")) == args


def test_flags_that_only_tune_are_named_in_a_warning_n14(capsys: pytest.CaptureFixture[str]) -> None:
    """N14: one line names them, and the server's own refusal is the only error."""
    assert serve.main(["--model-path", "/nowhere", "--trust-remote-code", "--swap-space", "4"]) == 1
    warning, refusal = capsys.readouterr().err.splitlines()
    assert warning.endswith(
        " WARNING lockstep: these flags of vLLM or SGLang have no effect: --trust-remote-code, --swap-space"
    )
    assert "--model-path /nowhere is not a folder" in refusal


@pytest.mark.parametrize(
    ("line", "flag", "reason"),
    [
        ("--calculate-kv-scales", "--calculate-kv-scales", "come from the checkpoint or from"),
        ("--generation-config auto", "--generation-config", "send sampling parameters with each request"),
        ("--torchao-config=int4wo", "--torchao-config", "holds weights in 8 or 4 bits on CUDA"),
    ],
)
def test_what_would_change_answers_is_refused_with_a_reason(
    line: str, flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own_words(line.split()).refused[flag] == REFUSED[flag.removeprefix("--").replace("-", "_")]
    with pytest.raises(SystemExit) as caught:
        serve.main(["--model-path", "m", *line.split()])
    error, pointer = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and error.startswith(f"lockstep serve: error: {flag} ") and reason in error
    assert pointer == "Help: lockstep serve --help"
    with pytest.raises(StartupError, match=flag) as refused:
        serve_words(["--model-path", "m", *line.split()])
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--enable-nothing", "unknown flag --enable-nothing"),
        ("--port=1 stray", "unexpected word stray"),
        ("--prot 80", "unknown flag --prot; did you mean --port?"),
        ("--dtpye=half", "unknown flag --dtpye; did you mean --dtype?"),
    ],
)
def test_what_nobody_has_is_refused_by_name(line: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.main(["--model-path", "m", *line.split()])
    assert caught.value.code == 2 and capsys.readouterr().err.startswith(f"lockstep serve: error: {error}")
    with pytest.raises(StartupError):
        serve_words(["--model-path", "m", *line.split()])


@pytest.mark.parametrize(
    "line",
    [
        "folder --port 1",
        "--port 1 folder",
        "--trust-remote-code folder --port=1",
        "--disable-log-requests --port 1 --swap-space 4 folder",
        "--cuda-graph-bs 1 2 4 folder --port 1",
        "--numa-node 0 0 1 1 folder --port 1",
        "--disable-radix-cache folder --port 1",
        "--no-enable-lora folder --port 1",
        "--no-enable-multimodal folder --port 1",
    ],
)
def test_the_word_of_no_flag_is_the_model_wherever_it_stands_n13(line: str) -> None:
    """N13: a positional model was refused; a flag without a value must not take it either."""
    args = settings(line)
    assert (args.model_path, args.port) == ("folder", 1)


def test_a_value_that_begins_with_a_dash_stays_a_value() -> None:
    assert settings("folder --served-model-name=-x").served_model_name == "-x"


def test_drafts_of_vllm_are_taken_by_method() -> None:
    config = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}'
    args = settings(f"m --speculative-config {config}")
    assert (args.speculative_algorithm, args.speculative_num_draft_tokens) == ("NGRAM", 5)
    assert own_words(["m", f"--speculative-config={config}"]).unused == ["--speculative-config prompt_lookup_max"]
    with pytest.warns(UserWarning, match="speculative_config.prompt_lookup_max of vLLM or SGLang has no effect"):
        assert args_of_call({"model": "m", "speculative_config": json.loads(config)}) == args
    assert args_of_call({"model": "m", "speculative_config": None}).speculative_algorithm is None
    with pytest.raises(StartupError, match="speculative_algorithm are the same setting"):
        args_of_call({"model": "m", "speculative_algorithm": "NGRAM", "speculative_config": {"method": "ngram"}})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"method": "suffix"}, {"speculative_algorithm": "NGRAM"}),
        ({"model": "[ngram]"}, {"speculative_algorithm": "NGRAM"}),
        (
            {"model": "small", "num_speculative_tokens": 3},
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_num_steps": 3,
                "speculative_draft_model_path": "small",
            },
        ),
        (
            {"method": "deepseek_mtp", "num_speculative_tokens": 1},
            {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1},
        ),
    ],
)
def test_each_kind_of_draft_of_vllm_is_one_here(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert speculative_config.settings_of(config) == (expected, [])
    assert speculative_config.settings_of(json.dumps(config)) == (expected, [])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"method": "eagle3", "model": "m"}', "no method 'eagle3'; there are ngram, "),
        ('{"method": "ngram", "quantization": "fp8", "colour": 1}', "unknown keys colour, quantization"),
        ('{"method": "draft_model"}', "needs a model"),
        ('{"method": ["ngram"]}', "no method ['ngram']"),
        ("5", "must be an object"),
        ("[1]", "must be an object"),
        ("{", "must be JSON"),
        ("", "must be JSON"),
    ],
)
def test_drafts_of_vllm_that_are_not_here_are_refused_by_name(config: str, reason: str) -> None:
    (refusal,) = own_words(["m", f"--speculative-config={config}"]).refused.values()
    assert reason in refusal
    with pytest.raises(StartupError, match=re.escape(reason)):
        args_of_call({"model": "m", "speculative_config": config})


def test_a_draft_of_vllm_in_a_call_is_judged_like_its_text() -> None:
    with pytest.raises(StartupError, match="must be an object"):
        args_of_call({"model": "m", "speculative_config": 5})
    with pytest.raises(StartupError, match="unknown keys 5"):
        args_of_call({"model": "m", "speculative_config": {5: 1}})
    with pytest.raises(StartupError, match="speculative_config and speculative_algorithm are the same setting"):
        args_of_call({"model": "m", "speculative_config": {"method": "ngram"}, "speculative_algorithm": "NGRAM"})
    assert speculative_config.settings_of({"method": "mtp", "model": "other"})[1] == ["model"]
    assert own_words(["m", "--speculative-eagle-topk", "1"]).unused == ["--speculative-eagle-topk"]
    assert own_words(["m", "--speculative-eagle-topk", "4"]).refused


def test_a_call_in_python_takes_the_other_names_too() -> None:
    args = args_of_call({"model": "m", "tensor_parallel_size": 2, "max_model_len": 64, "seed": 5})
    assert (args.model_path, args.tp_size, args.context_length, args.random_seed) == ("m", 2, 64, 5)
    with pytest.raises(StartupError, match="model and model_path are the same setting"):
        args_of_call({"model": "m", "model_path": "m"})


def test_a_call_in_python_spells_values_as_the_command_line_does() -> None:
    args = args_of_call(
        {"model": "m", "tp": 2, "enable_expert_parallel": True, "max_model_len": "32k", "dtype": "half"}
    )
    assert (args.ep_size, args.context_length, args.dtype) == (2, 32000, "float16")
    assert args_of_call({"model": "m", "tp": 2, "enable_expert_parallel": False}).ep_size == 1
    assert args_of_call({"model": "m", "tp": 2, "ep": 1, "enable_expert_parallel": True}).ep_size == 1
    assert args_of_call({"model": "m", "enable_overlap_schedule": None}).disable_overlap_schedule is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"max_total_tokens": "many"}, "max_total_tokens: many is not a whole number"),
        ({"mem_fraction_static": "half"}, "mem_fraction_static: half is not a number"),
        ({"enable_memory_saver": "yes"}, "enable_memory_saver is yes: it must be true or false"),
        ({"dtype": "bf16"}, "dtype: bf16 is not one of auto, float32, "),
    ],
)
def test_a_value_of_a_wrong_kind_in_a_call_is_named(given: dict[str, str], error: str) -> None:
    with pytest.raises(StartupError, match=error):
        args_of_call({"model": "m"} | given)


def test_a_call_in_python_has_the_same_table() -> None:
    assert args_of_call({"model": "m", "enable_prefix_caching": False}).disable_radix_cache
    with pytest.warns(UserWarning, match="trust_remote_code of vLLM or SGLang has no effect"):
        assert args_of_call({"model": "m", "trust_remote_code": True}) == ServerArgs(model_path="m")
    with pytest.warns(UserWarning, match="enable_multimodal"):
        args_of_call({"model": "m", "enable_multimodal": False})
    for name, value, message in [
        ("enable_multimodal", True, "enable_multimodal: the server reads text"),
        ("calculate_kv_scales", True, "come from the checkpoint or from"),
        ("prot", 1, r"prot: unknown setting; did you mean port\?"),
    ]:
        with pytest.raises(StartupError, match=message):
            args_of_call({"model": "m", name: value})


def test_a_gpu_that_a_framework_names_for_a_cpu_engine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--model-path", "m", "--base-gpu-id", "3"]
    monkeypatch.delenv("LOCKSTEP_DEVICE", raising=False)
    assert serve_words([*given, "--device", "cpu"]) == ["--model-path", "m", "--device", "cpu"]
    assert serve_words(given) == given
    monkeypatch.setenv("LOCKSTEP_DEVICE", "cpu")
    assert serve_words(given) == ["--model-path", "m"]


def test_the_table_names_no_setting_of_the_server() -> None:
    own = set(ServerArgs.__dataclass_fields__)
    others = [name for names in ALIASES.values() for name in names]
    assert ALIASES.keys() <= own and set(OPPOSITES.values()) <= own
    assert not own & {*others, *OPPOSITES, *VALUES_OF_SWITCHES, *WITHOUT_EFFECT, *REFUSED, *HARMLESS_VALUES}
    assert len(others) == len(set(others)) and not WITHOUT_EFFECT & {*others, *REFUSED}
    assert HARMLESS_VALUES.keys() <= REFUSED.keys()
