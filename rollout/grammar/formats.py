"""Regular expressions of the formats of texts in JSON schemas, each for the whole text.

The library has its own, which take the 29th of February in every year and a leap second at any time, and refuse some
addresses.  These hold to the RFCs that JSON Schema names, with two exceptions.  The year 0000 is left out, as Python's
dates do.  A leap second is taken in UTC alone: each other offset has it at a time of its own, and a pattern of all
takes 120 ms to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"


def pattern_of(name: str) -> str | None:
    """Return the regular expression of a format, None for a format that has none here."""
    write = _WRITERS.get(name)
    return None if write is None else write()


@functools.cache
def _date() -> str:
    year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
    leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
    long = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    short = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    february = "02-(?:0[1-9]|1[0-9]|2[0-8])"
    return f"(?:{year}-(?:{long}|{short}|{february})|{leap}-02-29)"


@functools.cache
def _time() -> str:
    usual = f"{_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}(?:[zZ]|[+-]{_HOUR}:{_MINUTE})"
    leap = f"23:59:60{_FRACTION}(?:[zZ]|[+-]00:00)"
    return f"(?:{usual}|{leap})"


@functools.cache
def _date_time() -> str:
    return f"{_date()}[tT]{_time()}"


@functools.cache
def _duration() -> str:
    minutes = "[0-9]+M(?:[0-9]+S)?"
    time = f"T(?:[0-9]+H(?:{minutes})?|{minutes}|[0-9]+S)"
    months = "[0-9]+M(?:[0-9]+D)?"
    date = f"(?:[0-9]+Y(?:{months})?|{months}|[0-9]+D)"
    return f"P(?:{date}(?:{time})?|{time}|[0-9]+W)"


@functools.cache
def _ipv6() -> str:
    starts = [f"(?:{_H16}:){{6}}"]
    for before in range(6):  # the groups before the double colon, at most
        starts.append(f"{_groups(before)}::(?:{_H16}:){{{5 - before}}}")
    last = f"(?:{_H16}:{_H16}|{_IPV4})"
    return f"(?:(?:{'|'.join(starts)}){last}|{_groups(6)}::{_H16}|{_groups(7)}::)"


def _groups(most: int) -> str:
    """Return up to `most` groups of an IPv6 address, with colons between them."""
    if most == 0:
        return ""
    return f"(?:(?:{_H16}:){{0,{most - 1}}}{_H16})?"


@functools.cache
def _email() -> str:
    atom = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
    quoted = r'"(?:[ !#-\x5b\x5d-~]|\x5c[ -~])*"'
    label = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
    address = rf"\x5b(?:{_IPV4}|[iI][pP][vV]6:{_ipv6()})\x5d"
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{label}(?:\.{label})*|{address})"


@functools.cache
def _hostname() -> str:
    label = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    return rf"{label}(?:\.{label})*"


@functools.cache
def _uuid() -> str:
    return f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}"


@functools.cache
def _uri() -> str:
    plain, encoded = "[a-zA-Z0-9._~!$&'()*+,;=-]", f"%{_HEX}{{2}}"
    letter = f"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|{encoded})"
    name = f"(?:{plain}|{encoded})*"
    future = f"[vV]{_HEX}+[.][a-zA-Z0-9._~!$&'()*+,;=:-]+"
    user = f"(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|{encoded})*@"
    authority = rf"(?:{user})?(?:\x5b(?:{_ipv6()}|{future})\x5d|{name})(?::[0-9]*)?"
    path = f"(?:/{letter}*)*"
    after = f"(?:{letter}|[/?])*"
    return f"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{authority}{path}|/?(?:{letter}+{path})?)(?:[?]{after})?(?:#{after})?"


_WRITERS: dict[str, Callable[[], str]] = {
    "date-time": _date_time,
    "date": _date,
    "time": _time,
    "duration": _duration,
    "email": _email,
    "hostname": _hostname,
    "ipv4": lambda: _IPV4,
    "ipv6": _ipv6,
    "uuid": _uuid,
    "uri": _uri,
}
