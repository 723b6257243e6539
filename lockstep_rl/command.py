"""The command `lockstep` of an installed package: `rollout.cli.main`, with a clear line where a package is missing."""

from __future__ import annotations

import sys
from importlib import import_module

from lockstep_rl._origin import MissingPackage, PackageClash, check_origin, missing_package


def main() -> int:
    """Run the command and return its exit status.  A missing or foreign package is one line on stderr and status 1."""
    command = " ".join(["lockstep", *sys.argv[1:2]])
    try:
        check_origin()
        return int(import_module("rollout.cli.main").main())
    except PackageClash as error:
        print(f"lockstep: error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        found = missing_package(command, error)
        if not isinstance(found, MissingPackage):
            raise
        print(f"lockstep: error: {found}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
