"""Regular expressions of formats, against the modules of Python that read what they describe."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable

import pytest

from rollout.core.grammar import Grammar
from rollout.grammar import schema
from rollout.grammar.formats import pattern_of
from tests.grammar_drawer import Drawer

YEARS = (0, 1, 4, 100, 400, 1000, 1900, 1996, 1999, 2000, 2020, 2021, 2100, 2400, 9996, 9999)


def matches(name: str, text: str) -> bool:
    pattern = pattern_of(name)
    assert pattern is not None
    return re.fullmatch(pattern, text) is not None


def reads(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar() -> None:
    num_valid = 0
    for year, month, day in itertools.product(YEARS, range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        is_valid = reads(datetime.date.fromisoformat, text)
        num_valid += is_valid
        assert matches("date", text) == is_valid, text
    assert num_valid == 15 * 365 + 7
    for text in ("2020-1-01", "20200101", "2020-01-01 ", "12020-01-01", "2020-01-0১"):
        assert not matches("date", text), text


def test_a_date_time_is_a_date_and_a_time_with_an_offset() -> None:
    times = ("00:00:00", "23:59:59.25", "25:00:00", "12:60:00", "12:00:61")
    for date, time, offset in itertools.product(("2020-02-29", "2021-02-29"), times, ("Z", "+05:30", "-24:00", "")):
        clock = f"{time}{offset}"
        is_time = reads(datetime.time.fromisoformat, clock) and bool(offset)
        assert matches("time", clock) == is_time, clock
        is_valid = is_time and reads(datetime.date.fromisoformat, date)
        assert matches("date-time", f"{date}T{clock}") == is_valid, (date, clock)
    assert matches("date-time", "2020-01-01t00:00:00z") and not matches("date-time", "2020-01-01 00:00:00Z")


def test_a_leap_second_is_taken_in_utc_alone() -> None:
    for text, is_taken in (
        ("23:59:60Z", True),
        ("23:59:60.5+00:00", True),
        ("22:59:60Z", False),
        ("23:58:60-00:00", False),
        ("15:59:60-08:00", False),  # right, and left out: see the module
    ):
        assert matches("time", text) == is_taken, text


def test_addresses_are_those_that_python_reads() -> None:
    generator, seen = random.Random(3), [0, 0]
    groups = ("", "0", "12ab", "FFFF", "12345", "g", "1.2.3.4", "256.1.1.1", "01.2.3.4")
    for _ in range(20_000):
        text = ":".join(generator.choices(groups, weights=(4, 8, 8, 4, 1, 1, 2, 1, 1), k=generator.randrange(1, 10)))
        is_valid = reads(ipaddress.IPv6Address, text)
        seen[is_valid] += 1
        assert matches("ipv6", text) == is_valid, text
        assert matches("ipv4", text) == reads(ipaddress.IPv4Address, text), text
    assert min(seen) > 300, seen


def test_identifiers_are_those_that_python_reads_with_four_dashes() -> None:
    text = str(uuid.UUID(int=random.Random(0).getrandbits(128)))
    for each in (text, text.upper(), text[:-1], text + "0", text.replace("-", ""), "g" + text[1:], f"{{{text}}}"):
        assert matches("uuid", each) == (reads(uuid.UUID, each) and len(each) == 36 and each[8] == "-"), each


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("email", ["a@b", '"a b@"@c.d', "a@[IPv6:::1]", "a@[1.2.3.4]", r'"\""@b'], ["a@", "a@[1.2.3]", '"""@b']),
        ("hostname", ["a", "a-b.c", f"{'a' * 63}.b"], ["", ".", "a.", "-a", "a_b", "a" * 64]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT0S", "P2W", "P1DT12H"], ["P", "PT", "P1YT", "P1Y2W", "P2D1Y", "PT1H6S"]),
        (
            "uri",
            ["a:", "a:/", "http://[::1.2.3.4]:80/b?c/d?e#f", "urn:a:b", "mailto:a@b", "a://u:p@/%20", "a://[v1.x]"],
            ["", "a", "//a", "a b:c", "a://[::1", "a:%2", "a:[", "1:a", "a:#b#c"],
        ),
    ],
)  # fmt: skip
def test_texts_of_the_other_formats(name: str, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert matches(name, text), text
    for text in wrong:
        assert not matches(name, text), text


def test_the_library_alone_takes_a_date_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant, in both directions."""
    date, address = ({"type": "string", "format": name} for name in ("date", "ipv6"))
    texts = [(date, "2021-02-29", False), (date, "2020-02-29", True), (address, "::ffff:1.2.3.4", True)]

    def found() -> list[bool]:
        drawer = Drawer({}, ())
        return [drawer.accepts(Grammar("json_schema", json.dumps(each)), f'"{text}"') for each, text, _ in texts]

    assert found() == [is_valid for _, _, is_valid in texts]
    monkeypatch.setattr(schema, "pattern_of", lambda name: None)
    assert found() == [True, True, False]


def test_a_name_without_a_pattern_has_none() -> None:
    assert pattern_of("color") is None and pattern_of("unknown") is None
