"""`lockstep_rl`: its names, what they need, and foreign packages in the place of this project's."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep_rl
from lockstep_rl._origin import OWN_LINE, PACKAGES
from rollout.client import RolloutClient
from rollout.core.version import VERSION
from tests.model_zoo import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[3]
OWN = {"MissingPackage", "PackageClash"}
# What a light installation does not have.
ENGINE_ONLY = (
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "fastapi",
    "pydantic",
    "uvicorn",
    "zmq",
    "prometheus_client",
)
LIGHT = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ENGINE_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run(code: str, *path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with these folders first on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def typed_names() -> set[str]:
    """Return the names that a type checker sees."""
    tree = ast.parse((ROOT / "lockstep_rl/__init__.py").read_text())
    (block,) = (one for one in tree.body if isinstance(one, ast.If))
    return {alias.asname or "" for one in block.body if isinstance(one, ast.ImportFrom) for alias in one.names}


def test_every_name_is_listed_typed_and_loads() -> None:
    assert set(lockstep_rl.__all__) == typed_names() | OWN == set(lockstep_rl._PLACES) | OWN
    assert all(getattr(lockstep_rl, name) is not None for name in lockstep_rl.__all__)
    assert lockstep_rl.Client is RolloutClient and lockstep_rl.__version__ == VERSION
    assert set(lockstep_rl.__all__) <= set(dir(lockstep_rl))
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = lockstep_rl.Cleint  # type: ignore[attr-defined]


def test_clients_outputs_and_errors_need_no_engine() -> None:
    names = sorted(
        name for name in lockstep_rl.__all__ if lockstep_rl._PLACES.get(name, "").startswith("rollout.client")
    )
    names += [
        "RoutedExperts",
        "SamplingMask",
        "TokenLogprobs",
        "HiddenStates",
        "LockstepError",
        "CaptureError",
        "WeightSyncError",
    ]
    done = run(
        f"{LIGHT}\nimport lockstep_rl\nfor name in {names}: getattr(lockstep_rl, name)\nprint('torch' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr
    assert "Client" in names and len(names) > 20


def test_a_trainer_needs_torch_and_for_engine_numerics_transformers() -> None:
    names = ["WeightSender", "WeightUpdate", "RefreshReport", "force_routes", "record_routes", "masked_logprobs"]
    blocked = tuple(name for name in ENGINE_ONLY if name != "torch")
    code = f"import lockstep_rl\nfor name in {names}: getattr(lockstep_rl, name)\nprint('loaded')"
    done = run(LIGHT.replace(repr(ENGINE_ONLY), repr(blocked)) + code)
    assert done.stdout == "loaded\n", done.stderr
    servers = ("fastapi", "pydantic", "uvicorn", "zmq", "prometheus_client")
    code = "import lockstep_rl; lockstep_rl.use_engine_numerics; print('loaded')"
    done = run(LIGHT.replace(repr(ENGINE_ONLY), repr(servers)) + code)
    assert done.stdout == "loaded\n", done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WeightSender", "lockstep_rl.WeightSender needs the package torch, which is not installed: pip install torch"),
        ("force_routes", "lockstep_rl.force_routes needs the package torch, which is not installed: pip install torch"),
        ("Engine", "which is not installed: pip install 'lockstep-rl[engine]'"),
        ("use_engine_numerics", "which is not installed: pip install 'lockstep-rl[engine]'"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(name: str, words: str) -> None:
    done = run(f"{LIGHT}\nfrom lockstep_rl import {name}")
    assert done.returncode == 1 and words in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("lockstep_rl._origin.MissingPackage")


@pytest.mark.parametrize("command", ["serve", "demo", "bench"])
def test_a_command_without_the_engine_names_the_extra(command: str, tmp_path: Path) -> None:
    words = [command, "--model-path", str(tiny_checkpoint(tmp_path / "model"))] if command != "demo" else [command]
    done = run(f"{LIGHT}\nfrom lockstep_rl.command import main\nsys.argv[1:] = {words}\nsys.exit(main())")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"lockstep: error: lockstep {command} needs the package ")
    assert done.stderr.splitlines()[-1].endswith("which is not installed: pip install 'lockstep-rl[engine]'")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages as a wheel installs them."""
    site = tmp_path / "site"
    for name in (*PACKAGES, "lockstep_rl"):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    return site


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_foreign_package_before_ours_is_one_clear_line(name: str, kind: str, installed: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "trainer"
    foreign.mkdir()
    file = foreign / name / "__init__.py" if kind == "package" else foreign / f"{name}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("value = 1\n")
    done = run("from lockstep_rl import Client", foreign, installed, cwd=tmp_path)
    clash = (
        f"lockstep-rl needs its own package {name}, but Python finds {file} first. "
        f"Rename that one, or remove its folder from sys.path or put {installed} before it"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"lockstep_rl._origin.PackageClash: {clash}"
    command = run(
        "import sys; from lockstep_rl.command import main; sys.exit(main())", foreign, installed, cwd=tmp_path
    )
    assert command.returncode == 1 and command.stderr == f"lockstep: error: {clash}\n"
    after = run("import lockstep_rl; lockstep_rl.Client; print('ours')", installed, foreign, cwd=tmp_path)
    assert after.stdout == "ours\n", after.stderr


def test_a_foreign_package_that_is_loaded_already_is_noticed(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "eplb.py").write_text("value = 1\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import eplb; sys.path.pop(0)"
    done = run(f"{code}; from lockstep_rl import Client", installed, cwd=installed)
    assert f"Python finds {tmp_path / 'eplb.py'} first" in done.stderr.splitlines()[-1]


def test_a_package_that_was_written_over_ours_is_noticed(installed: Path, tmp_path: Path) -> None:
    (installed / "eplb/__init__.py").write_text('"""Another project\'s."""\n')
    done = run("from lockstep_rl import Client", installed, cwd=tmp_path)
    assert "another project has written over" in done.stderr.splitlines()[-1]
    assert all(OWN_LINE in (ROOT / name / "__init__.py").read_text() for name in PACKAGES)
