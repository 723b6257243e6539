"""`GET /` and `GET /docs`: where a person looks first."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import HTMLResponse, RedirectResponse, Response

from rollout.http.web_page import Page


class PageRoutes:
    """The routes of the page.  `shows_dashboard`: whether `/` leads to the dashboard instead."""

    def __init__(self, *, shows_dashboard: bool) -> None:
        self.api_page = Page("rollout.http.api_page")
        self._first = "dashboard" if shows_dashboard else "docs"

    def router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)
        router.add_api_route("/", self.root, response_class=HTMLResponse)
        router.add_api_route("/docs", self.docs, response_class=HTMLResponse)
        return router

    async def root(self) -> Response:
        """Redirect to the dashboard, or to the endpoints if there is none."""
        return RedirectResponse(self._first)

    async def docs(self) -> Response:
        """Return the page of all endpoints and their fields.  It asks /openapi.json, and nothing elsewhere."""
        return self.api_page.response()
