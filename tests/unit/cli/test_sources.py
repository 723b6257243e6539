"""Settings of `lockstep serve` from a file, from variables and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.core.args.flag_groups import GROUPS, flag_groups
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import serve_parser, server_args_from_namespace
from rollout.core.args.sources import parse_words


def settings(argv: str, environment: dict[str, str] | None = None) -> ServerArgs:
    namespace, _ = parse_words(serve_parser(), argv.split(), environment or {})
    return server_args_from_namespace(namespace)


def notes(argv: str, environment: dict[str, str]) -> list[str]:
    return parse_words(serve_parser(), argv.split(), environment)[1]


def refusal(argv: str, environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error, which is one line, and a pointer to the help after it."""
    with pytest.raises(SystemExit) as caught:
        parse_words(serve_parser(), argv.split(), environment)
    error, pointer = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and pointer == "Help: lockstep serve --help"
    return error.removeprefix("lockstep serve: error: ")


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_command_line_wins_over_variables_and_those_over_the_file_n16(tmp_path: Path) -> None:
    """N16: there was neither a file nor a variable, but for the two keys."""
    path = written(tmp_path, "a.yaml", "model: m\nport: 1\nmax-total-tokens: 10\nnum_threads: 4\n")
    found = settings(f"--config {path} --port 3", {"LOCKSTEP_PORT": "2", "LOCKSTEP_MAX_TOTAL_TOKENS": "20"})
    assert (found.port, found.max_total_tokens, found.num_threads, found.model_path) == (3, 20, 4, "m")
    assert found.max_running_requests == ServerArgs().max_running_requests


