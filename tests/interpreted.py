"""Triton kernels as plain Python on CPU tensors: tests take modules that have kernels from `kernels`.

Whether a kernel is interpreted is decided where it is defined, triton's own functions included, so that triton must not
have been loaded before this module; processes that compile kernels are started with `compiling_environment`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was loaded before tests.interpreted: its functions would not be interpreted")
os.environ["TRITON_INTERPRET"] = "1"

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

import triton.language as tl
from triton.runtime import interpreter

from rollout.kernels.gpu.register import TRITON_OPERATORS, triton_form
from rollout.kernels.ops import Ops, gpu_deferred_sum, plain_ops


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function from a kernel, and make Triton's language interpretable only if it is not yet.

    Triton would do so at every call, which takes longer than the function itself.
    """
    languages = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
    if any(tl.core.is_builtin(language.full) for language in languages):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _call


def kernels(module: str) -> Any:
    """Import a module of `rollout.kernels.gpu`."""
    return import_module(f"rollout.kernels.gpu.{module}")


def interpreted_ops() -> Ops:
    """Return the functions that `load_gpu_kernels` registers, for CPU tensors; the other operators are plain torch."""
    operators = {name: triton_form(name) for name in TRITON_OPERATORS}
    packed = kernels("packed_experts").packed_experts
    return plain_ops().replace(
        takes_empty_slots=True, packed_experts=packed, deferred_sum=gpu_deferred_sum(), **operators
    )


def mutated(module: ModuleType, folder: Path, *changes: tuple[str, str]) -> Any:
    """Import `module` with its source changed, as another module.  Each old text occurs once in it."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, (old, source.count(old))
        source = source.replace(old, new)
    name = f"mutant_of_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def compiling_environment() -> dict[str, str]:
    """Return the environment of a process that compiles kernels."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
