"""Plans as bytes: threads may read plans of one kind at once, also for the first time."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A profiler makes a thread yield in the middle of what msgspec learns about a type, as a busy machine may.
_READERS = """
import dataclasses, sys, threading
import msgspec
from eplb.algorithms.types import from_bytes, to_bytes

decode = {decode}
sys.setswitchinterval(1e-6)
for number in range(100):
    fields = [(f"a{{index}}", int, 0) for index in range(30)]
    inner = dataclasses.make_dataclass(f"Inner{{number}}", fields)
    outer = dataclasses.make_dataclass(f"Outer{{number}}", [("one", inner, None), ("more", list[inner], None)])
    data, start = to_bytes(outer(inner(1), [inner(2)])), threading.Barrier(4)

    def read():
        sys.setprofile(lambda *_: [0 for _ in range(20)])
        start.wait()
        assert decode(data, outer).one.a0 == 1

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
"""


def exit_status(decode: str) -> int:
    return subprocess.run([sys.executable, "-c", _READERS.format(decode=decode)], check=False, timeout=120).returncode


def test_four_threads_read_a_kind_of_plan_for_the_first_time() -> None:
    assert exit_status("from_bytes") == 0


@pytest.mark.mutant
def test_threads_that_decode_without_turns_crash() -> None:
    assert exit_status("lambda data, kind: msgspec.msgpack.decode(data, type=kind)") != 0
