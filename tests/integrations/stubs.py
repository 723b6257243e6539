"""Import stubs: stand-ins for modules that a client imports and that a client on a CPU does not use.

`install("triton", "sglang.srt.entrypoints.engine")` answers imports of the package `triton` and everything in it where
it is not installed, and of a module that is there but would drag a whole engine in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


def install(*packages: str) -> None:
    """Stub packages that cannot be imported otherwise, and modules, with a dot in their names, in any case."""
    sys.meta_path.append(_Finder([name for name in packages if "." not in name]))
    sys.meta_path.insert(0, _Finder([name for name in packages if "." in name]))


class _AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Anything(metaclass=_AnythingType):
    """A stand-in for any stubbed name: a base class, a decorator, a function, a constant."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        if cls is Anything and len(args) == 1 and callable(args[0]):
            return args[0]  # used as a decorator
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _: Any) -> Any:
        return self

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _StubModule(types.ModuleType):
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == package or fullname.startswith(package + ".") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
