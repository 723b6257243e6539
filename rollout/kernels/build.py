"""Loads the operators of `csrc/` into torch: the ones that the wheel brought along, or compiled for this machine.

    <cache>/<key>/kernels.so   key = hash of the sources, the flags, torch's version and the CPU's features
    <cache>/<key>/lock         held while compiling; the kernel of the OS frees it if the holder dies
    <cache>/objects/<key>.o    one compiled source, so that a build that was cut off goes on where it was

The cache is `$LOCKSTEP_KERNEL_CACHE`, or `~/.cache/lockstep/kernels`.  `rollout.kernels.shipped` finds what a wheel
brings along.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from rollout.kernels import isa as isas
from rollout.kernels import shipped
from rollout.kernels.operators import OPERATORS

SOURCES = Path(__file__).parent / "csrc"
# No -ffast-math and no contraction: the sources decide which operations are fused and in which order sums run.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
COMMON_FLAGS = tuple(flag for flag in FLAGS if not flag.startswith("-march"))
COMPILERS = ("g++", "clang++", "c++")
COMPILE_CPU_S = 900
"""CPU seconds of one run of the compiler; a source takes 20 to 60.  A busy machine does not change them."""
COMPILE_TIMEOUT_S = 3600.0
"""Seconds of the clock, for a compiler that hangs."""
OBJECTS_KEPT_S = 14 * 86400.0
LOCK_POLL_S = 0.1
PROGRESS_S = 5.0
LIMITED = ("/bin/sh", "-c", 'ulimit -S -t "$0"; exec "$@"')

Progress = Callable[[str], None]


class KernelBuildError(Exception):
    """The operators cannot be compiled or their cache cannot be used.  The message is one line with the reason."""


class Target(NamedTuple):
    """The torch that a library is compiled for, and the processor's features where the flags depend on them."""

    torch_root: Path
    torch_version: str
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelStatus:
    """The state of `torch.ops.lockstep`: `reason` is why it is missing, `isa` its instruction set."""

    available: bool
    reason: str = ""
    isa: str = ""


def load_kernels(progress: Progress | None = None, isa: str | None = None) -> KernelStatus:
    """Register the operators as `torch.ops.lockstep`, and compile them first if need be, once per process.

    It never raises for a machine that cannot compile or run them: the caller goes on without.  `isa` is one of
    `rollout.kernels.isa.CHOICES`, by default `$LOCKSTEP_CPU_ISA` or "auto": the best that the processor has and whose
    trial succeeds.  `progress` is called with a line if there is something to wait for or to know.
    """
    assert OPERATORS, "the compiled operators implement these"
    wanted = isa or os.environ.get("LOCKSTEP_CPU_ISA") or "auto"
    try:
        if refusal := isas.refusal_of(wanted):
            raise KernelBuildError(refusal)
        if not hasattr(torch.ops.lockstep, "isa"):
            _load(wanted, progress)
    except (KernelBuildError, OSError, subprocess.SubprocessError) as error:
        return KernelStatus(available=False, reason=str(error))
    loaded = torch.ops.lockstep.isa()
    if wanted not in ("auto", loaded):
        reason = f"the operators of this process were compiled for {loaded}, not for {wanted}"
        return KernelStatus(available=False, reason=reason)
    return KernelStatus(available=True, isa=loaded)


def _load(wanted: str, progress: Progress | None) -> None:
    """Load the wheel's operators where they fit this torch and this processor, else what is compiled here."""
    library = _library_for(wanted, progress)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        if not shipped.holds(library):
            raise
        if progress is not None:
            progress(f"the operators of the wheel do not load into torch {torch.__version__}: {error}")
        torch.ops.load_library(_library_for(wanted, progress, ships=False))


