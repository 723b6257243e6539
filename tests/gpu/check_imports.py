"""`make check-gpu-imports`: the code against the device's torch, triton and FlashInfer, on a machine without a device.

    build/gpu-imports   torch 2.11.0 with CUDA, the triton that it brings, flashinfer-python, numpy < 2.4;
                        everything else from .venv

Checks that every module imports there, that every name of torch and triton that the sources use exists there, that
FlashInfer's signatures match its stand-in's, and that every kernel compiles for sm_90.  Prints a line for
each check, and for each finding; the exit status is 1 if there was one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "capture", "eplb", "weight_sync", "benchmarks.gpu", "tests.gpu")
VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "flashinfer": "0.7.2.post1"}
OF_FRAMEWORKS = {"ray", "verl"}  # imported by modules that run inside of a framework
UNKNOWABLE = ("torch.ops", "torch.classes")  # names that are registered there when the program runs

# Names of arguments that the code gives by position, or that must exist, where torch documents nothing.
SIGNATURES = {
    "torch.multiprocessing.reductions.rebuild_cuda_tensor": (
        *("tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device"),
        *("storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle"),
        *("ref_counter_offset", "event_handle", "event_sync_required"),
    ),
    "torch.cuda.graph.__init__": ("self", "cuda_graph", "pool", "stream", "capture_error_mode"),
    "torch.cuda.memory.CUDAPluggableAllocator.__init__": ("self", "path_to_so_file", "alloc_fn_name", "free_fn_name"),
}


def modules() -> Iterator[str]:
    """Yield the dotted name of every module of the packages."""
    for package in PACKAGES:
        folder = ROOT.joinpath(*package.split("."))
        yield package
        for found in pkgutil.walk_packages([str(folder)], f"{package}."):
            if not found.name.endswith(("__main__", ".conftest")):
                yield found.name


def import_findings() -> list[str]:
    """List the modules that do not import, with the reason."""
    found = []
    for name in modules():
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name in OF_FRAMEWORKS:
                continue
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def name_findings() -> list[str]:
    """List the names of torch and triton in the sources that these builds do not have."""
    found = []
    for name in modules():
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for line, chain in chains(ast.parse(path.read_text())):
            missing = first_missing(chain)
            if missing is not None:
                found.append(f"{path.relative_to(ROOT)}:{line}: {missing} does not exist")
    return found


def chains(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every attribute of a module of torch or triton that the file imports.

    The name is in full where the file imports the module as another: `dist.x` is `torch.distributed.x`.
    """
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
    libraries = {name: full or name for name, full in aliases.items() if (full or name).split(".")[0] in _LIBRARIES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            first = text.split(".")[0]
            if first in libraries and text.replace(".", "").replace("_", "").isalnum():
                yield node.lineno, text.replace(first, libraries[first], 1)


_LIBRARIES = ("torch", "triton")


def first_missing(chain: str) -> str | None:
    """Return the shortest beginning of a dotted name that does not exist.

    None where the whole name exists, or where that cannot be known.
    """
    if chain.startswith(UNKNOWABLE):
        return None
    parts = chain.split(".")
    value: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        if not isinstance(value, types.ModuleType | type):
            return None
        name = ".".join(parts[:depth])
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(name)
        except ImportError:
            return name
    return None


def signature_findings() -> list[str]:
    """List the functions of torch that take other arguments than the code gives them."""
    found = []
    for name, wanted in SIGNATURES.items():
        module, *attributes = _split(name)
        value: Any = importlib.import_module(module)
        for attribute in attributes:
            value = getattr(value, attribute)
        have = tuple(inspect.signature(value).parameters)
        if have[: len(wanted)] != wanted:
            found.append(f"{name} takes {', '.join(have)}; the code counts on {', '.join(wanted)}")
    return found


def _split(name: str) -> list[str]:
    """Split a dotted name into its longest importable module and the attributes behind it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return [".".join(parts[:length]), *parts[length:]]
    raise ImportError(name)


def version_findings() -> list[str]:
    """Return the builds that differ from the ones that `VERSIONS` names."""
    found = []
    for name, wanted in VERSIONS.items():
        try:
            have = str(importlib.import_module(name).__version__)
        except ImportError as error:
            have = f"not importable: {error}"
        if have.split("+")[0] != wanted:
            found.append(f"{name} is {have}, not {wanted}")
    if torch.version.cuda is None:
        found.append("torch is built without CUDA")
    return found


def flashinfer_findings() -> list[str]:
    """Return the signatures that differ from those in the stand-in with which the backend is tested here."""
    import flashinfer

    from tests.flashinfer_signatures import differences

    return differences(flashinfer)


def kernel_findings() -> list[str]:
    """List the configurations of Triton kernels that this triton does not compile for compute capability 9.0."""
    from benchmarks.compile_cases import CompileCase
    from benchmarks.gpu_kernels_table import cases, compile_case
    from weight_sync import fingerprint_gpu, pairs_gpu, spans_gpu

    found = []
    of_weights = [case for module in (fingerprint_gpu, spans_gpu, pairs_gpu) for case in module.compile_cases()]
    for case in [*cases(), *(CompileCase(*case) for case in of_weights)]:
        try:
            row = compile_case(case)
        except Exception as error:
            found.append(f"{case.name}: {type(error).__name__}: {error}")
            continue
        spilled = f", {row.spilled_bytes} bytes spilled" if row.spilled_bytes else ""
        print(f"  {case.name}: {row.registers} registers{spilled}, {row.matrix_instruction or 'no matrix product'}")
    return found


CHECKS: dict[str, Callable[[], list[str]]] = {
    "versions": version_findings,
    "every module imports": import_findings,
    "every name of torch and triton exists": name_findings,
    "torch's signatures": signature_findings,
    "FlashInfer's signatures are the stand-in's": flashinfer_findings,
    "every kernel compiles for sm_90": kernel_findings,
}


def main() -> int:
    failed = False
    for name, check in CHECKS.items():
        findings = check()
        failed |= bool(findings)
        print(f"{name}: {'ok' if not findings else f'{len(findings)} findings'}", flush=True)
        print("".join(f"  {finding}\n" for finding in findings), end="", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
