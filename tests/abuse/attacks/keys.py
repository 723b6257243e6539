"""Keys: none, wrong, empty, the other one, in other places."""

from __future__ import annotations

from tests.abuse.registry import KEYED, attack
from tests.abuse.server import Victim


@attack(KEYED, seconds=60.0)
def wrong_keys(victim: Victim) -> str:
    """Send every kind of wrong key: each gets a 401 before the server looks at the body."""
    user, admin = victim.setup.settings["api_key"], victim.setup.settings["admin_api_key"]
    near = [f"Basic {admin}", f"Bearer {admin[:-1]}", f"Bearer {admin}x", admin]
    wrong = ["", "Bearer", *near]
    found = [one for one in victim.operations if "info" not in one.tags]
    for one in found:
        others = [*wrong, f"Bearer {user}" if one.is_control else f"Bearer {admin}"]
        for value in others:
            response = victim.call(one.method, one.path, content=b"[" * 1000, headers={"authorization": value})
            if response is not None and response.status_code != 401:
                victim.complain(f"{one.method} {one.path} with {value!r}: {response.status_code}")
                break
    return f"{len(found)} endpoints"
