"""`GrammarGuard`: a process that compiles a grammar before the engine does, so that a hostile one costs no one else.

A few compiles take hours, in the library's own code, which nothing can interrupt.  The process that compiles has
`MAX_SECONDS` of the processor for each grammar, and a bound on its memory.  One that uses them up ends, its grammar is
refused, and the next grammar gets another process.

    GrammarGuard  -- vocabulary, then grammars -->  guard_process
                  <-- "" or why it is refused  ---
"""

from __future__ import annotations

import os
import select
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
from rollout.grammar.guard_process import MAX_SECONDS, SIZE
from rollout.grammar.vocabulary import GrammarVocabulary

_START_SECONDS = 60.0  # until the process has read the vocabulary
_ANSWER_SECONDS = 20.0  # on a clock: the processor may be busy
_MAX_KNOWN = 4096
_TOO_LONG = f"it takes more than {MAX_SECONDS:g} s or too much memory to compile"


class GrammarGuard:
    """Checks grammars, one at a time.  May be called from any thread; `check` waits for the process."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, str] = OrderedDict()  # the answers of the latest grammars

    def check(self, grammar: Grammar) -> None:
        """Raise `BadRequest` for a grammar that is wrong or over a limit, `Unavailable` without the process."""
        with self._lock:
            error = self._known.get(grammar)
            if error is None:
                error = self._known[grammar] = self._ask(grammar)
            self._known.move_to_end(grammar)
            while len(self._known) > _MAX_KNOWN or sum(len(known.text) for known in self._known) > 1 << 24:
                self._known.popitem(last=False)
        if error:
            raise BadRequest(error)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, grammar: Grammar) -> str:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        answer = _exchange(process, msgspec.msgpack.encode(grammar), _ANSWER_SECONDS)
        if answer is None:
            self.close()
            return f"the grammar ({grammar.kind}) is refused: {_TOO_LONG}"
        return answer.decode()

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        command = [sys.executable, "-m", "rollout.grammar.guard_process"]
        process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        if _exchange(process, msgspec.msgpack.encode(self._vocabulary()), _START_SECONDS) is None:
            self.close()
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
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(descriptor, count - len(data)) if ready else b""
        if not part:
            return None
        data += part
    return data