@pytest.mark.parametrize("words", ["other", "--model-path other", "--port 1 other"])
def test_the_model_of_the_command_line_wins_too(tmp_path: Path, words: str) -> None:
    path = written(tmp_path, "a.yaml", "model: m\n")
    assert settings(f"{words} --config {path}").model_path == "other"
    assert settings(words, {"LOCKSTEP_MODEL_PATH": "m"}).model_path == "other"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    first, second = (written(tmp_path, f"{port}.yaml", f"model: m\nport: {port}") for port in (1, 2))
    assert settings("", {"LOCKSTEP_CONFIG": str(first)}).port == 1
    assert settings(f"--config={second}", {"LOCKSTEP_CONFIG": str(first)}).port == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "tensor_parallel_size: 2\nenable-eplb: true\nep: 2\nhf_overrides:\n  rope_theta: 5.0\n"),
        ("a.json", '{"tp": 2, "enable_eplb": true, "ep-size": 2, "json_model_override_args": {"rope_theta": 5.0}}'),
        ("a.toml", "tp_size = 2\nenable_eplb = true\nep_size = 2\nhf_overrides = {rope_theta = 5.0}\n"),
    ],
)
def test_each_format_holds_the_same(tmp_path: Path, name: str, text: str) -> None:
    found = settings(f"m --config {written(tmp_path, name, text)}")
    assert (found.tp_size, found.ep_size, found.enable_eplb) == (2, 2, True)
    assert found.model_overrides == {"rope_theta": 5.0}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "prot: 1", "unknown key prot; did you mean port?"),
        ("a.yaml", "port: abc", "--port: abc is not a whole number"),
        ("a.yaml", "port: [1]", "port must be one text or number"),
        ("a.yaml", "port: true", "port must be one text or number"),
        ("a.yaml", "enable_eplb: 1", "enable_eplb is 1: it must be true or false"),
        ("a.yaml", "dtype: bfloat", "did you mean bfloat16?"),
        ("a.yaml", "calculate_kv_scales: true", "--calculate-kv-scales of vLLM or SGLang is not taken: scales of KV"),
        ("a.yaml", "tp: 1\ntp_size: 2", "tp and tp_size are the same setting; give only one"),
        ("a.yaml", "port: 1\nport: 2", "the key port is given twice"),
        ("a.json", '{"port": 1, "port": 2}', "the key port is given twice"),
        ("a.yaml", "port: 1\n  x: [", "line 2: mapping values are not allowed here"),
        ("a.yaml", "!!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("a.json", "{", "cannot be read"),
        ("a.toml", "port", "cannot be read"),
        ("a.yaml", "just words", "must hold one setting a line"),
        ("a.ini", "", "the name must end with one of .yaml, .yml, .json, .toml"),
        ("a.yaml", "config: b.yaml", "a file cannot name another one"),
        ("a.yaml", "api_key: 123", "api_key must be text: put it in quotes"),
        ("a.yaml", "weight_version: 2024-13-45", "has a value that is not of its kind"),
        ("a.yaml", "weight_version: @a", "line 1: found character '@' that cannot start any token"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, name, text)
    error = refusal(f"m --config {path}", {}, capsys)
    assert message in error and str(path) in error


@pytest.mark.parametrize("value", ["*hidden", "!hidden x", '!!int "hidden"', "!hid'den x", "hidden: x"])
def test_a_key_in_a_file_that_cannot_be_read_is_not_repeated(
    tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(f"m --config {written(tmp_path, 'a.yaml', f'api_key: {value}')}", {}, capsys)
    assert "a.yaml" in error and "hid" not in error.partition("a.yaml")[2]


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(f"m --config {tmp_path}/no.yaml", {}, capsys).endswith("/no.yaml: No such file or directory")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LOCKSTEP_PORT": "abc"}, "environment: --port: abc is not a whole number"),
        ({"LOCKSTEP_ENABLE_EPLB": "maybe"}, "$LOCKSTEP_ENABLE_EPLB is maybe: it must be true or false"),
        ({"LOCKSTEP_TP": "1", "LOCKSTEP_TP_SIZE": "2"}, "$LOCKSTEP_TP and $LOCKSTEP_TP_SIZE are the same setting"),
    ],
)
def test_what_is_wrong_in_a_variable_is_named(
    environment: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal("m", environment, capsys)


@pytest.mark.parametrize(("text", "is_on"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_a_variable_switches_a_setting(text: str, is_on: bool) -> None:
    assert settings("m", {"LOCKSTEP_STRICT_REQUESTS": text}).strict_requests is is_on
    assert settings("m", {"LOCKSTEP_ENABLE_PREFIX_CACHING": text}).disable_radix_cache is not is_on


def test_an_empty_variable_is_none() -> None:
    assert settings("m", {"LOCKSTEP_PORT": "", "LOCKSTEP_STRICT_REQUESTS": ""}) == ServerArgs(model_path="m")


def test_variables_that_are_no_settings_are_left_out_and_misspelled_ones_named() -> None:
    others = {"LOCKSTEP_KERNEL_CACHE": "/c", "LOCKSTEP_URL": "u", "LOCKSTEP_FLAGS": "--x", "LOCKSTEP_SERVICE_HOST": "h"}
    assert notes("m", others) == []
    assert notes("m", {"LOCKSTEP_MAX_TOTAL_TOKEN": "1"}) == [
        "$LOCKSTEP_MAX_TOTAL_TOKEN is not a setting; did you mean LOCKSTEP_MAX_TOTAL_TOKENS?"
    ]


def test_the_variable_that_kubernetes_sets_for_a_service_is_left_out() -> None:
    environment = {"LOCKSTEP_PORT": "tcp://10.0.0.7:30000", "LOCKSTEP_PORT_30000_TCP": "tcp://10.0.0.7:30000"}
    assert settings("m", environment).port == ServerArgs().port
    assert notes("m", environment) == ["$LOCKSTEP_PORT is left out: Kubernetes sets it for a Service named lockstep"]


def test_harmless_flags_of_others_in_a_file_are_named_in_a_warning(tmp_path: Path) -> None:
    text = "trust_remote_code: true\nenable_lora: false\ncudagraph_capture_sizes: [1, 2]\nload_format: auto\n"
    (line,) = notes(f"m --config {written(tmp_path, 'a.yaml', text)}", {})
    assert all(flag in line for flag in ("--trust-remote-code", "--cudagraph-capture-sizes", "--load-format"))


def test_experts_spread_over_the_ranks_that_another_place_names(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "enable_expert_parallel: true")
    assert settings(f"m --config {path}", {"LOCKSTEP_TENSOR_PARALLEL_SIZE": "4"}).ep_size == 4
    assert settings("m --tp 4", {"LOCKSTEP_ENABLE_EXPERT_PARALLEL": "1"}).ep_size == 4


def test_keys_are_read_from_each_place_and_never_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "a.yaml", "api_key: from-file\n")
    assert settings(f"m --config {path}").api_key == "from-file"
    assert settings(f"m --config {path}", {"LOCKSTEP_API_KEY": "--from-variable"}).api_key == "--from-variable"
    assert settings(f"m --config {path} --api-key flag", {"LOCKSTEP_API_KEY": "variable"}).api_key == "flag"
    key = written(tmp_path, "key", "in a file\n")
    assert settings("m", {"LOCKSTEP_API_KEY": f"@{key}"}).api_key == "in a file"
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from-variable")
    assert settings("m", {"LOCKSTEP_API_KEY": "from-variable"}).api_key == "from-variable"
    bad = written(tmp_path, "b.json", json.dumps({"api_key": ["hidden"], "port": 1}))
    assert "hidden" not in refusal(f"m --config {bad}", {}, capsys)


def test_a_server_without_a_model_is_told_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal("--port 1", {}, capsys) == "give the folder of a checkpoint: lockstep serve MODEL"


def test_every_setting_is_in_one_group_of_the_help_n12() -> None:
    """N12: 79 flags were one flat list."""
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(ServerArgs.__dataclass_fields__)
    text = serve_parser().format_help()
    positions = [text.index(f"\n{group.title}:\n") for group in flag_groups()]
    assert positions == sorted(positions)
    assert all(f"  {flag.name}" in text for group in flag_groups() for flag in group.flags)
    assert "usage: lockstep serve MODEL [flags]\n" in text and "--no-disable" not in text
