"""`GrammarGuard`: a process that compiles a grammar before the engine does, so that a hostile one costs no one else.

A few compiles take hours, in the library's own code, which nothing can interrupt.  The process has a child compile
each grammar, with `MAX_SECONDS` of the processor, `MAX_WAIT_S` on a clock, and a bound on its memory.

    GrammarGuard  -- vocabulary, then grammars -->  guard_process  -- fork --> child that compiles one grammar
                  <-- accepted, or why not -------
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import IO

import msgspec

from rollout.core.errors import BadRequest, Unavailable
from rollout.core.grammar import Grammar
from rollout.grammar.guard_process import BUSY, COSTLY, MAX_SECONDS, MAX_WAIT_S, SIZE, SLOW, is_readable
from rollout.grammar.vocabulary import GrammarVocabulary

_START_SECONDS = 60.0  # until the process has read the vocabulary
_ANSWER_SECONDS = 20.0  # the process answers earlier, however busy the machine is
_MAX_KNOWN = 4096
SLOW_KEPT_S = 10.0
"""A grammar that the clock cut is asked about again after this: the machine may have less to do."""
_TOO_LONG = f"it takes more than {MAX_SECONDS:g} s or too much memory to compile"
_TOO_SLOW = f"it took more than {MAX_WAIT_S:g} s, and the machine may be busy; try again in {SLOW_KEPT_S:g} s"


class GrammarGuard:
    """Checks grammars, one at a time.  May be called from any thread; `check` waits for the process."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        # Of the latest grammars: why one is refused, empty if it is not; and when it is asked about again.
        self._known: OrderedDict[Grammar, tuple[str, float]] = OrderedDict()
        self._is_closed = False

    def check(self, grammar: Grammar) -> None:
        """Raise `BadRequest` for a grammar that is wrong or over a limit.

        Raises `Unavailable` without the process, or if the machine is too busy to tell.
        """
        with self._lock:
            error, until = self._known.pop(grammar, ("", -math.inf))
            if time.monotonic() >= until:
                error = self._ask(grammar)
                until = time.monotonic() + SLOW_KEPT_S if error.endswith(_TOO_SLOW) else math.inf
            self._known[grammar] = error, until
            while len(self._known) > _MAX_KNOWN or sum(len(known.text) for known in self._known) > 1 << 24:
                self._known.popitem(last=False)
        if error:
            raise BadRequest(error)

    def start(self) -> None:
        """Start the process, if it does not run, so that the first grammar need not wait for it.

        Raises `Unavailable` if it does not start, unless `close` ended it meanwhile.
        """
        with self._lock:
            try:
                self._running()
            except Unavailable:
                if not self._is_closed:
                    raise

    def close(self) -> None:
        """End the process, also one that is starting in another thread."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, grammar: Grammar) -> str:
        """Return why the grammar is refused; empty if it is not."""
        answer = _exchange(self._running(), msgspec.msgpack.encode(grammar), _ANSWER_SECONDS)
        if answer is None:
            self._end()
            raise Unavailable("the process that checks grammars has ended or does not answer; try again")
        if answer == BUSY:
            raise Unavailable("the machine is too busy to check the grammar within a second; try again")
        if answer == COSTLY:
            return f"the grammar ({grammar.kind}) is refused: {_TOO_LONG}"
        if answer == SLOW:
            return f"the grammar ({grammar.kind}) is refused: {_TOO_SLOW}"
        return answer[1:].decode(errors="replace")

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self._end()
        command = [sys.executable, "-m", "rollout.grammar.guard_process"]
        process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        vocabulary = msgspec.msgpack.encode(self._vocabulary())
        if self._is_closed or _exchange(process, vocabulary, _START_SECONDS) is None:
            self._end()
            raise Unavailable("the process that checks grammars does not start")
        return process


def _exchange(process: subprocess.Popen[bytes], data: bytes, seconds: float) -> bytes | None:
    """Send a message and return the answer; None if the process ends or the time is over."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(SIZE.pack(len(data)) + data)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    deadline = time.monotonic() + seconds
    head = _read(process.stdout, SIZE.size, deadline)
    return None if head is None else _read(process.stdout, SIZE.unpack(head)[0], deadline)


def _read(stream: IO[bytes], count: int, deadline: float) -> bytes | None:
    """Return `count` bytes; None at the end of the stream or at the deadline."""
    descriptor, data = stream.fileno(), b""
    while len(data) < count:
        is_ready = is_readable(descriptor, max(0.0, deadline - time.monotonic()))
        part = os.read(descriptor, count - len(data)) if is_ready else b""
        if not part:
            return None
        data += part
    return data
