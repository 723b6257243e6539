"""The page of several servers in a real browser."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.chromium import Browser
from tests.dashboard_browser import NEEDS_BROWSER, SETTINGS
from tests.ports import free_ports_in_a_row
from tests.server_process import ServerProcess

pytest_plugins = ["tests.dashboard_fixtures"]
pytestmark = [pytest.mark.full, NEEDS_BROWSER]


def test_a_fleet_is_one_page_of_a_process_that_holds_the_key(
    browser: Browser, server: ServerProcess, model: Path
) -> None:
    with ServerProcess(model, api_key="k", **SETTINGS) as two:
        port = free_ports_in_a_row(1)
        command = [sys.executable, "-m", "rollout.cli.main", "dashboard", server.url, two.url, "--port", str(port)]
        process = subprocess.Popen(command, env=os.environ | {"LOCKSTEP_ADMIN_API_KEY": "k"})
        try:
            wait_until_it_listens(port)
            browser.open(f"http://127.0.0.1:{port}/")
            browser.wait_for_text("2 of 2 serve", "#gate")
            assert browser.evaluate("document.querySelectorAll('#engines tbody tr').length") == 2
            browser.wait_for("lockstep.charts.get('rates').shown.length === 2")
            assert '"k"' not in httpx.get(f"http://127.0.0.1:{port}/fleet/data").text
            strange = httpx.get(f"http://127.0.0.1:{port}/fleet/data", headers={"host": "evil.example"})
            assert strange.status_code == 403
            two.process.send_signal(signal.SIGKILL)
            two.wait_exit()
            browser.wait_for_text("1 of 2 serve", "#gate")
            browser.look(360)
            browser.wait_for("document.documentElement.scrollWidth <= window.innerWidth")
            assert browser.console == []
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def wait_until_it_listens(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < until
        time.sleep(0.1)
