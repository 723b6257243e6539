"""SGLang's serving benchmark, with each of its backends that this server answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.framework import Framework
from tests.server_process import ServerProcess

FRAMEWORK = Framework(
    name="sglang.bench_serving", packages=("sglang",), shimmed=("stubs for SGLang's kernels, which it imports",)
)
STUBS = [
    *("triton", "sgl_kernel", "flashinfer", "tvm_ffi", "torchvision", "IPython", "gguf", "compressed_tensors"),
    *("sentencepiece", "torch_memory_saver"),
]
PROGRAM = f"""
import sys, transformers
from tests.integrations import stubs
stubs.install(*{STUBS!r})
from sglang.benchmark.serving import cli_main
cli_main()
"""
REQUESTS, PROMPT, ANSWER = 6, 32, 8


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm"])
def test_run(backend: str, server: ServerProcess, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.jsonl"
    words = [
        *("--backend", backend, "--base-url", server.url, "--model", str(checkpoint), "--tokenizer", str(checkpoint)),
        *("--dataset-name", "random-ids", "--num-prompts", str(REQUESTS), "--random-input-len", str(PROMPT)),
        *("--random-output-len", str(ANSWER), "--random-range-ratio", "1", "--output-file", str(output)),
        *("--disable-tqdm", "--warmup-requests", "1"),
    ]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(output.read_text().splitlines()[-1])
    assert result["completed"] == REQUESTS and result["total_output_tokens"] == REQUESTS * ANSWER
