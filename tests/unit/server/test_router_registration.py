"""Registration at a router that starts late, forgets, refuses or answers nonsense; both ways of naming a worker."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from urllib.parse import unquote

import httpx
import pytest

from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.server.router_registration import RouterRegistration, own_url

OWN = "http://10.0.0.5:30000"


class Router:
    """A router with the `/workers` of sglang-router and smg (ids) or of vllm-router (URLs)."""

    def __init__(self, names_by_id: bool) -> None:
        self.names_by_id = names_by_id
        self.workers: dict[str, str] = {"other": "http://10.0.0.9:30000"}  # name -> url
        self.posted: list[dict] = []
        self.adds_after_s = 0.0
        self.answer: Callable[[], httpx.Response] | None = None  # instead of the right one

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.answer is not None:
            return self.answer()
        if request.method == "GET":
            entries = [{"url": url, **({"id": name} if self.names_by_id else {})} for name, url in self.workers.items()]
            return httpx.Response(200, json={"workers": entries, "total": len(entries), "stats": {}})
        if request.method == "POST":
            body = json.loads(request.content)
            self.posted.append(body)
            name = "uuid-1" if self.names_by_id else body["url"]
            if self.adds_after_s:
                later = asyncio.get_running_loop().call_later
                later(self.adds_after_s, self.workers.update, {name: body["url"]})
            else:
                self.workers[name] = body["url"]
            return httpx.Response(202)
        name = unquote(request.url.raw_path.decode().removeprefix("/workers/"))
        if name not in self.workers:
            return httpx.Response(400, json={"error": "unknown worker"})
        del self.workers[name]
        return httpx.Response(202)

    def lists(self, url: str) -> bool:
        return url in self.workers.values()


def registration(router: Router, url: str | None = "http://router:30001/") -> RouterRegistration:
    return RouterRegistration(url, OWN, "key", check_every_s=0.02, transport=httpx.MockTransport(router))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("names_by_id", [True, False], ids=["id", "url"])
def test_a_server_joins_stays_and_leaves(names_by_id: bool) -> None:
    async def run() -> None:
        router = Router(names_by_id)
        own = registration(router)
        own.join()
        await until(lambda: router.lists(OWN))
        await asyncio.sleep(0.1)
        assert router.posted == [{"url": OWN, "api_key": "key"}], "once, while it is listed"
        router.workers.clear()
        await until(lambda: router.lists(OWN))
        await own.leave()
        assert not router.lists(OWN)
        await asyncio.sleep(0.05)
        assert not router.lists(OWN), "it does not come back"

    asyncio.run(run())


def test_leaving_a_router_keeps_its_other_workers(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        router = Router(names_by_id=False)
        router.workers = {"other": "http://10.0.0.5:3000"}
        own = registration(router)
        own.join()
        await until(lambda: router.lists(OWN))
        await own.leave()
        assert list(router.workers) == ["other"]

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def unreachable() -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize(
    "answer",
    [
        unreachable,
        lambda: httpx.Response(500, text="not yet"),
        lambda: httpx.Response(200, text="<html>"),
        lambda: httpx.Response(200, json={"workers": [3]}),
        lambda: httpx.Response(200, json=["http://10.0.0.5:30000"]),
    ],
    ids=["unreachable", "500", "html", "numbers", "list"],
)
def test_a_router_that_is_not_there_yet_is_asked_again(
    answer: Callable[[], httpx.Response], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        router = Router(names_by_id=True)
        router.answer = answer
        own = registration(router)
        own.join()
        await asyncio.sleep(0.2)
        router.answer = None
        await until(lambda: router.lists(OWN))
        router.answer = answer
        await own.leave()

    asyncio.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in warnings if line.startswith("not registered")]) <= 2, "not one line a try"
    assert warnings[0].startswith("not registered at http://router:30001/: ")
    assert warnings[-1].startswith("http://router:30001/ may still list")


def test_a_router_that_does_not_answer_holds_the_end_up_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.server.router_registration.CALL_TIMEOUT_S", 0.1)

    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> None:
        own = RouterRegistration("http://router", OWN, transport=httpx.MockTransport(silent))
        own.join()
        await asyncio.sleep(0.05)
        async with asyncio.timeout(3):
            await own.leave()

    asyncio.run(run())


@pytest.mark.parametrize("names_by_id", [True, False], ids=["id", "url"])
def test_a_server_that_leaves_before_it_is_listed_is_taken_off(names_by_id: bool) -> None:
    async def run() -> None:
        router = Router(names_by_id)
        router.adds_after_s = 0.4
        own = RouterRegistration("http://router", OWN, transport=httpx.MockTransport(router))
        own.join()
        await until(lambda: bool(router.posted))
        await own.leave()
        await asyncio.sleep(0.5)
        assert len(router.posted) == 1 and not router.lists(OWN)

    asyncio.run(run())


def test_a_router_that_never_lists_the_server_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.server.router_registration.CALL_TIMEOUT_S", 0.3)

    async def run() -> None:
        router = Router(names_by_id=True)
        router.adds_after_s = 60
        own = registration(router)
        own.join()
        await until(lambda: bool(router.posted))
        async with asyncio.timeout(3):
            await own.leave()

    asyncio.run(run())
    assert "may still list http://10.0.0.5:30000: it did not answer, or has yet to list it" in caplog.text


def test_without_a_router_nothing_is_called() -> None:
    async def run() -> None:
        router = Router(names_by_id=True)
        own = registration(router, url=None)
        own.join()
        await asyncio.sleep(0.05)
        await own.leave()
        assert router.posted == []

    asyncio.run(run())


def test_where_the_router_finds_the_server() -> None:
    def url(host: str, router: str = "http://127.0.0.1:9") -> str:
        return own_url(ServerArgs(host=host, port=31000, register_url=router))

    assert url("10.2.3.4") == "http://10.2.3.4:31000"
    assert url("::1") == "http://[::1]:31000"
    assert url("0.0.0.0") == "http://127.0.0.1:31000", "the address that faces the router"
    assert url("0.0.0.0", "http://no-such-host.invalid:9") == "http://0.0.0.0:31000"
    assert url("0.0.0.0", "http://a..b") == "http://0.0.0.0:31000", "a host that the resolver refuses"


@pytest.mark.parametrize(
    "url",
    [
        *("router:30000", "ftp://router", "http://", "http://r:x", "http://r:0", "http://r?a=b", "http://r#x", ""),
        *("http://999.1.1.1:80", "http://ä_b", "http://a..b", f"http://{'a' * 64}", "http://a\nb", "http://[::1"),
    ],
)
def test_what_is_no_router_is_refused_at_start(url: str) -> None:
    with pytest.raises(StartupError, match="--register-url") as caught:
        check_settings(ServerArgs(model_path="m", register_url=url))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "url", ["http://router:3000", "https://r/prefix/", "http://[::1]:80", "http://10.0.0.1", "http://bücher.example:1"]
)
def test_what_may_be_a_router_is_taken(url: str) -> None:
    check_settings(ServerArgs(model_path="m", register_url=url))


@pytest.mark.parametrize("url", ["http://user:secret@router:3000", "http://secret@router", "http://u:secret@r:x"])
def test_credentials_in_the_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StartupError, match="--register-url must not contain a user") as caught:
        check_settings(ServerArgs(model_path="m", register_url=url))
    assert "secret" not in str(caught.value)


def test_whatever_a_router_does_nothing_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> httpx.Response:
        raise RuntimeError("no httpx.HTTPError")

    async def run() -> None:
        router = Router(names_by_id=True)
        router.answer = broken
        own = registration(router)
        own.join()
        await asyncio.sleep(0.05)
        router.answer = None
        await until(lambda: router.lists(OWN))
        router.answer = broken
        await own.leave()
        refused = RouterRegistration("http://999.1.1.1:80", OWN)
        refused.join()
        await asyncio.sleep(0.05)
        await refused.leave()

    asyncio.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "not registered at http://router:30001/: no httpx.HTTPError" in warnings
    assert sum(line.startswith("http://999.1.1.1:80 may still list") for line in warnings) == 1
