"""Lists that keep their JSON: both clients and fleets send it as it is, and encode nothing of it anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rollout.client import AsyncRolloutClient, AsyncRolloutFleet, RolloutClient, RolloutFleet
from rollout.client.wire import method_call, to_json
from rollout.core.errors import BadRequest
from rollout.core.messages.weights import BeginWeightUpdateReqInput, UpdateWeightsFromDistributedReqInput
from tests.canned_server import CannedServer, serving
from tests.unit.client.test_client_fleet import QUICK, TIMES, engines
from weight_sync.json_lists import JsonList

OK = {"success": True, "message": "done", "update_id": "u"}
BUCKET: dict[str, Any] = {"names": ["a", "ü"], "dtypes": ["bfloat16", "x"], "shapes": [[2, 3], []]}
MANIFEST = BUCKET | {"fingerprints": "0" * 32}
EXPECTED = [
    BUCKET | {"group_name": "g", "flush_cache": False},
    {"coverage": "full", "manifest": MANIFEST},
]


class Elements(list[Any]):
    """Elements of a list that must not be looked at."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("an element was looked at")


def kept(lists: dict[str, Any]) -> dict[str, Any]:
    """Return lists that have their JSON, and whose elements must not be looked at any more."""
    found = {name: JsonList(value) if isinstance(value, list) else value for name, value in lists.items()}
    for each in found.values():
        if isinstance(each, JsonList):
            assert each.json
            each.__class__ = type("Sealed", (JsonList,), {"__iter__": Elements.__iter__})
    return found


def canned() -> CannedServer:
    return CannedServer({"/update_weights_from_distributed": OK, "/begin_weight_update": OK})


def test_the_blocking_client_sends_the_kept_json() -> None:
    server = canned()
    with serving(server) as url, RolloutClient(url) as client:
        client.update_weights_from_distributed(**kept(BUCKET), group_name="g")
        client.begin_weight_update(manifest=kept(MANIFEST))
    assert [asked.body for asked in server.asked] == EXPECTED


def test_the_asynchronous_client_sends_the_kept_json() -> None:
    server = canned()

    async def main() -> None:
        transport = httpx.ASGITransport(server.app())
        async with AsyncRolloutClient("http://server", transport=transport) as client:
            await client.update_weights_from_distributed(**kept(BUCKET), group_name="g")
            await client.begin_weight_update(manifest=kept(MANIFEST))

    asyncio.run(main())
    assert [asked.body for asked in server.asked] == EXPECTED


def test_fleets_send_the_kept_json_to_every_engine() -> None:
    with engines(2) as (made, urls):
        for each in made:
            each.canned.answers["/update_weights_from_distributed"] = OK
        options: dict[str, Any] = {"policy": QUICK, "timeouts": TIMES}
        stated = {"manifest": kept(MANIFEST)}
        with RolloutFleet(urls, **options) as fleet, fleet.weight_transaction("2", **stated) as update:
            update.send("update_weights_from_distributed", **kept(BUCKET))

        async def main() -> None:
            async with AsyncRolloutFleet(urls, **options) as fleet, fleet.weight_transaction("3", **stated) as update:
                await update.send("update_weights_from_distributed", **kept(BUCKET))

        asyncio.run(asyncio.wait_for(main(), 30))
        for each in made:
            assert [body["manifest"] for body in each.asked("/begin_weight_update")] == [MANIFEST] * 2
            sent = each.asked("/update_weights_from_distributed")
            assert [{name: body[name] for name in BUCKET} for body in sent] == [BUCKET] * 2


def test_other_arguments_are_sent_and_refused_as_before() -> None:
    verb = UpdateWeightsFromDistributedReqInput
    plain = method_call(verb, BUCKET | {"group_name": "gö"})
    call = method_call(verb, kept(BUCKET) | {"group_name": "gö"})
    assert to_json(call.json).replace(b" ", b"") == to_json(plain.json).replace(b" ", b"")
    with pytest.raises(BadRequest, match="cannot be sent as JSON"):
        method_call(verb, kept(BUCKET) | {"group_name": object()})
    with RolloutClient("http://127.0.0.1:9") as client:
        for wrong in (JsonList([object()]), JsonList([float("nan")])):
            with pytest.raises(BadRequest, match="cannot be sent as JSON"):
                client.update_weights_from_distributed(**BUCKET | {"shapes": wrong})
    assert method_call(BeginWeightUpdateReqInput, {"manifest": BUCKET}).json == {"manifest": BUCKET}