def _library_for(wanted: str, progress: Progress | None, ships: bool = True) -> Path:
    def library_of(isa: str) -> Path:
        found = shipped.library_of(isa) if ships else None
        return found or build_kernels(progress, extra_flags=isas.COMPILER_FLAGS.get(isa, ()))

    if wanted == isas.TILES or (wanted == "auto" and isas.has_tiles()):
        library = library_of(isas.TILES)
        refusal = isas.tiles_refusal(library, _answer_of(library))
        if not refusal:
            return library
        if wanted == isas.TILES:
            raise KernelBuildError(refusal)
        if progress is not None:
            progress(f"matrix tiles are not used: {refusal}")
    return library_of(isas.fastest_beside_tiles() if wanted == "auto" else wanted)


def _answer_of(library: Path) -> Path | None:
    """Return the file that keeps the result of a trial of tiles; None where none can be kept."""
    if not shipped.holds(library):
        return library.with_name("tiles")
    name = hashlib.sha256("\0".join((str(library), torch.__version__, *_cpu_features())).encode()).hexdigest()[:24]
    try:
        return _private_folder(cache_folder() / name) / "tiles"
    except (OSError, KernelBuildError):  # a container without a home: the next start tries again
        return None


def build_kernels(
    progress: Progress | None = None,
    sources: Path = SOURCES,
    timeout_s: float = COMPILE_TIMEOUT_S,
    extra_flags: tuple[str, ...] = (),
) -> Path:
    """Return the compiled library of the `.cpp` files in `sources` on this machine, from the cache or compiled now.

    `progress` is called with one line if there is something to wait for.  `timeout_s` bounds the wait for another
    process that compiles the same, and each run of the compiler, which also has `COMPILE_CPU_S`.  `extra_flags` come
    after `FLAGS`, when compiling and when linking: another build of the same sources, such as one with sanitizers.
    Raises `KernelBuildError`.
    """
    try:
        folder = _private_folder(cache_folder() / cache_key(sources, extra_flags))
        library = folder / "kernels.so"
        if library.exists():
            return library
        compiler = find_compiler()
        if progress is not None:
            progress(f"compiling the CPU operators with {compiler[0]}: once for this machine, a few minutes of CPU")
        with _lock(folder / "lock", timeout_s):
            if not library.exists():
                compile_library(compiler, sources, library, (*FLAGS, *extra_flags), this_target(), timeout_s, progress)
    except OSError as error:
        raise KernelBuildError(f"the cache of compiled operators cannot be used: {error}") from error
    return library


def cache_folder() -> Path:
    """Return the folder that keeps compiled operators, with one folder for each key.  Raises `KernelBuildError`."""
    given = os.environ.get("LOCKSTEP_KERNEL_CACHE")
    try:
        return Path(given) if given else Path.home() / ".cache" / "lockstep" / "kernels"
    except RuntimeError:
        raise KernelBuildError("no home folder to keep compiled operators in: set $LOCKSTEP_KERNEL_CACHE") from None


def cache_key(sources: Path = SOURCES, extra_flags: tuple[str, ...] = ()) -> str:
    """Return a hash of everything that the compiled library depends on, except the compiler."""
    digest = shipped.digest_of(sorted(sources.iterdir()))
    digest.update("\0".join((*FLAGS, *extra_flags, torch.__version__, *_cpu_features())).encode())
    return digest.hexdigest()[:24]


def object_key(source: Path, flags: tuple[str, ...], compiler: list[str], target: Target) -> str:
    """Return a hash of everything that the object of one source depends on, except the compiler's version."""
    digest = shipped.digest_of((*sorted(source.parent.glob("*.h")), source))
    digest.update("\0".join((*compiler, *flags, target.torch_version, *target.features)).encode())
    return digest.hexdigest()[:24]


def this_target() -> Target:
    """Return the torch and the processor of this process."""
    return Target(Path(torch.__file__).parent, torch.__version__, _cpu_features())


