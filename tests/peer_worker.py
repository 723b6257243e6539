"""A worker for tests of benchmarks/peers: it answers with counters, and does as its settings say."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.peers.workers import protocol
from benchmarks.peers.workers.protocol import Prompts


class Counter:
    """`beat` is a file that a child process appends to twenty times a second, for as long as it lives."""

    def __init__(self, beat: str = "", fail: str = "") -> None:
        print("noise of a library on stdout")
        if fail:
            raise ValueError(fail)
        if beat:
            loop = "import sys,time\nwhile True:\n open(sys.argv[1], 'a').write('x'); time.sleep(0.05)"
            self._child = subprocess.Popen([sys.executable, "-c", loop, beat])
        self.about = "counter"

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        if max_new_tokens == 99:
            sys.exit(3)
        if max_new_tokens == 98:
            time.sleep(60.0)
        return 0.0, [list(range(max_new_tokens)) for _ in prompts]

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        return [[(token, 0.0) for token in range(count)] for _ in prompts]

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        raise RuntimeError("out of tune")

    def close(self) -> None:
        """Leave the worker's child running."""


if __name__ == "__main__":
    protocol.main(Counter)
