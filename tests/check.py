"""Check a change in two minutes: `python -m tests.check [--base REV] [--minutes 2] [--list]`, or `make check`.

It runs ruff, mypy's daemon, the language check and the tests of the gate that a change can reach.  The import graph of
this repository decides: a test is selected if it imports a changed module, directly or through other modules.  The
nearest tests run first.  `make test` runs all of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("lockstep_rl", "rollout", "weight_sync", "capture", "eplb", "tests", "examples", "benchmarks", "docs")
TIERS = ("unit", "integration")
"""Folders of tests under `tests`, in the order in which they run."""
WORKERS = 2
MARGIN = 16.0
"""Seconds before the end of the budget at which no test starts any more."""
START = 6.0
"""Seconds until pytest's workers have imported what all tests share."""
COLLECT = 0.4
"""Seconds to import a file of tests, in each worker."""
GUESS = {"unit": 4.0, "integration": 40.0}
"""Seconds that the tests of a file take if no earlier run measured them."""
OPTIONS = "-q --strict-markers"
"""The options of pyproject.toml without the one that keeps no failures."""
FAILURES = ".pytest_cache/v/cache/lastfailed"
SECONDS = ".pytest_cache/check_seconds.json"
_DEADLINE = "LOCKSTEP_CHECK_DEADLINE"
_REPORT = "LOCKSTEP_CHECK_REPORT"


# The change.


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def _revision(root: Path, *words: str) -> str | None:
    try:
        return _git(root, *words).strip() or None
    except subprocess.CalledProcessError:
        return None


def base_of(root: Path) -> str:
    """Return the merge base with main, or on main the commit before the change."""
    head = _git(root, "rev-parse", "HEAD").strip()
    bases = (_revision(root, "merge-base", "HEAD", main) for main in ("main", "origin/main"))
    base = next((found for found in bases if found), head)
    if base != head or _git(root, "status", "--porcelain"):
        return base
    return _revision(root, "rev-parse", "--verify", "HEAD~1") or head


def changed_files(root: Path, base: str) -> list[str]:
    """List the files that differ from `base`, with uncommitted and untracked ones."""
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({name for name in (changed + untracked).split("\0") if name})


def is_document(name: str) -> bool:
    return name.endswith(".md") or name.startswith("docs/")


# The import graph.  A node is a file's path; an edge leads from a file to one that it imports or reads.


