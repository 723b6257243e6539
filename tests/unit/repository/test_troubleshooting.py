"""Every message of an error has an entry in docs/troubleshooting, and every entry is of a message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from capture.errors import CaptureError
from eplb.errors import EplbError
from rollout.core.errors import LockstepError
from tests.error_messages import Message, collect
from tests.troubleshooting import FOLDER, FOREIGN, Entry, entries, entries_for, entries_of, faults
from weight_sync.errors import WeightSyncError

PAGE = """# Page

## Part

### First

```text
the … is too long
```

Give a shorter one, or raise the limit by the flag of the server.
"""
ENTRY = entries_of("page.md", PAGE)[0]
REST = Entry(
    "rest.md", "Rest", tuple(sorted(FOREIGN)), "Other libraries make these messages: see their own documents there."
)


def message(pattern: str) -> Message:
    return Message(pattern, "BadRequest", "rollout/a.py", 7)


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    return collect()


def test_every_message_has_an_entry_and_every_entry_a_message(messages: list[Message]) -> None:
    assert len(messages) > 900, "the collector sees too few messages"
    assert faults(messages, entries()) == []


@pytest.mark.parametrize(
    ("stated", "found", "wrong"),
    [
        (["the … is too long", "a new message"], [ENTRY], "rollout/a.py:7: no entry for: a new message"),
        (["another message"], [ENTRY], "page.md: First: no message of the code: the … is too long"),
        (["the … is too long"], [ENTRY._replace(explanation="The … is too long.")], "page.md: First: no explanation"),
        (
            ["the … is too long"],
            [ENTRY._replace(explanation="This error means that the value is too long: it is long.")],
            "page.md: First: no explanation",
        ),
        (["the … is too long"], [ENTRY, ENTRY._replace(page="other.md")], "two entries are called First"),
        (["the … is too long"], [ENTRY, ENTRY._replace(title="X", patterns=())], "page.md: X: no text block"),
    ],
)
def test_a_missing_or_stale_entry_is_named(stated: Sequence[str], found: Sequence[Entry], wrong: str) -> None:
    assert any(one.startswith(wrong) for one in faults(map(message, stated), [*found, REST]))


def test_a_page_that_matches_its_messages_has_no_fault() -> None:
    assert faults([message("the … is too long")], [ENTRY, REST]) == []


def test_a_foreign_message_without_an_entry_is_named() -> None:
    assert "no entry for: Not Found" in faults([message("the … is too long")], [ENTRY])


@pytest.mark.parametrize(
    ("body", "patterns"),
    [
        ('raise BadRequest(f"{name} is not {kind}")', {"… is not …"}),
        ('raise BadRequest("one part " + "and another")', {"one part and another"}),
        ('reason = "first cause" if name else f"second cause {name}"\n    raise BadRequest(reason)',
         {"first cause", "second cause …"}),
        ("raise BadRequest(objection(name))", {"the name is … long"}),
        ('refused(f"{name} comes too late")', {"… comes too late"}),
        ('wrong = []\n    wrong.append(f"{name} is odd")\n    raise BadRequest(listed(wrong))', {"… is odd"}),
        ('error = Narrower("made here, raised elsewhere")\n    return error', {"made here, raised elsewhere"}),
        ('raise ValueError("quoted by its caller")', {"quoted by its caller"}),
        ('raise BadRequest(f"{name}: {objection(name)}")', {"…: …", "…: the name is … long"}),
        ('logger.info("no error at all")', set()),
    ],
)  # fmt: skip
def test_a_message_is_found_wherever_its_text_stands(tmp_path: Path, body: str, patterns: set[str]) -> None:
    source = f"""
class LockstepError(Exception): ...
class BadRequest(LockstepError): ...
class Narrower(BadRequest): ...

def objection(name):
    return f"the name is {{len(name)}} long"

def refused(reason):
    raise BadRequest(reason)

def function(name, kind):
    {body}
"""
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "a.py").write_text(source)
    found = {one.pattern for one in collect(tmp_path, ["rollout"])}
    assert found - {"the name is … long"} == patterns - {"…: …", "the name is … long"}
    assert patterns - {"…: …"} <= found


def test_the_front_page_leads_to_every_page_and_names_every_status() -> None:
    front = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert {path.name for path in FOLDER.glob("*.md")} - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\) \|", front))
    stated = {
        int(number) for row in re.findall(r"^\| ([45]\d\d.*?) \|", front, re.MULTILINE) for number in row.split(", ")
    }
    roots = (LockstepError, WeightSyncError, CaptureError, EplbError)
    assert {kind.status_code for root in roots for kind in _kinds(root)} <= stated


def _kinds(root: type[Any]) -> Iterator[type[Any]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def test_a_reader_finds_the_entry_of_a_message() -> None:
    sent = "rank 1: the model has no tensor 'module.lm_head.weight' (lm_head.weight?)"
    assert entries_for(sent)[0].title == "The model has no such tensor"
    assert entries_for("it rains") == []
