"""Packages that are missing, and packages of other projects in the place of this project's.

The names `rollout`, `capture`, `weight_sync` and `eplb` are common.  A trainer may have a folder of such a name, and
Python takes the first one on its path.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("rollout", "capture", "weight_sync", "eplb")
OWN_LINE = "Part of the package lockstep-rl."
"""Each `__init__` of `PACKAGES` has this text, so that a file that was written over it is noticed."""
TORCH = "pip install torch, as PyTorch's page for your machine describes"
ENGINE = "pip install 'lockstep-rl[engine]'"


class PackageClash(ImportError):
    """The error for a package of another project that Python finds in the place of one of this project's."""


class MissingPackage(ImportError):
    """The error for a package that is not installed; the message has the command that installs it."""


def check_origin() -> None:
    """Raise `PackageClash` if Python finds one of `PACKAGES` elsewhere than next to this package."""
    folder = Path(__file__).resolve().parents[1]
    for name in PACKAGES:
        found, own = _found(name), folder / name / "__init__.py"
        if found is None:
            raise PackageClash(f"{name} is missing next to lockstep_rl in {folder}: install lockstep-rl again")
        if found.resolve() != own:
            raise PackageClash(
                f"lockstep-rl needs its own package {name}, but Python finds {found} first. "
                f"Rename that one, or remove its folder from sys.path or put {folder} before it"
            )
        if OWN_LINE not in own.read_text(encoding="utf-8"):
            raise PackageClash(
                f"another project has written over {own}. "
                "Uninstall its package, then run: pip install --force-reinstall --no-deps lockstep-rl"
            )


def missing_package(user: str, error: ModuleNotFoundError, needs_engine: bool = True) -> ImportError:
    """Return the error for `user`, a name or a command, that needs the package which `error` misses.

    It is `error` itself where a module of this project is missing.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in (*PACKAGES, "lockstep_rl"):
        return error
    remedy = ENGINE if needs_engine else TORCH
    return MissingPackage(f"{user} needs the package {package}, which is not installed: {remedy}", name=package)


def _found(name: str) -> Path | None:
    """Return the file of a package as Python finds it, or the folder of one without a file."""
    loaded = sys.modules.get(name)
    try:
        spec = loaded.__spec__ if loaded is not None else find_spec(name)
    except ValueError:
        spec = None
    if spec is None:
        stated = getattr(loaded, "__file__", None)
        return Path(stated) if stated else None
    if spec.origin is not None:
        return Path(spec.origin)
    return next((Path(folder) for folder in spec.submodule_search_locations or ()), None)