def module_name(path: str) -> str:
    """Return the dotted name of a Python file, and of a package the name of its folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass
class Mentions:
    """The modules that a file imports, the prefixes of computed names and the parts of paths that it reads."""

    modules: set[str] = field(default_factory=set)
    prefixes: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)


def mentions(path: str, source: str) -> Mentions:
    """Read what a file imports and names.  A string that is exactly a module's name counts as its import."""
    found = Mentions()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            found.modules |= {start, *(f"{start}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.modules.add(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.paths |= _text(node.right)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("Path", "open", "joinpath", "glob", "rglob"):
                found.paths |= set().union(*map(_text, node.args))
            elif name == "import_module" and node.args and isinstance(node.args[0], ast.JoinedStr):
                found.prefixes |= _text(node.args[0].values[0])
    return found


def _text(node: ast.expr) -> set[str]:
    """Return the text of a literal."""
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def reads(reader: str, parts: Iterable[str], path: str) -> bool:
    """Tell whether a file that names these parts of paths reads the file at `path`.

    A part is a path, a name, a pattern or, for data, a folder above it.  Code outside `tests` reads its own folder.
    """
    folder, _, name = path.rpartition("/")
    if not reader.startswith("tests/") and not path.startswith(reader.rpartition("/")[0] + "/"):
        return False
    is_data = not path.endswith(".py") and not is_document(path)
    inside = {one for one in folder.split("/") if one not in TOPS} if is_data else set()
    wild = (one for one in parts if "*." in one or "_*" in one)
    return bool({path, name, *inside} & set(parts)) or any(fnmatch(path if "/" in one else name, one) for one in wild)


def import_graph(root: Path, changed: Sequence[str]) -> dict[str, set[str]]:
    """Build the edges of all Python files of the repository; files that were deleted are among `changed`."""
    paths = [path.relative_to(root).as_posix() for top in TOPS for path in sorted((root / top).rglob("*.py"))]
    by_name = {module_name(path): path for path in [*changed, *paths] if path.endswith(".py")}
    return {path: set(_edges(root, path, by_name, changed)) - {path} for path in paths}


def _edges(root: Path, path: str, by_name: Mapping[str, str], changed: Sequence[str]) -> Iterator[str]:
    found = mentions(path, (root / path).read_text(encoding="utf-8"))
    for name in found.modules & by_name.keys():
        parts = name.split(".")
        packages = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        yield from (by_name[one] for one in packages if one in by_name)
    for prefix in found.prefixes:
        yield from (target for name, target in by_name.items() if name.startswith(prefix))
    folders = path.split("/")[:-1]
    if path.rpartition("/")[2].startswith("test_"):
        conftests = ("/".join([*folders[:length], "conftest.py"]) for length in range(1, len(folders) + 1))
        yield from (one for one in conftests if (root / one).exists())
    yield from (one for one in changed if reads(path, found.paths, one))


def distances(graph: Mapping[str, set[str]], changed: Iterable[str]) -> dict[str, int]:
    """Count for each file the imports that lead from it to the nearest changed one."""
    importers: dict[str, set[str]] = {}
    for path, targets in graph.items():
        for target in targets:
            importers.setdefault(target, set()).add(path)
    far = dict.fromkeys(changed, 0)
    queue = deque(far)
    while queue:
        path = queue.popleft()
        for importer in importers.get(path, set()) - far.keys():
            far[importer] = far[path] + 1
            queue.append(importer)
    return far


# The tests.


def files_of_tests(root: Path, folder: str) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in (root / "tests" / folder).rglob("test_*.py"))


def last_failures(root: Path) -> set[str]:
    """Read the files whose tests failed in the last check that ran them."""
    return {nodeid.partition("::")[0] for nodeid in _read_json(root / FAILURES)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _words(path: str) -> set[str]:
    return set(re.split(r"[/._]", path)) - {"rollout", "tests", "py", "test"}


def select(root: Path, changed: Sequence[str]) -> list[str]:
    """List the files of tests that the change can reach, the nearest first and integration tests last.

    Tests that failed in the last check run first, also where the change does not reach them.  A change of documents
    alone selects the tests that read them and nothing else.
    """
    graph, failed = import_graph(root, changed), last_failures(root)
    documents_only = all(is_document(name) for name in changed)
    if documents_only:
        graph = {path: targets for path, targets in graph.items() if path.startswith("tests/")}
    far = distances(graph, changed)
    if documents_only:
        failed &= far.keys()
    words = set[str]().union(*(_words(name) for name in changed))

    def order(path: str) -> tuple[bool, int, int, str]:
        return path not in failed, far.get(path, 0), -len(words & _words(path)), path

    chosen: list[str] = []
    for folder in TIERS:
        chosen += sorted((path for path in files_of_tests(root, folder) if path in far or path in failed), key=order)
    return chosen


def next_round(files: Sequence[str], seconds: Mapping[str, float], left: float) -> list[str]:
    """Take from the front the files whose tests fit in the time that is left, and at least one."""
    chosen: list[str] = []
    used = START
    for path in files:
        used += COLLECT + seconds.get(path, GUESS[path.split("/")[1]]) / WORKERS
        if chosen and used > left:
            break
        chosen.append(path)
    return chosen


def run_tests(root: Path, files: Sequence[str], end: float) -> tuple[bool, int, int]:
    """Run tests until `end` (of `time.time`); return whether they pass, and the files and tests left out."""
    waiting, passed, unfinished = list(files), True, 0
    known: dict[str, float] = _read_json(root / SECONDS)
    while waiting and (left := end - MARGIN - time.time()) > START:
        batch = next_round(waiting, known, left)
        waiting = waiting[len(batch) :]
        code, report = _pytest(root, batch, end - MARGIN)
        passed &= code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if "seconds" not in report:
            break
        late = report["unfinished"]
        unfinished += sum(late.values())
        known |= {path: report["seconds"].get(path, 0.0) for path in batch if path not in late}
        (root / SECONDS).write_text(json.dumps(known, indent=0, sort_keys=True))
    return passed, len(waiting), unfinished


def _pytest(root: Path, files: Sequence[str], deadline: float) -> tuple[int, dict[str, Any]]:
    report = root / ".pytest_cache" / "check_report.json"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-o", f"addopts={OPTIONS}", "-p", "tests.check"]
    command += ["--ff", "--tier", "gate"]
    command += ["-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder", *files]
    environment = os.environ | {_DEADLINE: str(deadline), _REPORT: str(report)}
    return subprocess.run(command, cwd=root, env=environment).returncode, _read_json(report)


# Hooks: pytest loads this module as a plugin in the check's own runs.


class _Seconds:
    """The time of each file's tests and the tests that no worker started."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._seconds: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._seen: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._waiting |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        self._seconds[path] = self._seconds.get(path, 0.0) + report.duration
        self._seen.add(report.nodeid.partition("@")[0])

    def pytest_sessionfinish(self) -> None:
        unfinished = {name.partition("@")[0] for name in self._waiting} - self._seen
        files = Counter(name.partition("::")[0] for name in unfinished)
        self._report.write_text(json.dumps({"seconds": self._seconds, "unfinished": files}))


def pytest_configure(config: pytest.Config) -> None:
    if _REPORT in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Seconds(Path(os.environ[_REPORT])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> bool | None:
    """Start no test after the deadline."""
    return True if time.time() > float(os.environ.get(_DEADLINE, "inf")) else None


# The command.


def static_checks(root: Path, documents_only: bool) -> list[str]:
    """Run ruff, mypy's daemon and the language check; return the names of the checks that fail."""
    tools = Path(sys.executable).parent
    language = {"language": [sys.executable, "-m", "tests.language"]}
    if documents_only:
        return [name for name, command in language.items() if subprocess.run(command, cwd=root).returncode]
    (root / ".mypy_cache").mkdir(exist_ok=True)
    daemon = [str(tools / "dmypy"), "--status-file", ".mypy_cache/daemon.json", "run", "--timeout", "14400"]
    types = subprocess.Popen(daemon, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    checks = {
        "ruff check": [str(tools / "ruff"), "check", "."],
        "ruff format": [str(tools / "ruff"), "format", "--check", "--quiet", "."],
        **language,
    }
    failed = [name for name, command in checks.items() if subprocess.run(command, cwd=root).returncode]
    print(types.communicate()[0], end="", flush=True)
    return [*failed, "types"] if types.returncode else failed


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check", description="Check a change in two minutes.")
    parser.add_argument("--base", metavar="REV", help="compare with this revision (default: the merge base with main)")
    parser.add_argument("--minutes", type=float, default=2.0, help="start no test after this time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the selected files of tests and run nothing")
    options = parser.parse_args(words)
    start = time.time()
    changed = changed_files(ROOT, options.base or base_of(ROOT))
    files = select(ROOT, changed)
    if options.list:
        print(*files, sep="\n")
        return 0
    failed = static_checks(ROOT, bool(changed) and all(is_document(name) for name in changed))
    print(f"{len(changed)} files changed, {len(files)} files of tests selected", flush=True)
    passed, files_left, tests_left = run_tests(ROOT, files, start + 60 * options.minutes)
    if files_left or tests_left:
        print(f"left out by the budget: {files_left} files and {tests_left} tests of other files; `make test` runs all")
    failed += [] if passed else ["tests"]
    print(f"{'failed: ' + ', '.join(failed) if failed else 'passed'} after {time.time() - start:.0f} seconds")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
