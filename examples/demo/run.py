"""`lockstep demo`: one whole step of reinforcement learning on a small model, of experts unless `--family` is dense.

    write a checkpoint -> `lockstep serve` -> a trainer process -> its report -> checks, one table, the exit status

The processes are started, watched and ended here.  The loop itself is `trainer.py`, the checks are `checks.py`.
"""

from __future__ import annotations

import argparse
import queue
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console

from examples.demo.checks import Row, rows_of
from examples.demo.display import Display, make_display, results_table
from examples.demo.flags import SIZES, parser
from examples.demo.messages import Failure, Progress, TrainerReport, decode
from examples.make_checkpoint.run import make_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.client import RolloutClient
from rollout.core.errors import LockstepError
from rollout.server.child_process import ChildProcess, seconds_left
from weight_sync.process_group import free_port

READY_TIMEOUT_S = 120.0
TRAINER_TIMEOUT_S = 600.0
POLL_S = 0.2
INTERRUPTED = 130
PLAIN_WIDTH = 118


class DemoError(LockstepError):
    """The demo cannot go on; the message states why and shows the last output of the process in question."""


def main(argv: Sequence[str]) -> int:
    """Run the demo and return 0 if every check held, 1 if one failed or something broke, 130 if interrupted."""
    args = parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    started = time.monotonic()
    try:
        with signals_interrupt(), _work_folder(args) as folder:
            rows = _run(args, folder, console)
        kept = folder if folder.is_dir() else None
    except KeyboardInterrupt:
        console.print("interrupted; every process has been stopped", markup=False)
        return INTERRUPTED
    except LockstepError as error:
        console.print(f"lockstep demo: error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    status = _conclude(rows, time.monotonic() - started, console)
    if status == 0:
        for line in next_steps(args, kept):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return status


def _run(args: argparse.Namespace, folder: Path, console: Console) -> list[Row]:
    with make_display(console) as display:
        checkpoint = folder / "checkpoint"
        spec = _spec(args)
        make_checkpoint(
            checkpoint, spec, progress=lambda done, total: display.update("write a checkpoint", done, total)
        )
        port = args.port or free_port()
        url = f"http://127.0.0.1:{port}"
        with ChildProcess(
            "server", _server_command(checkpoint, port, has_experts=not spec.is_dense), folder / "server.log"
        ) as server:
            _wait_until_ready(server, url, display)
            command = _trainer_command(args, checkpoint, url)
            with ChildProcess("trainer", command, folder / "trainer.log", reads_output=True) as trainer:
                report = _follow(trainer, server, display)
            status = _stop_server(server, display)
    stopped = Row("End", "server's exit status after SIGTERM", str(status), "0", status == 0)
    return [*rows_of(report), stopped]


def _conclude(rows: Sequence[Row], seconds: float, console: Console) -> int:
    """Print the table and return the exit status."""
    console.print(results_table(rows))
    checks = [row for row in rows if row.ok is not None]
    failed = [row for row in checks if not row.ok]
    verdict = f"{len(failed)} of {len(checks)} checks FAILED" if failed else f"all {len(checks)} checks ok"
    console.print(f"{verdict}, {seconds:.0f} s in all", style="bold red" if failed else "bold green", highlight=False)
    return 1 if failed else 0


def next_steps(args: argparse.Namespace, kept: Path | None) -> list[str]:
    """Return three lines: the facts that were shown, how to serve the checkpoint, and the dashboard's address.

    `kept`: the demo's folder, None where it is gone and the same checkpoint can be made again.
    """
    started_as = Path(sys.argv[0])
    lockstep = str(started_as) if started_as.name == "lockstep" and not shutil.which("lockstep") else "lockstep"
    spec = _spec(args)
    if kept is not None:
        make, folder = "", shlex.quote(str(kept / "checkpoint"))
    else:
        family = "" if spec.family == CheckpointSpec.family else f" --family {spec.family}"
        seed = "" if spec.seed == CheckpointSpec.seed else f" --seed {spec.seed}"
        make, folder = f"{lockstep} make-checkpoint ./checkpoint{family}{seed} && ", "./checkpoint"
    routes = "" if spec.is_dense else " --enable-return-routed-experts"
    served = "family" if make and args.size != "standard" else "checkpoint"
    return [
        "Shown: a rollout, a policy-gradient step, a refresh of the live server, and a rollout under the new weights.",
        f"Serve this {served}: {make}{lockstep} serve {folder}{routes}",
        "Watch it at http://127.0.0.1:30000/dashboard",
    ]


def _spec(args: argparse.Namespace) -> CheckpointSpec:
    return replace(SIZES[args.size], family=args.family, seed=args.seed)


# --- processes ---------------------------------------------------------------------------------------------------


def _server_command(checkpoint: Path, port: int, *, has_experts: bool) -> list[str]:
    return [
        *(sys.executable, "-m", "rollout.cli.main", "serve"),
        *("--model-path", str(checkpoint), "--port", str(port), "--dtype", "bfloat16"),
        *("--weight-version", "0", *(["--enable-return-routed-experts"] if has_experts else [])),
    ]


def _trainer_command(args: argparse.Namespace, checkpoint: Path, url: str) -> list[str]:
    flags = {
        "--url": url,
        "--model-path": checkpoint,
        "--prompts": args.prompts,
        "--samples": args.samples,
        "--max-new-tokens": args.max_new_tokens,
        "--seed": args.seed,
        "--steps": args.steps,
        "--learning-rate": args.learning_rate,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "examples.demo.trainer", *words]


def _wait_until_ready(server: ChildProcess, url: str, display: Display) -> None:
    """Wait until the server is ready.  Raises `DemoError` if it ends or is not ready in time."""
    phase = "start the server"
    display.update(phase, 0, None)
    deadline = time.monotonic() + READY_TIMEOUT_S
    with RolloutClient(url) as client:
        while not client.health(timeout=2.0):
            _require_running(server)
            if not seconds_left(deadline):
                raise _broken(server, f"was not ready within {READY_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
    _require_running(server)  # it is this server that answered, not another one on the port
    display.finish(phase)


def _follow(trainer: ChildProcess, server: ChildProcess, display: Display) -> TrainerReport:
    """Show the trainer's progress up to its report.  Raises `DemoError`, also if the server ends meanwhile."""
    deadline = time.monotonic() + TRAINER_TIMEOUT_S
    display.update("start the trainer", 0, None)
    starting = True
    while seconds_left(deadline):
        try:
            line = trainer.next_line(POLL_S)
        except queue.Empty:
            _require_running(server)
            continue
        if line is None:
            raise _broken(trainer, f"ended with status {trainer.stop()} and without a report")
        if starting:
            display.finish("start the trainer")
            starting = False
        message = _decoded(trainer, line)
        if isinstance(message, TrainerReport):
            return message
        if isinstance(message, Failure):
            _require_running(server)
            raise DemoError(
                f"the trainer failed: {message.message}\n--- end of {server.log_path}\n{server.last_words()}"
            )
        display.update(message.phase, message.done, message.total)
    raise _broken(trainer, f"did not finish within {TRAINER_TIMEOUT_S:g} s")


def _decoded(trainer: ChildProcess, line: bytes) -> Progress | TrainerReport | Failure:
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        raise _broken(trainer, f"sent an unexpected message: {error}") from error


def _stop_server(server: ChildProcess, display: Display) -> int:
    display.update("stop the server", 0, None)
    _require_running(server)
    status = server.stop()
    display.finish("stop the server")
    return status


def _require_running(process: ChildProcess) -> None:
    status = process.exit_status()
    if status is not None:
        raise _broken(process, f"ended with status {status}")


def _broken(process: ChildProcess, what: str) -> DemoError:
    return DemoError(f"the {process.name} {what}\n--- end of {process.log_path}\n{process.last_words()}")


# --- surroundings ------------------------------------------------------------------------------------------------


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act like Ctrl-C inside the block, so that every way out ends the child processes."""

    def interrupt(_number: int, _frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _work_folder(args: argparse.Namespace) -> Iterator[Path]:
    """Yield `--workdir`, or a temporary folder that is removed at the end unless `--keep` is given."""
    if args.workdir is not None:
        args.workdir.mkdir(parents=True, exist_ok=True)
        yield args.workdir
        return
    folder = Path(tempfile.mkdtemp(prefix="lockstep-demo-"))
    try:
        yield folder
    finally:
        if args.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
