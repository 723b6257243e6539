"""Several engines as one: which engine gets a request, its death and return, and requests to all engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi.responses import PlainTextResponse

from rollout.client import (
    AsyncRolloutClient,
    AsyncRolloutFleet,
    FleetError,
    FleetPolicy,
    RolloutClient,
    RolloutFleet,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    Timeouts,
)
from rollout.client.fleet_engine import Choice
from rollout.core.errors import BadRequest
from tests.canned_server import CannedServer, RawServer, json_response, raw_reply, serving
from weight_sync.engine_control import EngineError

QUICK = FleetPolicy(check_every_s=0.05, check_timeout_s=2.0, max_failures=2)
TIMES = Timeouts(retry=0.5, control=5.0, weights=5.0)


@dataclass
class Canned:
    """An engine whose state the test sets."""

    name: str
    is_healthy: bool = True
    version: str = "1"
    start_id: str | None = None
    generate: Callable[[Any], Any] | None = None
    canned: CannedServer = field(default_factory=CannedServer)

    def __post_init__(self) -> None:
        done = {"success": True, "message": "", "paused": True}
        self.canned.answers |= {
            "/health": lambda body: PlainTextResponse("", 200 if self.is_healthy else 503, self.headers()),
            "/weight_version": lambda body: {"weight_version": self.version},
            "/generate": lambda body: self.generate(body) if self.generate else self.sample(body),
            "/tokenize": {"tokens": [1]},
            "/abort_request": json_response({}),
            **{f"/{verb}": done for verb in ("pause_generation", "continue_generation", "begin_weight_update")},
            **{f"/{verb}": done for verb in ("abort_weight_update", "update_weights_from_disk", "weight_update")},
            "/end_weight_update": self.end,
        }

    def headers(self) -> dict[str, str]:
        return {} if self.start_id is None else {"x-start-id": self.start_id}

    def sample(self, body: Any) -> Any:
        meta = {"id": self.name, "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 1}
        return {"text": body["text"], "output_ids": [1], "meta_info": meta}

    def end(self, body: Any) -> Any:
        if body.get("phase") != "verify":
            self.version = next(a.body for a in reversed(self.canned.asked) if a.path == "/begin_weight_update")[
                "weight_version"
            ]
        return {"success": True, "message": ""}

    def asked(self, path: str) -> list[Any]:
        return [each.body for each in self.canned.asked if each.path == path]


@contextlib.contextmanager
def engines(count: int) -> Iterator[tuple[list[Canned], list[str]]]:
    made = [Canned(chr(97 + i)) for i in range(count)]
    with contextlib.ExitStack() as stack:
        yield made, [stack.enter_context(serving(each.canned)) for each in made]


def with_fleet(urls: list[str], use: Callable[[AsyncRolloutFleet], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncRolloutFleet(urls, **{"timeouts": TIMES, "policy": QUICK} | options) as fleet:
            return await use(fleet)

    return asyncio.run(asyncio.wait_for(main(), 30))


async def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


# --- which engine ------------------------------------------------------------------------------------------------


def test_the_engine_with_the_fewest_on_their_way_is_asked() -> None:
    with engines(3) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            results = [each async for each in fleet.generate_many([str(i) for i in range(90)], concurrency=12)]
            assert {output.text for _, output in results} == {str(i) for i in range(90)}
            fleet.engines[urls[0]].outstanding += 1000
            assert {(await fleet.generate("x")).rid for _ in range(10)} == {"b", "c"}
            assert await fleet.tokenize("x") == [1]

        with_fleet(urls, use)
        assert all(len(each.asked("/generate")) > 10 for each in made)


def test_a_session_stays_where_it_is_while_that_engine_lives() -> None:
    with engines(3) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            homes = {}
            for i in range(30):
                homes[str(i)] = (await fleet.generate("x", session_id=str(i))).rid
            assert Counter(homes.values()) == {"a": 10, "b": 10, "c": 10}
            for i in reversed(range(30)):
                assert (await fleet.generate("x", session_id=str(i))).rid == homes[str(i)]
            made[0].is_healthy = False
            await until(lambda: fleet.engines[urls[0]].left_out)
            moved = {i: (await fleet.generate("x", session_id=i)).rid for i in homes}
            assert all(home == moved[i] if home != "a" else moved[i] in "bc" for i, home in homes.items())
            made[0].is_healthy = True
            await fleet.wait_until_ready()
            assert {i: (await fleet.generate("x", session_id=i)).rid for i in homes} == moved

        with_fleet(urls, use)


# --- an engine that dies -----------------------------------------------------------------------------------------


def test_what_was_on_its_way_to_a_dead_engine_is_sent_to_another_from_the_start() -> None:
    broken = RawServer(
        [raw_reply(b""), raw_reply(b'{"weight_version": "1"}'), b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"]
    )
    with engines(1) as (made, urls), broken.serving() as url:

        async def use(fleet: AsyncRolloutFleet) -> None:
            fleet.engines[urls[0]].outstanding += 1
            assert (await fleet.generate("x")).rid == "a"
            assert "the connection broke" in str(fleet.engines[url].left_out)

        with_fleet([urls[0], url], use, policy=FleetPolicy(check_every_s=60))
    assert broken.heard[2].startswith(b"post /generate")
    assert len(made[0].asked("/generate")) == 1


def test_a_request_that_brings_engines_down_does_not_bring_down_all() -> None:
    script = [raw_reply(b""), raw_reply(b'{"weight_version": "1"}'), b""]
    servers = [RawServer(script) for _ in range(4)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(server.serving()) for server in servers]

        async def use(fleet: AsyncRolloutFleet) -> None:
            with pytest.raises(ServerUnreachable, match="the connection broke"):
                await fleet.generate("poison")
            assert sum(engine.left_out is None for engine in fleet.engines.values()) == 1

        with_fleet(urls, use, policy=FleetPolicy(check_every_s=60))
    assert sorted(len(server.heard) for server in servers) == [2, 3, 3, 3]


def test_an_engine_that_does_not_serve_is_passed_over_but_not_left_out() -> None:
    with engines(2) as (made, urls):
        made[0].generate = lambda body: json_response({"error": {"message": "the queue is full"}}, 503)

        async def use(fleet: AsyncRolloutFleet) -> None:
            assert {(await fleet.generate("x")).rid for _ in range(6)} == {"b"}
            made[1].generate = made[0].generate
            with pytest.raises(ServerError, match="the queue is full"):
                await fleet.generate("x")
            assert all(engine.left_out is None for engine in fleet.engines.values())
            made[0].generate = lambda body: json_response({"error": {"message": "too long"}}, 400)
            made[1].generate = None
            fleet.engines[urls[1]].outstanding += 10
            with pytest.raises(ServerError, match="too long"):
                await fleet.generate("x")

        with_fleet(urls, use)


def test_no_engine_at_all_is_said_with_the_reasons() -> None:
    with engines(1) as (made, urls):
        made[0].is_healthy = False

        async def use(fleet: AsyncRolloutFleet) -> None:
            with pytest.raises(ServerUnreachable, match=f"no engine is in use: {urls[0]}: it is not healthy"):
                await fleet.generate("x")
            with pytest.raises(ServerTimeout, match="not healthy"):
                await fleet.wait_until_ready(timeout=0.2)
            for block in (fleet.paused(), fleet.weight_transaction("2")):
                with pytest.raises(ServerUnreachable, match="no engine is in use"):
                    async with block:
                        raise AssertionError("not entered")
            with pytest.raises(ServerUnreachable, match="no engine is in use"):
                await fleet.abort_all()
            made[0].is_healthy = True
            assert (await fleet.generate("x")).rid == "a"

        with_fleet(urls, use)
    for bad in ([], ["http://a", "http://a"], ["nothing"]):
        with pytest.raises(BadRequest):
            AsyncRolloutFleet(bad)


# --- an engine that comes back -----------------------------------------------------------------------------------


def test_an_engine_of_another_version_is_not_taken_back() -> None:
    with engines(3) as (made, urls):
        made[2].version = "0"

        async def use(fleet: AsyncRolloutFleet) -> None:
            assert fleet.weight_version == "1"
            assert {(await fleet.generate("x")).rid for _ in range(9)} == {"a", "b"}
            await until(lambda: "serves weight version 0" in str(fleet.engines[urls[2]].left_out))
            made[2].version = "1"
            await fleet.wait_until_ready()
            async with fleet.weight_transaction("2") as update:
                made[2].is_healthy = False
                await update.send("update_weights_from_disk", model_path="/m")
            assert [each.version for each in made] == ["2", "2", "2"] and fleet.weight_version == "2"
            made[0].is_healthy = made[1].is_healthy = False
            await until(lambda: all(engine.left_out for engine in fleet.engines.values()))
            made[0].version, made[0].is_healthy = "1", True  # restarted from its checkpoint
            await until(lambda: "serves weight version 1, the fleet 2" in str(fleet.engines[urls[0]].left_out))
            made[1].is_healthy = True
            await fleet.wait_until_ready(1)
            assert (await fleet.generate("x")).rid == "b"

        with_fleet(urls, use)


def test_an_engine_that_was_started_anew_between_two_failures_is_left_out() -> None:
    with engines(2) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            made[1].is_healthy = False
            await until(lambda: fleet.engines[urls[1]].num_failures)
            made[1].version, made[1].is_healthy = "0", True
            await until(lambda: "serves weight version 0" in str(fleet.engines[urls[1]].left_out))

        with_fleet(urls, use, policy=FleetPolicy(check_every_s=0.05, max_failures=1000))


def test_an_engine_whose_weights_change_behind_the_fleet_is_left_out_c8() -> None:
    """C8: an engine is replaced between two checks, and no check fails."""
    with engines(2) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            made[1].version = "default"
            await until(lambda: fleet.engines[urls[1]].left_out)
            assert fleet.engines[urls[1]].left_out == "it serves weight version default, the fleet 1"
            assert {(await fleet.generate("x")).rid for _ in range(6)} == {"a"}
            made[1].version = "1"
            await fleet.wait_until_ready()

        with_fleet(urls, use)


def test_engines_that_change_together_stay_and_the_one_that_does_not_goes_c8() -> None:
    """C8: most engines are right, and a difference of a check or two is a refresh on its way."""
    with engines(3) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            for number in range(2, 8):
                for each in made:
                    each.version = str(number)
                    await asyncio.sleep(0.03)
                await until(lambda wanted=str(number): fleet.weight_version == wanted)
            await asyncio.sleep(0.5)
            assert fleet._reasons() == ""
            made[0].version = made[1].version = "9"
            await until(lambda: fleet.engines[urls[2]].left_out)
            assert fleet._reasons() == f"{urls[2]}: it serves weight version 7, the fleet 9"

        with_fleet(urls, use, policy=FleetPolicy(check_every_s=0.1, max_differences=4))


def test_versions_are_not_compared_amid_a_refresh_of_somebody_else_c8() -> None:
    with engines(2) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            with fleet.held():
                made[0].version = "2"
                await asyncio.sleep(0.6)
                assert fleet._reasons() == ""
                made[1].version = "2"
            await until(lambda: fleet.weight_version == "2")
            with fleet.held():
                made[0].version = "3"
                await asyncio.sleep(0.3)
                assert fleet._reasons() == ""
            await until(lambda: fleet.engines[urls[0]].left_out)

        with_fleet(urls, use)


def test_a_restart_of_any_length_is_noticed_by_the_id_of_the_process_c8() -> None:
    with engines(2) as (made, urls):
        made[0].start_id, made[1].start_id = "one", "two"

        async def use(fleet: AsyncRolloutFleet) -> None:
            homes = {(await fleet.generate("x", session_id=str(i))).rid for i in range(2)}
            assert homes == {"a", "b"}
            made[1].start_id = "three"
            await until(lambda: fleet.engines[urls[1]].start_id == "three")
            assert fleet._reasons() == "", "it serves the same version again"
            assert list(fleet._choice._sessions.values()) == [fleet.engines[urls[0]]], "its prefixes are gone"
            made[1].start_id, made[1].version = "four", "default"
            await until(lambda: fleet.engines[urls[1]].left_out)
            assert {(await fleet.generate("x")).rid for _ in range(6)} == {"a"}
            made[0].start_id, made[0].version = "five", "default"
            await until(lambda: fleet.engines[urls[0]].left_out)
            with pytest.raises(ServerUnreachable, match="serves weight version default, the fleet 1"):
                await fleet.generate("x")

        with_fleet(urls, use, policy=FleetPolicy(check_every_s=0.05, max_differences=10**6))


def test_an_engine_is_brought_up_to_date_before_it_is_taken_back() -> None:
    with engines(2) as (made, urls):
        made[1].version = "0"
        brought: list[tuple[str, str]] = []

        async def bring(client: AsyncRolloutClient, version: str) -> None:
            brought.append((client.base_url, version))
            if len(brought) == 1:
                raise ZeroDivisionError("no weights yet")
            made[1].version = version

        async def use(fleet: AsyncRolloutFleet) -> None:
            fleet.weight_version = "1"
            await fleet.wait_until_ready(timeout=10)
            assert brought == [(urls[1], "1")] * 2

        with_fleet(urls, use, bring_up_to_date=bring)

        made[1].version = "0"

        def bring_blocking(client: RolloutClient, version: str) -> None:
            assert client.weight_version() == "0"
            made[1].version = version

        with RolloutFleet(urls, policy=QUICK, timeouts=TIMES, bring_up_to_date=bring_blocking) as fleet:
            fleet.wait_until_ready(timeout=10)
            assert fleet.weight_version == "1"


def test_nobody_is_taken_back_amid_a_pause_or_an_update() -> None:
    with engines(2) as (made, urls):

        async def use(fleet: AsyncRolloutFleet) -> None:
            made[1].is_healthy = False
            await until(lambda: fleet.engines[urls[1]].left_out)
            for block in (fleet.paused(), fleet.weight_transaction("1")):
                async with block:
                    made[1].is_healthy = True
                    await asyncio.sleep(0.4)
                    assert fleet.engines[urls[1]].left_out
                await fleet.wait_until_ready(timeout=10)
                made[1].is_healthy = False
                await until(lambda: fleet.engines[urls[1]].left_out)

        with_fleet(urls, use)


# --- requests to all ---------------------------------------------------------------------------------------------


def test_a_pause_of_all_ends_on_all_however_the_block_ends() -> None:
    with engines(3) as (made, urls):

        def verbs(name: str) -> list[int]:
            return [len(each.asked(f"/{name}_generation")) for each in made]

        with RolloutFleet(urls, policy=QUICK, timeouts=TIMES) as fleet:
            with fleet.paused("in_place"):
                assert (verbs("pause"), verbs("continue")) == ([1, 1, 1], [0, 0, 0])
            with pytest.raises(ZeroDivisionError), fleet.paused():
                raise ZeroDivisionError
            assert (verbs("pause"), verbs("continue")) == ([2, 2, 2], [2, 2, 2])
            assert made[0].asked("/pause_generation") == [{"mode": "in_place"}, {"mode": "retract"}]
            made[1].canned.answers["/pause_generation"] = json_response({"message": "another one pauses"}, 409)
            with pytest.raises(FleetError, match="another one pauses") as caught, fleet.paused():
                raise AssertionError("not entered")
            assert list(caught.value.failures) == [urls[1]]
            assert verbs("continue") == [3, 2, 3], "a pause that was refused may be another one's"
            fleet.abort("r")
            assert [each.asked("/abort_request")[-1]["rid"] for each in made] == ["r"] * 3
            fleet.abort_all()
            assert all(each.asked("/abort_request")[-1]["abort_all"] for each in made)


def test_an_update_is_verified_by_all_before_any_commits() -> None:
    with engines(2) as (made, urls), RolloutFleet(urls, policy=QUICK, timeouts=TIMES) as fleet:
        with fleet.weight_transaction("2", coverage="partial", lease_s=9.0) as update:
            update.send("update_weights_from_disk", model_path="/m")
        begun, sent, ends = (
            made[0].asked(f"/{verb}")
            for verb in ("begin_weight_update", "update_weights_from_disk", "end_weight_update")
        )
        (update_id,) = {body["update_id"] for each in made for body in each.asked("/end_weight_update")}
        assert begun == [{"weight_version": "2", "coverage": "partial", "lease_s": 9.0, "update_id": update_id}]
        assert sent == [{"model_path": "/m", "update_id": update_id}]
        assert [end["phase"] for end in ends] == ["verify", "commit"]
        assert update.engines[urls[0]].committed and update.engines[urls[1]].committed

        made[1].canned.answers["/update_weights_from_disk"] = json_response({"message": "no such folder"}, 404)
        with pytest.raises(EngineError, match="no such folder"), fleet.weight_transaction("3") as update:
            update.send("update_weights_from_disk", model_path="/n")
        assert [len(each.asked("/abort_weight_update")) for each in made] == [1, 1]
        assert [each.version for each in made] == ["2", "2"] and fleet.weight_version == "2"
        assert all(engine.left_out is None for engine in fleet.engines.values())

        with fleet.weight_transaction("4", on_engine_failure="leave_out") as update:
            update.send("update_weights_from_disk", model_path="/n")
        assert [each.version for each in made] == ["4", "2"] and fleet.weight_version == "4"
        assert "did not take version 4" in str(fleet.engines[urls[1]].left_out)
        assert fleet.generate("x").rid == fleet.generate("x").rid == "a"  # type: ignore[union-attr]


def test_closing_ends_the_checks() -> None:
    with engines(1) as (made, urls):
        with RolloutFleet(urls, policy=QUICK) as fleet:
            assert fleet.generate("x").rid == "a"  # type: ignore[union-attr]
        count = len(made[0].canned.asked)
        time.sleep(0.3)
        assert len(made[0].canned.asked) == count


@pytest.mark.mutant
def test_a_fleet_without_sessions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Choice.choose
    monkeypatch.setattr(Choice, "choose", lambda self, session_id, tried: choose(self, None, tried))
    with pytest.raises(AssertionError):
        test_a_session_stays_where_it_is_while_that_engine_lives()


def test_an_update_of_all_can_be_broadcast() -> None:
    """The field `names` of a bucket was taken for the names of the engines."""
    lists: dict[str, Any] = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]]}
    with engines(2) as (made, urls), RolloutFleet(urls, policy=QUICK, timeouts=TIMES) as fleet:
        for each in made:
            each.canned.answers["/update_weights_from_distributed"] = {"success": True, "message": ""}
        with fleet.weight_transaction("2") as update:
            update.send("update_weights_from_distributed", **lists)
        for each in made:
            (sent,) = each.asked("/update_weights_from_distributed")
            assert {name: sent[name] for name in lists} == lists