def find_compiler() -> list[str]:
    """Return the C++ compiler as command words: `$CXX`, else the first of `COMPILERS`.  Raises `KernelBuildError`."""
    given = shlex.split(os.environ.get("CXX", ""))
    for words in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(words[0]) is not None:
            return words
    raise KernelBuildError(f"no C++ compiler found: {given[0] if given else ', '.join(COMPILERS)}")


def _cpu_features() -> tuple[str, ...]:
    """Return the features that `-march=native` depends on, as Linux lists them; elsewhere the processor's name."""
    info = Path("/proc/cpuinfo")
    features = [platform.machine(), platform.processor()]
    if info.is_file():
        wanted = ("model name", "flags", "Features", "CPU part")
        features += sorted({line for line in info.read_text().splitlines() if line.startswith(wanted)})
    return tuple(features)


def _private_folder(folder: Path) -> Path:
    """Create the folder for this user alone: its content is loaded as code, so other users must not write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(f"{folder} can be written by other users: choose another with $LOCKSTEP_KERNEL_CACHE")
    return folder


@contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelBuildError(f"another process has held {path} for {timeout_s:.0f} s") from None
                time.sleep(LOCK_POLL_S)
        yield


def compile_library(
    compiler: list[str],
    sources: Path,
    library: Path,
    flags: tuple[str, ...],
    target: Target,
    timeout_s: float = COMPILE_TIMEOUT_S,
    progress: Progress | None = None,
) -> None:
    """Compile each source on its own, two at a time, then link.  Objects and library appear whole or not at all.

    Finished objects stay in the cache, so that a build that fails or is cut off goes on where it was.
    """
    includes = [f"-I{target.torch_root / 'include'}", f"-I{target.torch_root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{target.torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
    kept = _private_folder(cache_folder() / "objects")
    with tempfile.TemporaryDirectory(dir=kept) as scratch:

        def compile_one(source: Path) -> str:
            found = kept / f"{object_key(source, flags, compiler, target)}.o"
            if found.exists():
                found.touch()  # used: not removed
                return str(found)
            made = Path(scratch) / f"{source.stem}.o"
            _run([*compiler, *flags, *includes, "-c", str(source), "-o", str(made)], timeout_s)
            made.replace(found)
            return str(found)

        with ThreadPoolExecutor(max_workers=2) as pool:
            running = [pool.submit(compile_one, source) for source in sorted(sources.glob("*.cpp"))]
            _wait_for(running, progress)
        objects = [future.result() for future in running]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:  # the cache may lie on another file system
        linked = Path(scratch) / library.name
        _run([*compiler, "-shared", *flags, *objects, *libraries, "-o", str(linked)], timeout_s)
        linked.replace(library)
    _remove_old(kept)


def _wait_for(running: list[Future[str]], progress: Progress | None) -> None:
    """Wait for the objects.  After a failure no further one is begun; those under way are finished and kept."""
    last = time.monotonic()
    try:
        for count, done in enumerate(as_completed(running), 1):
            done.result()
            if progress is not None and time.monotonic() - last > PROGRESS_S:
                progress(f"compiled {count} of {len(running)} files of the CPU operators")
                last = time.monotonic()
    finally:
        for future in running:
            future.cancel()


def _remove_old(objects: Path) -> None:
    """Remove objects that no build has used for a while."""
    for path in objects.glob("*.o"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if time.time() - path.stat().st_mtime > OBJECTS_KEPT_S:
                path.unlink()


def _run(words: list[str], timeout_s: float) -> None:
    limited = [*LIMITED, str(COMPILE_CPU_S), *words]
    try:
        done = subprocess.run(limited, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{words[0]} did not finish within {timeout_s:.0f} s") from None
    if done.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU) or "CPU time limit exceeded" in done.stderr:
        raise KernelBuildError(f"{words[0]} did not finish within {COMPILE_CPU_S} s of CPU")
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise KernelBuildError(f"{words[0]} failed: {lines[0].strip()}")
