"""Found by Python at its start if this folder is on PYTHONPATH: SGLang's launchers are this project's from then on.

The rest of SGLang comes from the installed package, if there is one.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

LAUNCHER = Path(__file__).resolve().parents[1] / "sglang_launch.py"
LAUNCHERS = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")
PARENTS = ("sglang", "sglang.srt", "sglang.srt.entrypoints")


class _Redirect:
    """A finder for `sys.meta_path`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in LAUNCHERS:
            return importlib.util.spec_from_file_location(name, LAUNCHER)
        if name in PARENTS and importlib.machinery.PathFinder.find_spec(name, path) is None:
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return None


sys.meta_path.insert(0, _Redirect)
