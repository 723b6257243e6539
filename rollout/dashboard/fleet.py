"""`lockstep dashboard URL ...`: several servers on one page, from a process of its own on this machine.

The process asks the servers with their key, and the page asks the process.  So no key reaches the page, no server
answers pages of another, and the browser needs no way to the servers.  It listens on this machine alone and only reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollout.core.console import fail, say
from rollout.core.errors import LockstepError
from rollout.core.version import VERSION
from rollout.dashboard.fleet_flags import parser
from rollout.dashboard.routes import FOLDERS
from rollout.http.gate import SiteCheck
from rollout.http.io import error_response, json_response
from rollout.http.web_page import FilesPage

POLL_S = 2.0
ANSWER_S = 5.0
STALE_S = 5.0
"""A sample that is older is not shown as the current one: the engine behind the server stands still."""
ROWS_KEPT = 1800
"""Rounds of questions that are kept: an hour."""
NOTHING_YET = 2**53 - 1
"""The `since` of a first question, which asks for the state and no history."""
HOST = "127.0.0.1"
FACTS = (
    *("num_running_reqs", "num_waiting_reqs", "max_running_requests", "num_used_tokens", "max_total_num_tokens"),
    *("paused", "withheld", "poisoned", "weight_version", "weight_epoch", "weight_update", "memory"),
)


class Engine:
    """One server, as it answered last.  `trouble`: why the last question has no answer."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.url = url
        self.trouble: str | None = "not asked yet"
        self.rate: float | None = None  # tokens generated per second
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_S)
        self._since = NOTHING_YET
        self._sample: dict[str, Any] = {}
        self._facts: dict[str, Any] = {"unanswered": None, "server": {}, "state": None, "sample": {}, "num_refusals": 0}

    async def ask(self) -> None:
        """Ask for the state and the newest samples.  Never raises."""
        status = 0
        try:
            response = await self._http.get("/dashboard/data", params={"since": self._since})
            status = response.status_code
            answer = response.json()
            if status == 200:
                self._keep(answer)
            elif status == 404:
                self._lose("has no dashboard: it runs with --no-enable-metrics, or is another program")
            else:
                self._lose(f"refuses with status {status}: {answer['error']['message']}")
        except httpx.TimeoutException:
            self._lose(f"no answer within {ANSWER_S:g} s")
        except httpx.HTTPError:
            self._lose("cannot be reached")
        except (ValueError, LookupError, TypeError, AttributeError):
            self._lose(f"answers with status {status} and not as lockstep {VERSION} does")

    def _keep(self, answer: dict[str, Any]) -> None:
        """Keep what the page shows of an answer.  Raises if parts are missing or of another kind."""
        state, server, unanswered = answer["state"], answer["server"], answer["unanswered"]
        last = answer["samples"][-1] if answer["samples"] else self._sample
        sample = last if last and answer["now"] - last["at"] <= STALE_S else {}
        self._facts = {
            "unanswered": unanswered,
            "server": {name: server[name] for name in ("model", "version", "started_at", "phase", "failure")},
            "state": None if state is None else {name: state[name] for name in FACTS},
            "sample": sample,
            "num_refusals": sum(one["times"] for one in answer["refusals"]),
        }
        self._since, self._sample = answer["count"], last
        self.trouble, self.rate = None, sample.get("generated_per_s")

    def _lose(self, reason: str) -> None:
        self.trouble, self.rate, self._since = reason, None, NOTHING_YET

    async def close(self) -> None:
        await self._http.aclose()

    def shown(self) -> dict[str, Any]:
        """Return the facts of the last answer that the page shows."""
        return {"url": self.url, "trouble": self.trouble} | self._facts


class FleetPage:
    """The page, its data, and the task that asks the servers."""

    def __init__(self, urls: Sequence[str], key: str | None) -> None:
        self._engines = [Engine(url, key) for url in dict.fromkeys(urls)]
        self._page = FilesPage("rollout.dashboard", FOLDERS, "fleet.html")
        self._sites = SiteCheck(HOST)
        self._started_at = time.time()
        self._rows: deque[tuple[int, dict[str, Any]]] = deque(maxlen=ROWS_KEPT)
        self._count = 0

    def app(self) -> Starlette:
        routes = [("/", self.page), ("/dashboard/files/{name}", self.file), ("/fleet/data", self.data)]
        return Starlette(routes=[Route(path, act) for path, act in routes], lifespan=self._life)

    async def ask(self) -> None:
        """Ask all servers at once, and keep a row."""
        await asyncio.gather(*(engine.ask() for engine in self._engines))
        self._count += 1
        row = {"at": round(time.time(), 3), "rates": [engine.rate for engine in self._engines]}
        self._rows.append((self._count, row))

    @contextlib.asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        asking = asyncio.create_task(self._ask_on())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for engine in self._engines:
                await engine.close()

    async def _ask_on(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(POLL_S)

    async def page(self, _: Request) -> Response:
        return self._page.response()

    async def file(self, request: Request) -> Response:
        try:
            return self._page.file(request.path_params["name"], request.headers.get("if-none-match"))
        except LockstepError as error:
            return error_response(error)

    async def data(self, request: Request) -> Response:
        """Return the servers' last answers, and the rows after number `since`."""
        objection = self._sites.objection(dict(request.scope["headers"]))
        if objection is not None:
            return json_response({"error": {"type": "Forbidden", "message": objection}}, 403)
        given = request.query_params.get("since", "0")
        since = int(given) if given.isdecimal() else 0
        content = {
            "now": time.time(),
            "version": VERSION,
            "started_at": self._started_at,
            "count": self._count,
            "engines": [engine.shown() for engine in self._engines],
            "rows": [row for number, row in self._rows if number > since],
        }
        return json_response(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until a signal, and return the exit status."""
    args = parser().parse_args(argv)
    page = FleetPage(args.urls, args.admin_api_key)
    config = uvicorn.Config(page.app(), host=HOST, port=args.port, log_level="warning", access_log=False, ws="none")
    server = uvicorn.Server(config)
    try:
        listener = config.bind_socket()
    except SystemExit:
        return fail(f"port {args.port} cannot be opened: take another --port")
    say(f"the dashboard is at http://{HOST}:{args.port}")
    server.run(sockets=[listener])
    return 0
