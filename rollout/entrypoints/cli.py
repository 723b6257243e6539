"""The command `lockstep`.  A subcommand's module is imported when it is run: help and typing errors do not wait for
torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rollout.core.version import VERSION

REPOSITORY = Path(__file__).parents[2]
"""Where the demo and the benchmarks are: they are run from a clone, not installed."""
INTERRUPTED = 130  # exit status of a command that Ctrl-C ended, as in a shell
COMMANDS = {
    "serve": ("rollout.entrypoints.launch", "serve a checkpoint over HTTP"),
    "demo": ("examples.demo.run", "run one whole step of reinforcement learning on a small model"),
    "make-checkpoint": ("rollout.entrypoints.make_checkpoint", "write a small random checkpoint"),
    "bench": ("benchmarks.profile.run", "measure throughput, the breakdown of a step, and each operator"),
    "eplb-plan": ("benchmarks.eplb_plan", "plan a placement of experts offline"),
    "build-kernels": ("rollout.entrypoints.build_kernels", "compile the CPU operators for this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand with the words after its name; its exit status."""
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="A serving engine for reinforcement-learning rollouts of Mixture-of-Experts models.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        # Each command parses its own words, help included.
        commands.add_parser(name, help=text, description=text, add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    namespace, _ = parser.parse_known_args(words[:1])
    try:
        return int(_module(namespace.command).main(words[1:]))
    except KeyboardInterrupt:
        return INTERRUPTED


def _module(command: str) -> ModuleType:
    """Raises `SystemExit` for a command that needs a clone of the repository where there is none."""
    name = COMMANDS[command][0]
    package = name.partition(".")[0]
    if package != "rollout":
        if not (REPOSITORY / package).is_dir():
            raise SystemExit(f"lockstep {command} runs from a clone of the repository: {package}/ is not installed")
        sys.path.insert(0, str(REPOSITORY))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
