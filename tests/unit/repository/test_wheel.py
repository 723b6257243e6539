"""The wheel and the source distribution: what they contain and need, and the commands outside the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.wheels import ROOT, build, copy_of_tree, lockstep, names_in, unpacked

PACKAGES = ("lockstep_rl", "rollout", "capture", "weight_sync", "eplb")
LIGHT = {"numpy", "safetensors", "msgspec", "httpx", "rich", "zstandard", "xxhash", "blake3"}
ENGINE = {
    "pyyaml",
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "fastapi",
    "pydantic",
    "uvicorn",
    "pyzmq",
    "prometheus-client",
}
TYPED = """
from lockstep_rl import AsyncClient, Client, GenerationOutput, WeightSender, force_routes

def use(client: Client, output: GenerationOutput) -> None:
    reveal_type(client)
    reveal_type(WeightSender(client).refresh)
    output.no_such_field
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(wheel, tmp_path_factory.mktemp("site"))


def requirements(wheel: Path, extra: str) -> set[str]:
    """Return the names of the packages that an extra brings, or without an extra (an empty one) the installation."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    found = set()
    for line in metadata.get_all("Requires-Dist") or []:
        stated = re.search(r'extra == "(\w+)"', line)
        if (stated[1] if stated else "") == extra:
            found.add(re.match(r"[\w-]+", line)[0])  # type: ignore[index]
    return found


def test_a_wheel_has_every_module_marker_and_bundled_folder(wheel: Path) -> None:
    names = names_in(wheel)
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert not wanted - names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    bundled = {"examples/demo/questions.txt", "examples/minimal_trainer.py", "benchmarks/eplb_plan.py"}
    assert {f"lockstep_rl/bundled/{name}" for name in bundled} <= names
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == set(PACKAGES), "nothing else lies at the top of site-packages"
    assert not [name for name in names if "shipped/" in name or name.endswith((".pyc", ".so"))]
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_client_and_the_trainer_bring_no_engine(wheel: Path) -> None:
    assert requirements(wheel, "") == LIGHT
    assert requirements(wheel, "engine") == ENGINE
    assert {"lockstep-rl", "pytest"} <= requirements(wheel, "dev")


def test_a_wheel_with_operators_is_for_its_platform_and_any_python(tree: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    (shipped / "torch-2.13").mkdir(parents=True)
    (shipped / "sources").write_text("0\n")
    (shipped / "torch-2.13/avx2.so").write_bytes(b"\x7fELF GLIBC_2.2.5 GLIBC_2.34 GLIBC_2.9\0")
    made = build("wheel", tree, tmp_path / "dist", LOCKSTEP_SHIPPED=str(shipped))
    assert re.search(r"-py3-none-manylinux_2_34_\w+\.whl$", made.name)
    assert {"rollout/kernels/shipped/sources", "rollout/kernels/shipped/torch-2.13/avx2.so"} <= names_in(made)


def test_a_source_distribution_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", tree, tmp_path)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", root, tmp_path / "dist")
    assert names_in(again) == names_in(wheel)


def test_commands_of_a_wheel_run_outside_the_tree(site: Path, tmp_path: Path) -> None:
    made = lockstep(site, tmp_path, "make-checkpoint", "checkpoint")
    assert made.returncode == 0, made.stderr
    files = list((tmp_path / "checkpoint").iterdir())
    assert {path.name for path in files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert len({path.stat().st_mode for path in files}) == 1, "one mode: who may read one may read all (N10)"
    planned = lockstep(site, tmp_path, "eplb-plan", "--help")
    assert planned.returncode == 0 and "usage: lockstep eplb-plan" in planned.stdout
    foreign = tmp_path / "examples"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("raise RuntimeError('a folder of the user')\n")
    assert lockstep(site, tmp_path, "make-checkpoint", "--help").returncode == 0


@pytest.mark.full
def test_a_demo_of_a_wheel_runs_outside_the_tree(site: Path, tmp_path: Path) -> None:
    done = lockstep(site, tmp_path, "demo", timeout_s=600)
    assert done.returncode == 0 and "checks ok" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_a_bench_of_a_wheel_runs_outside_the_tree(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lockstep(site, tmp_path, "make-checkpoint", "checkpoint")
    words = ("--model-path", "checkpoint", "--batch-sizes", "1", "--output-len", "24")
    done = lockstep(site, tmp_path, "bench", *words, timeout_s=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_type_checker_outside_the_tree_sees_the_types(site: Path, tmp_path: Path) -> None:
    """Mypy reads an installed package only if it is marked by `py.typed`."""
    (tmp_path / "user.py").write_text(TYPED)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "wheel.pth").write_text(f"{site}\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(environment / "bin/python")]
    command += ["--disable-error-code", "import-not-found", "user.py"]

    def check(cache: str) -> str:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        words = [*command, "--cache-dir", cache]
        return subprocess.run(
            words, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=600, check=False
        ).stdout

    found = check("cache")
    assert 'Revealed type is "rollout.client.client.RolloutClient"' in found, found
    assert '"GenerationOutput" has no attribute "no_such_field"' in found and "py.typed" not in found
    marker = site / "lockstep_rl/py.typed"
    marker.rename(marker.with_name("untyped"))
    assert "py.typed" in check("other-cache"), "without the marker nothing has a type"
    marker.with_name("untyped").rename(marker)
