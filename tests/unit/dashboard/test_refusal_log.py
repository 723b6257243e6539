"""The last requests that were refused, with their reasons."""

from __future__ import annotations

import pytest

from rollout.dashboard import refusals
from rollout.dashboard.refusals import RefusalLog, reason_in
from tests.dashboard_harness import HOSTILE, data_of
from tests.http_harness import Live


def test_refusals_are_kept_with_their_reasons(live: Live) -> None:
    live.refused(input_ids=[1], sampling_params={"max_new_tokens": -1})
    live.refused(input_ids=[1], sampling_params={"max_new_tokens": -1})
    live.client.get(f"/{HOSTILE}")
    live.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
    first, second = data_of(live)["refusals"]
    assert (first["method"], first["path"], first["status"], first["times"]) == ("POST", "/generate", 400, 2)
    assert "max_new_tokens" in first["reason"]
    assert (second["path"], second["status"], second["reason"]) == (f"/{HOSTILE}", 404, "Not Found")


def test_an_unexpected_error_is_answered_and_kept(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(live.manager, "submit", broken)
    assert live.refused(input_ids=[1]) == (500, "internal error: ZeroDivisionError")
    (kept_one,) = data_of(live)["refusals"]
    assert (kept_one["path"], kept_one["status"]) == ("/generate", 500)
    assert kept_one["reason"] == "internal error: ZeroDivisionError"


def test_a_probe_that_hears_503_is_no_error_n32(live: Live) -> None:
    """N32: polls of /ready during the start filled the list of errors."""
    live.client.post("/pause_generation")
    assert live.client.get("/ready").status_code == 503
    live.call_in_loop(lambda: live.manager.fail("rank 1 was killed"))
    for path in ("/health", "/health_generate", "/ready", "/liveness", "/ping"):
        assert live.client.get(path).status_code == 503
    live.client.get("/health/no")
    assert [one["path"] for one in data_of(live)["refusals"]] == ["/health/no"]


def test_the_log_of_refusals_is_bounded() -> None:
    log = RefusalLog()
    for number in range(100):
        log.note("POST" * 100, f"/{number}" * 1000, 400, "why " * 1000)
    entries = log.entries()
    assert len(entries) == refusals.KEPT and entries[-1]["path"].startswith("/99")
    assert all(len(str(entry)) < 1000 for entry in entries)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"error": 5}', b"\xff", b"[" * 10_000, b"x" * 10**6])
def test_a_body_without_a_reason_has_none(body: bytes) -> None:
    assert reason_in(body) == ""
    assert reason_in(b'{"error": {"message": "no"}}') == "no"
