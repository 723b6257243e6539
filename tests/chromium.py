"""Headless Chromium, driven over its DevTools protocol through two pipes: JSON messages that end with a null byte."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_S = 30.0
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium is installed (Debian's package: chromium)"


# The browser reads commands from descriptor 3 and writes to 4.
_LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page.  `console`: what it reported as errors and warnings, exceptions included."""

    def __init__(self, to: int, back: int) -> None:
        self.console: list[str] = []
        self._to, self._back = to, back
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + WAIT_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser has not answered"
            chunk = os.read(self._back, 1 << 16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Return the text that a person reads in the first element that matches."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def wait_for(self, expression: str, timeout_s: float = WAIT_S) -> None:
        """Wait until the expression is true."""
        until = time.monotonic() + timeout_s
        while self.evaluate(expression) is not True:
            assert time.monotonic() < until, f"{expression} did not come true; the page:\n{self.text()}"
            time.sleep(0.1)

    def wait_for_text(self, words: str, selector: str = "body") -> None:
        text = f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"
        self.wait_for(f"{text}.includes({json.dumps(words)})")

    def look(self, width: int, height: int = 1000, *, dark: bool = False) -> None:
        """Set the size of the window, and whether it prefers dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser with a profile of its own, which ends with the block."""
    assert PROGRAM is not None, MISSING
    read_to, write_to = os.pipe()
    read_back, write_back = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        command = [
            *(PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(read_to), str(write_back), *command],
            pass_fds=(read_to, write_back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_to)
        os.close(write_back)
        try:
            yield Browser(write_to, read_back)
        finally:
            os.close(write_to)  # which ends it
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(read_back)
