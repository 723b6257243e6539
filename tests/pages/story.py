"""Run the blocks of a page in order, in a fresh folder: `python -m tests.pages.story PAGE [--checkpoint FOLDER]`.

A `bash` block is a script.  Where it starts servers it goes to the background, and the next block begins once they are
ready.  `python` blocks share one namespace.  The first block that fails ends the story, with its text and status 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pages import markdown, marks, network
from tests.pages.markdown import ROOT, Block

PORT = 30000
READY_S, BLOCK_S, STOP_S = 120.0, 300.0, 20.0
SERVE = re.compile(r"(?:^|[;&|({]\s*|\s)(?:lockstep|python3? -m rollout\.cli\.main) serve\b([^;&|\n]*)", re.MULTILINE)


class BlockFailed(Exception):
    """A block did not end as it must."""


@dataclass
class Background:
    """A block that serves: its process, the ports of its servers, and its output."""

    process: subprocess.Popen[bytes]
    ports: set[int]
    output: Path

    def stop(self) -> None:
        """End the block with its servers, by SIGTERM first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + STOP_S
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
                while time.monotonic() < until:
                    self.process.poll()
                    os.killpg(self.process.pid, 0)  # until no process of the group is left
                    time.sleep(0.05)
                continue
            return


class Story:
    """The run of one page.  `folder` is the current one of its blocks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._background: list[Background] = []
        self._module = types.ModuleType("__main__")
        self._environment = environment()

    def run(self, block: Block) -> None:
        """Run a block, or write its file; raises `BlockFailed`."""
        if marks.kind(block) == marks.FILE:
            path = marks.path_of_file(block, self._folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif marks.is_run(block):
            run = self._bash if block.language == "bash" else self._python
            run(block)

    def close(self) -> None:
        for one in reversed(self._background):
            one.stop()

    def _bash(self, block: Block) -> None:
        ports = ports_of_servers(block.text)
        if ports:
            self._serve(block, ports)
            return
        command = ["bash", "-eu", "-o", "pipefail", "-c", block.text]
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=self._environment, timeout=BLOCK_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise BlockFailed(f"it took over {BLOCK_S:.0f} s") from None
        if done.returncode != 0:
            raise BlockFailed(f"it ended with status {done.returncode}")

    def _serve(self, block: Block, ports: set[int]) -> None:
        """Start a block that serves, and wait until each of its servers is ready."""
        for one in [one for one in self._background if one.ports & ports]:
            one.stop()
            self._background.remove(one)
        output = self._folder / f".server-{block.line}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail", "-c", block.text + "\nwait\n"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._background.append(Background(process, ports, output))
        until = time.monotonic() + READY_S
        while not all(is_ready(port) for port in ports):
            if process.poll() is not None or time.monotonic() > until:
                text = output.read_text(errors="replace")[-3000:]
                raise BlockFailed(f"no server was ready at {sorted(ports)} (status {process.poll()}):\n{text}")
            time.sleep(0.1)

    def _python(self, block: Block) -> None:
        sys.modules["__main__"] = self._module
        tree = ast.parse(block.text, filename=block.page)
        ast.increment_lineno(tree, block.line)  # a traceback names the line of the page
        try:
            exec(compile(tree, block.page, "exec"), vars(self._module))
        except (Exception, SystemExit) as error:
            text = "".join(traceback.format_exception(error)[-12:])
            raise BlockFailed(text + self._last_lines()) from None

    def _last_lines(self) -> str:
        """Return the end of what the servers wrote."""
        return "".join(
            f"\n{one.output.name}: {one.output.read_text(errors='replace')[-1500:]}" for one in self._background
        )


def ports_of_servers(script: str) -> set[int]:
    """Return the ports of the servers that a script starts."""
    commands = SERVE.findall(re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*$", "", script)))
    ports = set()
    for words in map(shlex.split, commands):
        if not {"--help", "-h"} & set(words):
            ports.add(int(words[words.index("--port") + 1]) if "--port" in words else PORT)
    return ports


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def environment() -> Mapping[str, str]:
    """Return the environment of blocks: this tree and this Python first, no GPU, no proxy."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "LOCKSTEP_DEVICE": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}
    return kept | ours | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


def before_page(mark: str, checkpoint: Path | None, folder: Path) -> list[Block]:
    """Return the blocks that a page's own mark stands for."""
    if not mark:
        return []
    what, _, flags = mark.partition(" ")
    if what not in ("server", "checkpoint"):
        raise ValueError(f"no mark of a page is called {mark!r}: it is server, with flags, or checkpoint")
    made = Block("page", 0, "bash", "", "lockstep make-checkpoint ./checkpoint\n")
    if checkpoint is not None:
        shutil.copytree(checkpoint, folder / "checkpoint")
        made = Block("page", 0, "bash", "", "true\n")
    serve = f"lockstep serve ./checkpoint --enable-return-routed-experts {flags}\n"
    return [made, Block("page", 0, "bash", "", serve)] if what == "server" else [made]


def run_page(page: str, checkpoint: Path | None, folder: Path) -> int:
    """Run the blocks of a page; print each with its time, and return how many of them failed: none or one."""
    source = (ROOT / page).read_text(encoding="utf-8")
    story = Story(folder)
    os.environ.update(story._environment)
    os.chdir(folder)
    try:
        for block in [*before_page(markdown.page_mark(source), checkpoint, folder), *markdown.blocks(page, source)]:
            started = time.monotonic()
            try:
                story.run(block)
            except BlockFailed as error:
                print(f"{block.place} failed: {error}\n\n{block.text}", flush=True)
                return 1
            if marks.is_run(block):
                print(f"{block.place} {block.language}, {time.monotonic() - started:.1f} s", flush=True)
    finally:
        story.close()
    return 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pages.story", description="Run the blocks of a page.")
    parser.add_argument("page", help="path from the repository's root")
    parser.add_argument("--checkpoint", type=Path, help="a folder that make-checkpoint wrote, instead of a new one")
    given: Any = parser.parse_args(words)
    if not network.enter() and is_ready(PORT):
        print(f"port {PORT} is taken, and the system gives no network of its own", file=sys.stderr)
        return 2
    checkpoint = given.checkpoint and given.checkpoint.resolve()
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        return run_page(given.page, checkpoint, Path(folder))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # threads of a block may not end
