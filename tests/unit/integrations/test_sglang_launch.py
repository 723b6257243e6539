"""SGLang's flags and `ServerArgs`, as words of this server."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import rollout.integrations
from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import add_cli_args, server_args_from_namespace
from rollout.core.errors import StartupError
from rollout.integrations.sglang_launch import serve_words, words_of

REDIRECT = Path(rollout.integrations.__file__).parent / "sglang_redirect"


def settings(words: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return server_args_from_namespace(parser.parse_args(words))


def test_the_flags_that_torchrl_passes_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--model-path m --host 127.0.0.1 --port 4000 --tp-size 2 --dp-size 1 --base-gpu-id 0 --disable-cuda-graph"
    args = settings(serve_words([*argv.split(), "--disable-custom-all-reduce", "--enable-p2p-check"]))
    assert (args.model_path, args.port, args.tp_size, args.disable_cuda_graph) == ("m", 4000, 2, True)
    assert args.disable_custom_all_reduce
    said = capsys.readouterr().err
    assert (
        "--enable-p2p-check" in said
        and "--disable-custom-all-reduce" not in said
        and "--disable-cuda-graph" not in said
    )


def test_short_names_and_equals_signs() -> None:
    args = settings(serve_words(["--model=m", "--tp", "4", "--ep=2", "--random-seed", "-1"]))
    assert (args.model_path, args.tp_size, args.ep_size, args.random_seed) == ("m", 4, 2, -1)


def test_what_the_server_lacks_is_refused_by_name() -> None:
    with pytest.raises(
        StartupError, match=r"--speculative-eagle-topk \(a draft is one chain .*\), --enable-multimodal \(the server"
    ):
        serve_words(["--model-path", "m", "--speculative-eagle-topk", "4", "--enable-multimodal", "--nccl-port", "1"])


def test_a_value_may_make_a_flag_harmless() -> None:
    assert serve_words(["--model-path", "m", "--load-format", "auto"])
    with pytest.raises(StartupError, match="--load-format"):
        serve_words(["--model-path", "m", "--load-format", "dummy"])


@dataclass
class _Args:
    """Arguments like SGLang's: everything has a default."""

    model_path: str
    tp_size: int = 1
    enable_memory_saver: bool = False
    keep_staging_memory: bool = True
    skip_server_warmup: bool = False
    dtype: str = "auto"
    max_running_requests: int | None = None
    cuda_graph_bs: list[int] | None = None


def test_server_args_are_what_differs_from_the_defaults() -> None:
    given = _Args(
        "m", tp_size=2, enable_memory_saver=True, keep_staging_memory=False, skip_server_warmup=True, cuda_graph_bs=[1]
    )
    words = words_of(given)
    assert "--dtype" not in words
    args = settings(serve_words(words))
    assert (args.tp_size, args.enable_memory_saver, args.keep_staging_memory) == (2, True, False)


@pytest.mark.full
@pytest.mark.parametrize("module", ["sglang.launch_server", "sglang.srt.entrypoints.http_server"])
def test_redirected_modules_are_the_launcher(module: str) -> None:
    code = f"import {module} as found; print(found.launch_server.__doc__)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{REDIRECT}:{Path(__file__).parents[3]}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.startswith("Serve with SGLang's `ServerArgs`"), result.stderr


@pytest.mark.full
def test_as_a_program_it_refuses_in_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "m", "--enable-multimodal"],
        env={"PYTHONPATH": f"{REDIRECT}:{Path(__file__).parents[3]}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "lockstep: error: this server does not have these flags of SGLang: "
        "--enable-multimodal (the server reads text, and architectures in config.json name the head)\n"
    )
