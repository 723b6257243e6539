"""SGLang's serving benchmark, with each of its backends that this server answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers  # noqa: F401  before anything is stubbed: it asks which packages there are

from tests.integrations import stubs
from tests.integrations.framework import Framework
from tests.server_process import ServerProcess

stubs.install(
    *("triton", "sgl_kernel", "flashinfer", "tvm_ffi", "torchvision", "IPython", "gguf", "compressed_tensors"),
    *("sentencepiece", "torch_memory_saver"),
)
from sglang.benchmark.serving import cli_main  # noqa: E402

FRAMEWORK = Framework(
    name="sglang.bench_serving", packages=("sglang",), shimmed=("stubs for SGLang's kernels, which it imports",)
)
REQUESTS, PROMPT, ANSWER = 6, 32, 8


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_a_run_completes_every_request(
    backend: str, server: ServerProcess, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "result.jsonl"
    words = [
        *("--backend", backend, "--base-url", server.url, "--model", str(checkpoint), "--tokenizer", str(checkpoint)),
        *("--dataset-name", "random-ids", "--num-prompts", str(REQUESTS), "--random-input-len", str(PROMPT)),
        *("--random-output-len", str(ANSWER), "--random-range-ratio", "1", "--output-file", str(output)),
        *("--disable-tqdm", "--warmup-requests", "1"),
    ]
    monkeypatch.setattr(sys, "argv", ["serving", *words])
    cli_main()
    result = json.loads(output.read_text().splitlines()[-1])
    assert result["completed"] == REQUESTS and result["total_output_tokens"] == REQUESTS * ANSWER
