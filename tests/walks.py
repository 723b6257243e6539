"""The code that things pass through: `python -m tests.walks [--files]`, some minutes on two cores.

    1  a token, from the HTTP request to the reply      files in which code runs
    2  an expert that a rebalance moves, without HTTP   files
    3  a routed id, from the router to the reply        files
    4  a decode step of one rank, and an idle turn      Python calls outside operators, and calls between steps
    5  weights, from begin over a bucket to the end     files

1, 3, 4 and 5: a server of one rank on a tiny checkpoint, its two processes recorded.  Each request is sent several
times; what runs every time counts, so that queries of the dashboard do not, nor what happens once.  What is done
between steps (`is_poll`) counts in 4 and 5 alone.

2: two ranks in this process, from the verb to its answer, without functions that an idle turn calls as well.

3: a file counts if some of its code runs only for a request with `return_routed_experts`, or if a function of it that
runs for one has a name with `route` or `expert_ids` in it.

4: the turn that is most frequent.  A call of a function in `rollout/kernels/` is an operator's.

5: a whole refresh in one bucket, which is the body of a call, after others.  Files of the server alone count, without
functions that an idle server calls as well.  The second number leaves out functions that other control verbs call, too:
a pause, a flush of the cache, and a continue.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save

from tests.call_recorder import (
    FLUSH_S,
    Call,
    Function,
    Recorder,
    calls_of_children,
    is_poll,
    recorded_children,
    steady,
    turns_of,
)
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
WARM_UPS, REPEATS = 3, 8
IDLE_S = 3.0
_ROUTES = ("route", "expert_ids")
_PROMPT = [5, 9, 2, 7]
_HTTP = "rollout/tokenizer_manager/"  # merges the answers of ranks, as the HTTP process does


@dataclass
class Window:
    """The calls of all processes of a server within some seconds."""

    start: float
    end: float
    calls: list[Call] = field(default_factory=list)

    def files(self) -> set[str]:
        return {call.function.file for call in self.calls if not is_poll(call)}

    def functions(self) -> set[Function]:
        return {call.function for call in self.calls if not is_poll(call)}


@dataclass(frozen=True)
class Walks:
    """The results; each file by its path, each call in its order."""

    token: set[str]
    expert: set[str]
    routed_id: set[str]
    step: list[Call]
    idle: list[Call]
    bucket: set[str]
    only_bucket: set[str]


def measure() -> Walks:
    """Record everything."""
    with tempfile.TemporaryDirectory(prefix="walks-") as name:
        folder = Path(name)
        model = tiny_checkpoint(folder / "model", "moe")
        plain, routed, buckets, verbs, long, idle = _serve(model, folder)
        expert = _move_an_expert(model)
    everywhere, with_routes = _in_all(window.functions() for window in plain), _in_all(w.functions() for w in routed)
    only_with_routes = {function.file for function in with_routes - everywhere}
    named = {function.file for function in with_routes if _names_routes(function)}
    of_bucket = _in_all(map(_called, buckets)) - _called(idle)
    return Walks(
        token=_in_all(window.files() for window in plain),
        expert=expert,
        routed_id=only_with_routes | named,
        step=steady(turns_of(long.calls)),
        idle=steady(turns_of(idle.calls)),
        bucket={function.file for function in of_bucket},
        only_bucket={function.file for function in of_bucket - set().union(*map(_called, verbs))},
    )


def _in_all(sets: Iterable[set[Any]]) -> set[Any]:
    return set.intersection(*sets)


def _called(window: Window) -> set[Function]:
    """Return all functions that are called in the window, also between steps."""
    return {call.function for call in window.calls}


def _names_routes(function: Function) -> bool:
    return any(word in name.lower() for name in function.names for word in _ROUTES)


# --- a server ----------------------------------------------------------------------------------------------------


def _serve(model: Path, folder: Path) -> tuple[list[Window], list[Window], list[Window], list[Window], Window, Window]:
    """Return windows of a server.

    They are of short requests without and with routes, of refreshes, of other control verbs, of a long request, and of
    no request.
    """
    records = folder / "records"
    records.mkdir()
    settings = {"max_total_tokens": 1024, "dtype": "float32", "enable_return_routed_experts": True}
    windows: list[Window] = []

    @contextmanager
    def window() -> Iterator[None]:
        time.sleep(3 * FLUSH_S)  # what came before has ended
        start = time.monotonic()
        yield
        windows.append(Window(start, time.monotonic()))

    with recorded_children(ROOT, records), ServerProcess(model, **settings) as server:

        def generate(max_new_tokens: int, **fields: Any) -> None:
            params = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": _PROMPT, "sampling_params": params, "return_logprob": True, **fields}
            reply = server.http.post("/generate", json=body)
            assert reply.status_code == 200, reply.text

        for fields in ({}, {"return_routed_experts": True}):
            for _ in range(WARM_UPS):
                generate(4, **fields)
            for _ in range(REPEATS):
                with window():
                    generate(4, **fields)
        tensors = base64.b64encode(save(logical_tensors(model))).decode()
        for number in range(WARM_UPS + REPEATS):
            with window(), server.client.weight_transaction(str(number)) as update:
                update.send("update_weights_from_tensor", serialized_named_tensors=[tensors], format="safetensors")
        del windows[-WARM_UPS - REPEATS : -REPEATS]
        for _ in range(REPEATS):
            with window():
                for verb in ("pause_generation", "flush_cache", "continue_generation"):
                    reply = server.http.post(f"/{verb}", json={})
                    assert reply.status_code == 200, reply.text
        with window():
            generate(200)
        with window():
            time.sleep(IDLE_S)
        time.sleep(5 * FLUSH_S)
    for calls in calls_of_children(records).values():
        for one in windows:
            one.calls += [call for call in calls if one.start <= call.at <= one.end]
    plain, routed, refreshes, verbs = (windows[REPEATS * first : REPEATS * (first + 1)] for first in range(4))
    return plain, routed, refreshes, verbs, windows[-2], windows[-1]


# --- two ranks ---------------------------------------------------------------------------------------------------


def _move_an_expert(model: Path) -> set[str]:
    """Return the files in which code runs from a rebalance that is asked for to its answer."""
    recorder = Recorder(ROOT)
    recorder.start()  # first, as it sees the threads that begin after it
    try:
        from tests.parallel_harness import ParallelHarness  # with its imports unseen, there would be nothing to record

        settings = {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 4, "enable_eplb": True}
        with ParallelHarness(model, **settings, eplb_rebalance_num_iterations=100_000) as harness:
            harness.generate([[7, 3, 9]] * 4, {"max_new_tokens": 16})
            verbs = {verb.__name__: verb for verb in harness.scheduler._verbs}
            recorder.take()
            for _ in range(3):
                harness.tick()
            idle = {call.function for call in recorder.calls()}
            swapped = [[*range(4, 8), 0, 1, *range(4), 6, 7]] * 2
            answer = harness.control(verbs["EplbRebalanceReqInput"], physical_to_logical_map=swapped)
            assert answer.success and answer.data["outcome"]["chunks_done"] > 0, answer
            calls = recorder.calls()
    finally:
        recorder.stop()
    functions = {call.function for call in calls} - idle
    return {function.file for function in functions if not function.file.startswith(_HTTP)}


# --- the report --------------------------------------------------------------------------------------------------


def report(walks: Walks, *, with_files: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    for title, files in (
        ("1  files of a token, from request to reply", walks.token),
        ("2  files of an expert that is moved", walks.expert),
        ("3  files of a routed id, from router to reply", walks.routed_id),
    ):
        yield f"{title}: {len(files)}"
        yield from (f"       {file}" for file in sorted(files) if with_files)
    for title, turn in (("4  decode step", walks.step), ("   idle turn", walks.idle)):
        polls, files = [call for call in turn if is_poll(call)], {call.function.file for call in turn}
        asked = {call.function.file for call in polls}
        between = f"between steps {len(polls)} calls in {len(asked)} files"
        yield f"{title}: {len(turn)} calls in {len(files)} files; {between}"
        for call in turn if with_files else ():
            yield f"       {'*' if is_poll(call) else ' '} {call.function.file}: {call.function.name}"
    only = len(walks.only_bucket)
    yield f"5  files of weights, from begin to the end: {len(walks.bucket)}; for no other control verb (+): {only}"
    for file in sorted(walks.bucket) if with_files else ():
        yield f"       {'+' if file in walks.only_bucket else ' '} {file}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--files", action="store_true", help="name the files and the calls, too (*: between steps)")
    for line in report(measure(), with_files=parser.parse_args().files):
        print(line)


if __name__ == "__main__":
    main()
