"""Web pages that a browser on the server's machine has opened: foreign origins and hosts."""

from __future__ import annotations

from tests.abuse.registry import KEYED, OPEN, attack
from tests.abuse.server import Victim

STRANGE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"host": "evil.example"},
    {"host": "evil.example:80", "origin": "http://evil.example:80"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://127.0.0.1.evil.example", "content-type": "text/plain"},
    {"origin": "http://127.0.0.1:1", "content-type": "text/plain"},
]


@attack(OPEN, seconds=60.0, restores=True, quick=True)
def foreign_origins_and_hosts(victim: Victim) -> str:
    """Call control endpoints from a foreign origin or under a foreign host name: they refuse."""
    found = [one for one in victim.operations if one.is_control]
    for one in found:
        for headers in STRANGE:
            response = victim.call(one.method, one.path, {} if one.schema else None, headers=headers)
            if response is not None and response.status_code not in (401, 403, 421):
                victim.complain(f"{one.method} {one.path} with {headers}: {response.status_code}, not refused")
                break
    paused = victim.state()["paused"]
    if paused:
        victim.complain("a web page has paused the server")
    return f"{len(found)} endpoints"


@attack(OPEN, KEYED, seconds=30.0, quick=True)
def friends_are_let_in(victim: Victim) -> str:
    """Call from this machine's own origin and without a browser: the server answers."""
    own = f"127.0.0.1:{victim.port}"
    for headers in (
        {},
        {"origin": f"http://{own}"},
        {"host": f"localhost:{victim.port}", "origin": f"http://localhost:{victim.port}"},
        {"host": own, "sec-fetch-site": "same-origin"},
        {"host": own, "sec-fetch-site": "none"},
        {"content-type": "text/plain"},
    ):
        response = victim.call("POST", "/abort_request", {"rid": "nobody"}, headers=headers)
        if response is not None and response.status_code != 200:
            victim.complain(f"a friend with {headers}: {response.status_code} {response.text[:100]}")
    return ""
