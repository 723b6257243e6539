"""Records calls of this project's Python functions, in this process or in child processes, on all of their threads.

    recorder = Recorder(root)             from `start()` on, threads that begin later included
    with recorded_children(root, folder)  every Python process that is started within the block

A resumed generator or coroutine counts as a call, as to `sys.setprofile`.  Standard library only: a child loads it
before anything else.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

PACKAGES = ("rollout", "capture", "eplb", "weight_sync")
FLUSH_S = 0.1
_SITE = """import sys
from pathlib import Path
from tests.call_recorder import Recorder, flush_into
recorder = Recorder(Path({root!r}))
flush_into(recorder, Path({folder!r}))
recorder.start()
"""

Event = tuple[float, int, CodeType | None]  # seconds (monotonic), thread; None: the return of the last call


@dataclass(frozen=True)
class Function:
    """A function, by its file relative to the root.  `names`: the attributes, globals and variables in its code."""

    file: str
    name: str
    names: frozenset[str] = frozenset()

    @staticmethod
    def of(code: CodeType, root: Path) -> Function:
        names = frozenset((*code.co_names, *code.co_varnames, *code.co_freevars))
        return Function(str(Path(code.co_filename).relative_to(root)), code.co_qualname, names)


@dataclass(frozen=True)
class Call:
    """A call at `at` seconds (monotonic), and the calls of this project that it was made in, outermost first."""

    at: float
    function: Function
    within: tuple[Function, ...]

    def is_below(self, name: str) -> bool:
        """Return whether it is a call of the function with this qualified name, or made within one."""
        return any(function.name == name for function in (*self.within, self.function))


class Recorder:
    """`events` since `start`.  `root`: the folder of the packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: deque[Event] = deque()
        self._prefixes = tuple(f"{root / package}{os.sep}" for package in PACKAGES)
        self._is_ours: dict[CodeType, bool] = {}

    def start(self) -> None:
        """Record from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Record nothing more, on this thread and on threads that begin later."""
        sys.setprofile(None)
        threading.setprofile(None)

    def take(self) -> list[Event]:
        """Return what was recorded since the last call, and forget it."""
        return [self.events.popleft() for _ in range(len(self.events))]  # none is lost that another thread adds

    def calls(self) -> list[Call]:
        """Return the calls since the last `take`, by time."""
        functions: dict[CodeType, Function] = {}
        for _, _, code in (events := self.take()):
            if code is not None and code not in functions:
                functions[code] = Function.of(code, self.root)
        return calls_of((at, thread, code and functions[code]) for at, thread, code in events)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(self._prefixes)
        if is_ours:
            self.events.append((time.monotonic(), threading.get_ident(), code if event == "call" else None))


def calls_of(events: Iterable[tuple[float, int, Function | None]]) -> list[Call]:
    """Return the calls of one process; returns of calls that began before are left out."""
    stacks: dict[int, list[Function]] = {}
    calls = []
    for at, thread, function in events:
        stack = stacks.setdefault(thread, [])
        if function is not None:
            calls.append(Call(at, function, tuple(stack)))
            stack.append(function)
        elif stack:
            stack.pop()
    return calls


# --- turns of the loop -------------------------------------------------------------------------------------------

TURN = "Scheduler.tick"
_OPERATORS = ("rollout/kernels/",)
_CONTROL = "rollout/control/"


def turns_of(calls: Iterable[Call]) -> list[list[Call]]:
    """Return the calls of each turn of a scheduler's loop, the turn itself first, operators left out."""
    turns: list[list[Call]] = []
    for call in calls:
        if call.function.name == TURN:
            turns.append([])
        if turns and call.is_below(TURN) and not call.function.file.startswith(_OPERATORS):
            turns[-1].append(call)
    return turns


def branch(call: Call) -> Function | None:
    """Return the call of the turn itself that `call` is made in; None outside a turn."""
    chain = (*call.within, call.function)
    begun = next((index for index, function in enumerate(chain) if function.name == TURN), None)
    return None if begun is None or begun + 1 == len(chain) else chain[begun + 1]


def is_poll(call: Call) -> bool:
    """Return whether a turn makes the call to learn whether something between steps is to do, or to do it."""
    function = branch(call)
    return function is not None and (function.file.startswith(_CONTROL) or function.name == "Agenda.run")


def steady(turns: Iterable[list[Call]]) -> list[Call]:
    """Return a turn of the kind that is most frequent: with as many calls as most turns have."""
    by_size = {len(turn): turn for turn in turns}
    ((size, _),) = Counter(len(turn) for turn in turns).most_common(1)
    return by_size[size]


# --- child processes ---------------------------------------------------------------------------------------------


def flush_into(recorder: Recorder, folder: Path) -> None:
    """Write what is recorded into a file of this process, again and again, from a daemon thread."""
    known: dict[CodeType, int] = {}

    def flush() -> None:
        with open(folder / f"{os.getpid()}.jsonl", "w") as out:
            while True:
                time.sleep(FLUSH_S)
                lines: list[Any] = []
                for at, thread, code in recorder.take():
                    if code is not None and code not in known:
                        known[code] = len(known)
                        function = Function.of(code, recorder.root)
                        lines.append([function.file, function.name, sorted(function.names)])
                    lines.append([at, thread, None if code is None else known[code]])
                out.writelines(json.dumps(line) + "\n" for line in lines)
                out.flush()

    threading.Thread(target=flush, name="call-recorder", daemon=True).start()


@contextmanager
def recorded_children(root: Path, folder: Path) -> Iterator[None]:
    """Record the calls in every Python process that is started within the block; `calls_of_children` reads them."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE.format(root=str(root), folder=str(folder)))
    path = os.pathsep.join((str(site), str(root)))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        yield


def calls_of_children(folder: Path) -> dict[int, list[Call]]:
    """Return the calls by process id."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        functions: list[Function] = []
        events: list[tuple[float, int, Function | None]] = []
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # it was being written when the process ended
            entry = json.loads(line)
            if isinstance(entry[0], str):
                functions.append(Function(entry[0], entry[1], frozenset(entry[2])))
            else:
                at, thread, index = entry
                events.append((at, thread, None if index is None else functions[index]))
        found[int(path.stem)] = calls_of(events)
    return found
