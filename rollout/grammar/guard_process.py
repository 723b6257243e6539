"""Entry of the process of `GrammarGuard`: it compiles each grammar that it is sent, or ends.

The system ends it when a grammar has used up its seconds of the processor, and when its parent ends.  An allocation
over the bound on its memory ends it, too.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from rollout.core.errors import LockstepError
from rollout.core.grammar import Grammar
from rollout.grammar.builder import GrammarBuilder
from rollout.grammar.vocabulary import GrammarVocabulary

MAX_SECONDS = 0.5  # of the processor, for one grammar
SIZE = struct.Struct("<I")  # before each message
_PR_SET_PDEATHSIG = 1
_MAX_BYTES = 4 << 30  # of addresses, more than is used


def main() -> int:
    """Answer grammars until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_WRONLY)
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(null, 1)  # what the library prints is no answer
    first = _receive(inbox)
    if first is None:
        return 0
    vocabulary = msgspec.msgpack.decode(first, type=GrammarVocabulary)
    builder = GrammarBuilder(lambda: vocabulary)
    builder.build(Grammar("json_object"))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(outbox, b"")
    while (data := _receive(inbox)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # ends the process, as nothing handles its signal
        answer = _check(builder, msgspec.msgpack.decode(data, type=Grammar))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(outbox, answer.encode())
    return 0


def _check(builder: GrammarBuilder, grammar: Grammar) -> str:
    """Return why the grammar is refused; empty if it is not."""
    try:
        builder.build(grammar)
    except LockstepError as error:
        return str(error)
    return ""


def _receive(inbox: BinaryIO) -> bytes | None:
    head = inbox.read(SIZE.size)
    return inbox.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def _send(outbox: BinaryIO, data: bytes) -> None:
    outbox.write(SIZE.pack(len(data)) + data)
    outbox.flush()


if __name__ == "__main__":
    sys.exit(main())
