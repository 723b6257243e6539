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

from rollout.cli.completion import script
from rollout.core.args.parser import Parser
from rollout.core.version import VERSION

REPOSITORY = Path(__file__).parents[2]
BUNDLED = REPOSITORY / "lockstep_rl" / "bundled"
"""The folder of the demo and the benchmarks in an installed wheel.  In a clone they lie in `REPOSITORY`."""
INTERRUPTED = 130  # exit status of a command that Ctrl-C ended, as in a shell


class Command(NamedTuple):
    """`module`: its `main` runs the command.  `parser`: `MODULE:FUNCTION` that makes its parser without torch.

    `reads_words`: `module` needs no torch until it has read its words itself.
    """

    module: str
    text: str
    parser: str
    reads_words: bool = False


COMMANDS = {
    "serve": Command(
        "rollout.server.serve", "serve a checkpoint over HTTP", "rollout.core.args.server_cli:serve_parser", True
    ),
    "dashboard": Command(
        "rollout.dashboard.fleet", "show several servers on one page", "rollout.dashboard.fleet_flags:parser"
    ),
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
    "completion": Command(
        "rollout.cli.completion",
        "print a script that completes flags in a shell",
        "rollout.cli.completion:parser",
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
        if not command.reads_words:
            parser_of(namespace.command).parse_args(words[1:])
        if namespace.command == "completion":
            print(script({name: parser_of(name) for name in COMMANDS if _is_here(name)}), end="")
            return 0
        return int(importlib.import_module(command.module).main(words[1:]))
    except KeyboardInterrupt:
        return INTERRUPTED


def parser_of(name: str) -> Parser:
    """Return the parser of a command.  Raises `SystemExit` where its folder is missing."""
    _find(name, COMMANDS[name].module)
    module, _, function = COMMANDS[name].parser.partition(":")
    parser: Parser = getattr(importlib.import_module(module), function)()
    return parser


def _is_here(name: str) -> bool:
    """Tell whether the folder of a command is there."""
    try:
        _find(name, COMMANDS[name].module)
    except SystemExit:
        return False
    return True


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
