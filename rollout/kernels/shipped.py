"""Finds the CPU operators that a wheel brings along, so that no compiler is needed.

    shipped/sources             the hash of the sources that they were compiled from
    shipped/torch-2.13/avx2.so  a library for each minor version of torch and each of `isa.SHIPPED_FLAGS`
    shipped/driver/             `csrc_driver/` as device_pages.so, which knows no torch, and its own `sources`

The operators are linked against torch's C++ interface, which stays the same within a minor version only.  So another
minor version, another processor or changed sources take none of them, and the operators are compiled.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from rollout.kernels import isa as isas

SOURCES = Path(__file__).parent / "csrc"
FOLDER = Path(__file__).parent / "shipped"
SOURCES_FILE = "sources"
DRIVER_SOURCES = Path(__file__).parent / "csrc_driver"
DRIVER, DRIVER_FILE = "driver", "device_pages.so"


def folder() -> Path | None:
    """Return the folder with libraries for this torch, or None where there is none for it and these sources."""
    made = FOLDER / folder_name(torch.__version__)
    return made if made.is_dir() and _is_current(FOLDER, SOURCES) else None


def driver_library() -> Path | None:
    """Return the allocator of `rollout.memory.device_pages`; None where the wheel has none for this machine."""
    library = FOLDER / DRIVER / DRIVER_FILE
    fits = library.is_file() and platform.machine() == "x86_64" and _is_current(library.parent, DRIVER_SOURCES)
    return library if fits else None


def _is_current(folder: Path, sources: Path) -> bool:
    stated = folder / SOURCES_FILE
    return stated.is_file() and stated.read_text().strip() == hash_of_sources(sources)


def library_of(isa: str) -> Path | None:
    """Return the library that serves for `isa`, one of `isa.CHOICES`, on this processor; None if there is none."""
    found, chosen = folder(), isas.shipped_isa(isa)
    library = found / f"{chosen}.so" if found is not None and chosen else None
    return library if library is not None and library.is_file() else None


def holds(library: Path) -> bool:
    """Return whether `library` came with the wheel."""
    return library.is_relative_to(FOLDER)


def folder_name(torch_version: str) -> str:
    """Return the name of the folder for a version of torch, as `torch-2.13` for 2.13.0+cpu."""
    return "torch-" + ".".join(torch_version.split(".")[:2])


def hash_of_sources(sources: Path) -> str:
    return digest_of(sorted((*sources.glob("*.h"), *sources.glob("*.cpp")))).hexdigest()


def digest_of(files: Iterable[Path]) -> hashlib._Hash:
    """Return the digest of the names and the content of files, in this order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest
