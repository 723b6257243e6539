"""Entry of the process of `GrammarGuard`: it answers whether each grammar that it is sent may be compiled.

A child compiles the grammar, so that one that is never done costs no more than the child.  The system ends the child
when it has used up its seconds of the processor.  An allocation over the bound on its memory ends it, too.  This
process waits `MAX_WAIT_S` for it, and stays as it is: the next grammar does not wait for the start of another.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
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
MAX_WAIT_S = 0.9  # on a clock
ENOUGH_SECONDS = 0.1  # of the processor: more than grammars take that people write
SIZE = struct.Struct("<I")  # before each message
ACCEPTED, REFUSED, COSTLY, SLOW, BUSY = b"A", b"R", b"C", b"S", b"B"
"""The first byte of an answer; a refusal has its reason behind.  `SLOW` and `BUSY` depend on the machine's load."""
_PR_SET_PDEATHSIG = 1
_MAX_BYTES = 4 << 30  # of addresses, more than is used


def main() -> int:
    """Answer grammars until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    _end_with_parent()
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
    _send(outbox, ACCEPTED)
    while (data := _receive(inbox)) is not None:
        _send(outbox, answer_to(builder, msgspec.msgpack.decode(data, type=Grammar)))
    return 0


def answer_to(builder: GrammarBuilder, grammar: Grammar) -> bytes:
    """Return the answer to a grammar: see `ACCEPTED`.

    A grammar whose child used up its seconds of the processor, or its memory, is costly.  One whose child others ended,
    or the clock after enough of the processor, is slow.  Else the machine is busy.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _end_with_parent()
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # ends the child, as nothing handles its signal
            os.write(writer, _check(builder, grammar))
        finally:
            os._exit(0)
    os.close(writer)
    is_in_time = is_readable(reader, MAX_WAIT_S)
    answer = os.read(reader, select.PIPE_BUF) if is_in_time else b""
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    if answer:
        return answer
    if is_in_time:
        return SLOW if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else COSTLY
    return SLOW if used.ru_utime + used.ru_stime >= ENOUGH_SECONDS else BUSY


def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait until bytes or the end of the stream can be read.  Returns False after `seconds`.

    `select.select` takes no descriptor above 1023, which a server with many connections has.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000.0 * seconds))


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _check(builder: GrammarBuilder, grammar: Grammar) -> bytes:
    try:
        builder.build(grammar)
    except LockstepError as error:
        return REFUSED + str(error).encode()[: select.PIPE_BUF - 1]
    return ACCEPTED


def _receive(inbox: BinaryIO) -> bytes | None:
    head = inbox.read(SIZE.size)
    return inbox.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else None


def _send(outbox: BinaryIO, data: bytes) -> None:
    outbox.write(SIZE.pack(len(data)) + data)
    outbox.flush()


if __name__ == "__main__":
    sys.exit(main())
