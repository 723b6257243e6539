"""The soak's view of the version in force, of calls and of growth: each check finds its fault.

The check of samples is in `tests/integration/test_soak.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console

from tests.abuse.usage import MB, Usage
from tests.soak import __main__ as main
from tests.soak.calls import Calls, Ended
from tests.soak.gauges import descriptor_growth, memory_growth
from tests.soak.in_force import InForce, Possible, exactly
from tests.soak.judge import Tally
from tests.soak.play import LAYOUTS, Played
from tests.soak.report import markdown, print_report
from tests.soak.samples import Span, Violation, places
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.tensor_meta import TensorMeta

Tensors = dict[str, torch.Tensor]
OLD = {"a": torch.ones(4), "b": torch.zeros(3)}
NEW = {"a": torch.full((4,), 2.0), "b": torch.full((3,), 5.0)}
MIXED = {"a": NEW["a"], "b": OLD["b"]}


class Engine:
    """A stand-in that answers like an engine with these `tensors`."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"weight_version": "v0", "weight_epoch": 0, "content_digest": None}
        self.tensors: Tensors = OLD

    def commit(self, label: str, tensors: Tensors, epoch: int = 1) -> None:
        metas = {name: TensorMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()}
        stated = digest((metas[name], fingerprint(each)) for name, each in tensors.items())
        self.state = {"weight_version": label, "weight_epoch": epoch, "content_digest": stated}
        self.tensors = tensors

    def get(self, _: str) -> httpx.Response:
        return httpx.Response(200, json=self.state)

    def post(self, _: str, __: Any) -> httpx.Response:
        checksums = {name: fingerprint_hex(fingerprint(each)) for name, each in self.tensors.items()}
        return httpx.Response(200, json={"checksums": checksums})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def told() -> list[tuple]:
    return []


@pytest.fixture
def in_force(engine: Engine, told: list[tuple], tmp_path: Path) -> InForce:
    return InForce(engine, tmp_path, OLD, lambda *what: told.append(what), lambda when: None)  # type: ignore[arg-type]


def test_what_was_sent_is_taken_and_told(engine: Engine, in_force: InForce, told: list[tuple]) -> None:
    assert not in_force.look([exactly(NEW, "v1")])
    engine.commit("v1", NEW)
    assert in_force.look([exactly(MIXED, "v1"), exactly(NEW, "v1")])
    assert in_force.tensors is NEW and [(what, epoch) for what, epoch, *_ in told] == [("content", 0), ("content", 1)]
    in_force.check()
    engine.commit("v1~1of2", MIXED, epoch=2)
    assert in_force.look([exactly(NEW, "v1"), Possible(MIXED, r"v1~\d+of\d+")])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda engine: engine.commit("v1", MIXED), "none of 1 contents"),
        (lambda engine: engine.commit("v1~1of2", NEW), "is called 'v1~1of2'"),
        (lambda engine: engine.commit("v1", NEW, epoch=2), "in one call"),
        (lambda engine: engine.state.update(weight_version="v9"), "nobody renamed it"),
        (lambda engine: (engine.commit("v1", NEW), engine.state.update(content_digest="0" * 64)), "digest"),
    ],
)
def test_what_was_not_sent_is_no_version(
    engine: Engine, in_force: InForce, change: Callable[[Engine], Any], complaint: str
) -> None:
    change(engine)
    with pytest.raises(Violation, match=complaint):
        in_force.look([exactly(NEW, "v1")])


def test_a_refresh_that_was_refused_leaves_nothing(engine: Engine, in_force: InForce) -> None:
    engine.commit("v1", NEW)
    with pytest.raises(Violation, match="none of 0 contents"):
        in_force.look()
    engine.state |= {"weight_epoch": 0, "weight_version": "v0"}
    with pytest.raises(Violation, match="not those of epoch 0"):
        in_force.check()


def test_calls_complain_of_what_nobody_expects() -> None:
    calls = Calls("http://127.0.0.1:1")
    calls.note("/generate", 400, "refused")
    calls.note("/update", 502, "the trainer is gone", may=(502,))
    assert calls.num_wrong == 0
    calls.note("/generate", 500, "a defect")
    with pytest.raises(Ended):
        calls.get("/health")
    assert calls.num_wrong == 2 and "500 a defect" in calls.complaints[0] and "ConnectError" in calls.complaints[1]


def test_growth_is_seen_and_noise_is_not() -> None:
    still = [Usage(rss, rss, 40) for rss in (500 * MB, 610 * MB, 600 * MB, 620 * MB, 605 * MB, 625 * MB, 610 * MB)]
    assert memory_growth(still).ok and descriptor_growth(still, 1).ok
    growing = [Usage((600 + 15 * number) * MB, 0, 40 + 2 * number) for number in range(9)]
    assert not memory_growth(growing).ok and not descriptor_growth(growing, 1).ok


@pytest.mark.parametrize("spans", [[(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 3)], [(0, 2), (2, 5)], []])
def test_spans_cover_every_place_once(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(Violation):
        places([Span("v", None, *each) for each in spans], 4, "tokens")


def test_the_table_says_what_is_wrong(tmp_path: Path) -> None:
    played = Played(LAYOUTS["1"], calls=Calls("http://127.0.0.1:1"), tally=Tally(samples=3), exit_status=0)
    played.curves.rest = [(1.0, Usage(MB, MB, 10))]
    console = Console(width=120, record=True)
    assert print_report([played], console)
    played.tally.complain("request r1: a token of nobody")
    assert not print_report([played], console) and "a token of nobody" in console.export_text()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{main.BEGIN}old\n{main.END}after\n")
    for _ in range(2):
        main.write_docs(markdown([played]), page)
    assert "| samples explained | 2 of 3 | all |" in page.read_text() and "old" not in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith(f"{main.END}after\n")
    assert main.BEGIN in main.DOCS.read_text() and main.END in main.DOCS.read_text()
