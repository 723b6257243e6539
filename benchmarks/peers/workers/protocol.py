"""The worker's end of a conversation in JSON lines: settings on the command line, requests on stdin, replies on stdout.

    first line     {"about": str}                        the system is loaded; `about`: version and choices made
    {"op": "generate", "prompts": [[int]], "max_new_tokens": int}   -> {"seconds": float, "tokens": [[int]]}
    {"op": "top_logprobs", "prompts": [[int]], "count": int}        -> {"top": [[[id, logprob], ...]]}
    {"op": "tune", "prompts": [[int]], "max_new_tokens": int}       -> {"choice": str}
    anything that fails                                  {"error": str}, with the traceback on stderr
    end of stdin                                         the worker ends

Standard library only: it is imported in environments that hold no other package of this repository.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

Prompts = list[list[int]]
_PR_SET_PDEATHSIG = 1


class System(Protocol):
    """A loaded model that generates greedily and does not stop at the end-of-sequence token."""

    about: str

    def generate(self, prompts: Prompts, max_new_tokens: int) -> tuple[float, Prompts]:
        """Return the seconds, and for each prompt exactly `max_new_tokens` new token ids."""

    def top_logprobs(self, prompts: Prompts, count: int) -> list[list[tuple[int, float]]]:
        """Return for each prompt the `count` likeliest next token ids with log-probabilities, likeliest first."""

    def tune(self, prompts: Prompts, max_new_tokens: int) -> str:
        """Choose what is fastest for requests of this form, warm up, and return the choices."""

    def close(self) -> None:
        """End what the system has started outside its process."""


def main(load: Callable[..., System]) -> None:
    """Call `load` with the settings of the JSON object in argv[1], and serve the system until stdin ends.

    What libraries print on file descriptor 1 goes to stderr.
    """
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        system = load(**json.loads(sys.argv[1]))
        replies.write(json.dumps({"about": system.about}) + "\n")
    except Exception as error:
        traceback.print_exc()
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise SystemExit(1) from error
    try:
        for line in sys.stdin:
            replies.write(json.dumps(answer(system, json.loads(line))) + "\n")
    finally:
        system.close()


def answer(system: System, request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one request."""
    try:
        prompts = request["prompts"]
        if request["op"] == "generate":
            seconds, tokens = system.generate(prompts, request["max_new_tokens"])
            lengths = {len(row) for row in tokens}
            if len(tokens) != len(prompts) or lengths != {request["max_new_tokens"]}:
                return {"error": f"{len(tokens)} answers of {sorted(lengths)} tokens, not as asked"}
            return {"seconds": seconds, "tokens": tokens}
        if request["op"] == "top_logprobs":
            return {"top": system.top_logprobs(prompts, request["count"])}
        if request["op"] == "tune":
            return {"choice": system.tune(prompts, request["max_new_tokens"])}
        return {"error": f"unknown op {request['op']!r}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
