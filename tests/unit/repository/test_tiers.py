"""The tier of a test follows from its markers, and agrees with docs/testing.md."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

import pytest

from tests.tiers import Turns, tier_of, unknown_cases

ROOT = Path(__file__).resolve().parents[3]
DOC = (ROOT / "docs" / "testing.md").read_text()
FILES = [*ROOT.glob("tests/unit/*/test_*.py"), *ROOT.glob("tests/integration/test_*.py")]


def test_each_test_file_has_a_name_of_its_own() -> None:
    """Pytest imports files by their base names; it collects only one of two that share a name."""
    names = [path.name for path in FILES]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


class Item:
    """A test as pytest collects it: `markers`, the closest first."""

    def __init__(self, name: str, *markers: pytest.MarkDecorator) -> None:
        self.name, self.location = name, ("tests/unit/test_x.py", 1, name)
        self._markers = [marker.mark for marker in markers]

    def iter_markers(self, name: str | None = None) -> list[pytest.Mark]:
        return [marker for marker in self._markers if name in (None, marker.name)]


full, mutant, gate = pytest.mark.full, pytest.mark.mutant, pytest.mark.gate


@pytest.mark.parametrize(
    ("item", "tier"),
    [
        (Item("test_x"), "gate"),
        (Item("test_x", pytest.mark.parametrize, pytest.mark.serial), "gate"),
        (Item("test_x", full), "full"),
        (Item("test_x", mutant, full), "mutant"),
        (Item("test_x", gate, full), "gate"),
        (Item("test_x[tp2]", full(but="tp2")), "gate"),
        (Item("test_x[tp2-3]", full(but="tp2")), "gate"),
        (Item("test_x[tp24]", full(but="tp2")), "full"),
        (Item("test_x[dp2]", full(but="tp2")), "full"),
        (Item("test_x[dp2]", full(but=("tp2", "dp2"))), "gate"),
        (Item("test_x", full(but="tp2")), "full"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_closest_marker_decides(item: Item, tier: str) -> None:
    assert tier_of(item) == tier  # type: ignore[arg-type]


def test_a_case_that_no_test_has_is_named() -> None:
    marker = full(but=("tp2", "tp3"))
    items = [Item("test_x[tp2]", marker), Item("test_x[tp4]", marker)]
    assert unknown_cases(items) == ["tests/unit/test_x.py: tp3"]  # type: ignore[arg-type]


def test_a_serial_test_is_alone(tmp_path: Path) -> None:
    """Each process opens the files itself, so objects of their own are as good as processes."""
    events: list[str] = []

    def play(name: str, *, alone: bool) -> threading.Thread:
        def run() -> None:
            with Turns(tmp_path).enter(alone=alone):
                events.append(name)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    with Turns(tmp_path).enter(alone=False):
        play("beside", alone=False).join(5)
        assert events == ["beside"]
        serial = play("serial", alone=True)
        serial.join(0.2)
        later = play("later", alone=False)  # waits behind the serial one
        later.join(0.2)
        assert events == ["beside"]
    serial.join(5)
    later.join(5)
    assert events == ["beside", "serial", "later"]


def _marks(node: ast.Module | ast.FunctionDef) -> set[str]:
    """Return the tier markers of a function, or of a module's `pytestmark`; `full(but=...)` counts as `part`."""
    if isinstance(node, ast.FunctionDef):
        found = node.decorator_list
    else:
        assigned = [n for n in node.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
        found = [mark for n in assigned for mark in (n.value.elts if isinstance(n.value, ast.List) else [n.value])]
    named = [re.fullmatch(r"pytest\.mark\.(gate|full|mutant)(\(but=.*)?", ast.unparse(mark)) for mark in found]
    return {"part" if match[2] else match[1] for match in named if match}


def _tiers(path: Path) -> dict[str, set[str]]:
    """Return the tiers of each test function of a file; `*`: of the file."""
    tree = ast.parse(path.read_text())
    return {"*": _marks(tree)} | {node.name: _marks(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_test_has_two_tiers() -> None:
    doubtful = {f"{p.name}::{name}": marks for p in FILES for name, marks in _tiers(p).items() if len(marks) > 1}
    assert doubtful == {}


def test_the_gate_holds_what_the_documentation_says() -> None:
    named = re.findall(r"^\| .* \| `(tests/\S+)::(\w+)` \|$", DOC, re.MULTILINE)
    assert len(named) > 20
    for path, name in named:
        tiers = _tiers(ROOT / path)
        assert name in tiers, f"{path}::{name}"
        closest = tiers[name] or tiers["*"]
        assert closest <= {"gate", "part"}, f"{path}::{name} is in {closest}"


def test_files_that_run_in_full_alone_are_listed() -> None:
    (listed,) = re.findall(r"^\* \*\*Whole files\*\*:(.*?)^\* ", DOC, re.MULTILINE | re.DOTALL)
    whole = {_short(path) for path in FILES if _tiers(path)["*"] == {"full"}}
    assert set(re.findall(r"`([\w/]+)`", listed)) == whole - {"kernels/sanitizers"}


def _short(path: Path) -> str:
    """Return `package/name` of a unit test's file, and the name of a server test's."""
    name = path.stem.removeprefix("test_")
    return name if path.parent.name == "integration" else f"{path.parent.name}/{name}"
