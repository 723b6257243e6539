"""The reference from the code: every flag, endpoint, metric, log line and public name has its place on a page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any

import pytest

import lockstep_rl
from docs.tools import endpoints, events, metrics, python_api, reference
from rollout.core.args.server_args import ServerArgs
from rollout.http.metrics.metrics import Metrics
from tests.pages import markdown
from tests.pages.markdown import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
MARKS = {name for page in PAGES for name in re.findall(r"<!-- generated: (.*?) -->", page.read_text(encoding="utf-8"))}


def test_every_part_has_a_page_and_every_mark_a_part() -> None:
    assert set(reference.parts()) == MARKS


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- generated" in page.read_text(encoding="utf-8")])
def test_a_filled_page_is_no_longer_than_a_reader_can_hold(page: object) -> None:
    text = reference.filled((ROOT / str(page)).read_text(encoding="utf-8"))
    assert "<!-- generated" not in text and len(text.encode()) <= markdown.MAX_PAGE_BYTES


def test_every_flag_has_a_row_with_its_help() -> None:
    text = reference.part("flags")
    for field in dataclasses.fields(ServerArgs):
        row = next(line for line in text.splitlines() if line.startswith(f"| `--{field.name.replace('_', '-')}` |"))
        assert " ".join(field.metadata["help"].replace("|", r"\|").split()) in row


def test_every_endpoint_is_listed_once_and_described() -> None:
    listed = re.findall(r"^\| `(\w+)` \| \[`(\S+)`\]", reference.part("endpoints"), re.MULTILINE)
    assert sorted(listed) == sorted((one.method, one.path) for one in endpoints.all_endpoints())
    assert len(listed) == len(set(listed)) > 80
    for one in endpoints.all_endpoints():
        assert f"## {one.path}\n" in reference.part(f"endpoints of {one.page}")


def test_links_of_the_list_of_endpoints_lead_to_headings() -> None:
    for page, anchor in re.findall(r"\]\((\w+)\.md#(\S+?)\)", reference.part("endpoints")):
        assert anchor in markdown.anchors(reference.part(f"endpoints of {page}"))


def test_fields_of_a_body_and_of_an_object_in_it_are_listed() -> None:
    text = reference.part("endpoints of weights")
    assert '| `coverage` | body | `full`, `partial` | `"full"` |' in text
    assert "| `init_info.master_port` | body | integer | required |" in reference.part("endpoints of vllm_weights")


def test_every_metric_of_a_server_is_in_the_table() -> None:
    text = Metrics("model").render().decode()
    served = {re.sub(r"_(created|total)$", "", name) for name in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)}
    assert served <= {one.name.removesuffix("_total") for one in metrics.numbers()} and len(served) > 50
    assert all(f"`{one.name}`" in reference.part("metrics") for one in metrics.numbers())
    assert {one.name.split("_")[0] for one in metrics.numbers() if not one.labels} == {"process"}


def test_lines_of_the_log_are_read_from_every_form_of_a_call() -> None:
    texts = {"'a %s'": "a %s", "f'a {b} c'": "a ... c", "'a ' + b": "a ...", "b": "..."}
    assert {code: events.text_of(ast.parse(code, mode="eval").body) for code in texts} == texts
    assert {"info", "warning", "error"} <= {one.level for one in events.lines()}


def test_lines_that_the_console_prints_are_lines_of_the_log() -> None:
    source = 'say(f"ready at {url}")\nsay("a" if b else "c", "WARNING")\nsay(line)\nlogger.exception("d")\n'
    logged = [("error", "d")]
    assert list(events.lines_of(source)) == logged, "another function of that name"
    found = list(events.lines_of(f"from rollout.core.console import say\n{source}"))
    assert found == [("info", "ready at ..."), ("warning", "a"), ("warning", "c"), *logged]
    assert "| info | `ready at ...` | `rollout/server/launch.py` |" in reference.part("log lines")


def test_the_parts_have_each_public_name_once() -> None:
    listed = [name for names in python_api.PUBLIC.values() for name in names]
    assert sorted(listed) == sorted(set(lockstep_rl.__all__) - {"__version__"})
    for part, names in python_api.PUBLIC.items():
        assert re.findall(r"^## (.*)$", reference.part(f"python {part}"), re.MULTILINE) == list(names)


def test_links_of_the_list_of_names_lead_to_headings() -> None:
    links = re.findall(r"\]\((\w+)\.md#(\S+?)\)", reference.part("python"))
    assert len(links) == len(lockstep_rl.__all__) - 1
    for page, anchor in links:
        assert anchor in markdown.anchors(reference.part(f"python {page}"))


def test_every_public_name_and_method_has_a_docstring_of_its_own() -> None:
    for name, value in python_api.members(lockstep_rl.__all__):
        if name != "__version__":
            assert has_docstring(value), name
            for method, function in python_api.methods(value) if inspect.isclass(value) else ():
                assert has_docstring(function), f"{name}.{method}"


def has_docstring(value: Any) -> bool:
    """Tell a written docstring from an inherited one, and from the one that `dataclass` makes."""
    written = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return bool(written) and not (inspect.isclass(value) and written.startswith(f"{value.__name__}("))


def test_a_docstring_that_nobody_wrote_does_not_count() -> None:
    @dataclasses.dataclass
    class Made:
        size: int

    class Inherited(lockstep_rl.LockstepError):
        pass

    assert not has_docstring(Made) and not has_docstring(Inherited)
