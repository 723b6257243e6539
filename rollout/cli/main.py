"""The command `lockstep`.

A light parser reads a subcommand's words, and its module is imported when it runs.  So help and typing errors do not
wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollout.core.args.parser import Parser
from rollout.core.version import VERSION

REPOSITORY = Path(__file__).parents[2]
BUNDLED = REPOSITORY / "lockstep_rl" / "bundled"
"""The folder of the demo and the benchmarks in an installed wheel.  In a clone they lie in `REPOSITORY`."""
INTERRUPTED = 130  # exit status of a command that Ctrl-C ended, as in a shell


class Command(NamedTuple):
    """`module`: its `main` runs the command.  `parser`: `MODULE:FUNCTION` without torch, where `module` needs torch."""

    module: str
    text: str
    parser: str | None = None


COMMANDS = {
    "serve": Command("rollout.server.serve", "serve a checkpoint over HTTP"),
    "demo": Command(
        "examples.demo.run",
        "run one whole step of reinforcement learning on a small model",
        "examples.demo.flags:parser",
    ),
    "make-checkpoint": Command(
        "examples.make_checkpoint.run", "write a small random checkpoint", "examples.make_checkpoint.flags:parser"
    ),
    "bench": Command(
        "benchmarks.profile.run",
        "measure throughput, the breakdown of a step, and each operator",
        "benchmarks.profile.flags:parser",
    ),
    "eplb-plan": Command(
        "benchmarks.eplb_plan", "plan a placement of experts offline", "benchmarks.eplb_plan_flags:parser"
    ),
    "build-kernels": Command(
        "rollout.cli.build_kernels",
        "compile the CPU operators for this machine",
        "rollout.cli.parsers:build_kernels_parser",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the words after its name, and return its exit status."""
    parser = Parser(
        prog="lockstep",
        description="A serving engine for reinforcement-learning rollouts of Mixture-of-Experts models.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        # Each command parses its own words, help included.
        commands.add_parser(name, help=command.text, description=command.text, add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    namespace, _ = parser.parse_known_args(words[:1])
    command = COMMANDS[namespace.command]
    try:
        _find(namespace.command, command.module)
        if command.parser is not None:
            module, _, function = command.parser.partition(":")
            getattr(importlib.import_module(module), function)().parse_args(words[1:])
        return int(importlib.import_module(command.module).main(words[1:]))
    except KeyboardInterrupt:
        return INTERRUPTED


def _find(command: str, module: str) -> None:
    """Put the folder of a command outside the packages on the path, for child processes too.

    Raises `SystemExit` where there is none.
    """
    package = module.partition(".")[0]
    if package != "rollout":
        folder = next((one for one in (BUNDLED, REPOSITORY) if (one / package).is_dir()), None)
        if folder is None:
            raise SystemExit(
                f"lockstep {command} needs the folder {package}/, which is missing: install lockstep-rl again"
            )
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    sys.exit(main())
