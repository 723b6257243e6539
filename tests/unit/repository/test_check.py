"""The selection of `make check`, on a small made-up repository."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import check

TREE = {
    "rollout/__init__.py": "",
    "rollout/leaf/__init__.py": "",
    "rollout/leaf/one.py": "SOURCES = Path(__file__).parent / 'csrc'",
    "rollout/leaf/csrc/one.cpp": "",
    "rollout/leaf/stranger.py": "",
    "rollout/lazy.py": "import importlib\nimportlib.import_module('rollout.leaf.one')",
    "rollout/computed.py": "def f(name):\n    return import_module(f'rollout.leaf.{name}')",
    "rollout/middle.py": "from rollout.leaf import one",
    "rollout/top.py": "import rollout.middle",
    "tests/conftest.py": "",
    "tests/helper.py": "from rollout.top import thing",
    "tests/unit/test_direct.py": "from rollout.leaf.one import thing",
    "tests/unit/test_helped.py": "from tests.helper import thing",
    "tests/unit/test_lazy.py": "import rollout.lazy",
    "tests/unit/test_computed.py": "import rollout.computed",
    "tests/unit/test_stranger.py": "import rollout.leaf.stranger",
    "tests/unit/test_page.py": "TEXT = (ROOT / 'docs' / 'page.md').read_text()\nimport rollout.leaf.stranger",
    "tests/unit/test_rules.py": "FILES = (ROOT / 'rollout').rglob('*.py')",
    "tests/integration/test_server.py": "import rollout.leaf.one",
    "docs/page.md": "",
    "docs/other.md": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_folder_with_python_files_is_in_the_graph() -> None:
    listed = subprocess.run(["git", "ls-files", "*/*.py"], cwd=check.ROOT, capture_output=True, text=True, check=True)
    assert {name.partition("/")[0] for name in listed.stdout.splitlines()} == set(check.TOPS)


def names(files: list[str]) -> list[str]:
    return [Path(file).stem.removeprefix("test_") for file in files]


def test_changed_module_selects_its_importers_by_distance_and_no_stranger(root: Path) -> None:
    chosen = names(check.select(root, ["rollout/leaf/one.py"]))
    assert chosen == ["direct", "rules", "computed", "lazy", "helped", "server"]


def test_changed_stranger_selects_its_own_tests(root: Path) -> None:
    assert set(names(check.select(root, ["rollout/leaf/stranger.py"]))) == {"stranger", "page", "computed", "rules"}


def test_literal_of_import_module_is_an_import(root: Path) -> None:
    assert "lazy" in names(check.select(root, ["rollout/leaf/one.py"]))
    (root / "rollout/lazy.py").write_text("import importlib")
    assert "lazy" not in names(check.select(root, ["rollout/leaf/one.py"]))


def test_changed_package_selects_importers_of_its_modules(root: Path) -> None:
    assert {"direct", "stranger"} <= set(names(check.select(root, ["rollout/leaf/__init__.py"])))


def test_deleted_module_selects_its_importers(root: Path) -> None:
    (root / "rollout/leaf/one.py").unlink()
    assert {"direct", "lazy", "helped"} <= set(names(check.select(root, ["rollout/leaf/one.py"])))


def test_source_of_another_language_selects_tests_of_the_module_that_reads_it(root: Path) -> None:
    chosen = names(check.select(root, ["rollout/leaf/csrc/one.cpp"]))
    assert chosen[0] == "direct" and "stranger" not in chosen


def test_changed_test_stands_first_and_last_failures_before_it(root: Path) -> None:
    changed = ["rollout/leaf/one.py", "tests/unit/test_helped.py"]
    assert names(check.select(root, changed))[0] == "helped"
    failures = root / check.FAILURES
    failures.parent.mkdir(parents=True)
    failures.write_text(json.dumps({"tests/unit/test_stranger.py::test_it[a]": True, "tests/unit/test_gone.py": True}))
    assert names(check.select(root, changed))[:2] == ["stranger", "helped"]
    assert names(check.select(root, ["docs/page.md"])) == ["page"]


def test_document_selects_the_tests_that_read_it_alone(root: Path) -> None:
    assert names(check.select(root, ["docs/page.md"])) == ["page"]
    assert names(check.select(root, ["docs/other.md"])) == []
    assert "page" in names(check.select(root, ["docs/page.md", "rollout/leaf/one.py"]))


def test_conftest_selects_every_test(root: Path) -> None:
    assert len(check.select(root, ["tests/conftest.py"])) == len([name for name in TREE if "/test_" in name])


def test_no_change_selects_nothing(root: Path) -> None:
    assert check.select(root, []) == []


def test_round_takes_the_nearest_files_that_fit_and_at_least_one() -> None:
    files = [f"tests/unit/test_{letter}.py" for letter in "abc"]
    seconds = dict.fromkeys(files, 20.0)
    assert check.next_round(files, seconds, 30.0) == files[:2]
    assert check.next_round(files, seconds, 0.0) == files[:1]
    assert check.next_round(files, {}, 30.0) == files


def test_no_test_starts_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.pytest_runtest_protocol() is None
    monkeypatch.setenv("LOCKSTEP_CHECK_DEADLINE", "1.0")
    assert check.pytest_runtest_protocol() is True


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True).stdout


def test_change_is_counted_from_main_with_uncommitted_and_untracked_files(root: Path) -> None:
    git(root, "init", "-q", "-b", "main")
    for name in ("rollout/top.py", "rollout/middle.py"):
        git(root, "add", name)
        git(root, "commit", "-q", "-m", name)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "the rest")
    (root / "docs/page.md").unlink()
    assert check.changed_files(root, check.base_of(root)) == ["docs/page.md"]
    git(root, "commit", "-q", "-a", "-m", "no page")
    assert check.changed_files(root, check.base_of(root)) == ["docs/page.md"]
    git(root, "checkout", "-q", "-b", "branch")
    (root / "rollout/new.py").write_text("")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "new")
    (root / "rollout/untracked.py").write_text("")
    assert check.changed_files(root, check.base_of(root)) == ["rollout/new.py", "rollout/untracked.py"]


@pytest.mark.mutant
def test_wrong_selections_are_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without literals, and one in which each file imports each other, choose wrongly."""
    right = check.select(root, ["rollout/leaf/one.py"])
    edges = check._edges
    monkeypatch.setattr(check, "_edges", lambda *words: {*edges(*words)} - {"rollout/leaf/one.py"})
    assert set(check.select(root, ["rollout/leaf/one.py"])) < set(right)
    monkeypatch.setattr(check, "_edges", lambda root, path, by_name, changed: by_name.values())
    assert set(check.select(root, ["rollout/leaf/one.py"])) > set(right)
