"""The version of the package, also where no package is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rollout.core.version import VERSION

ROOT = Path(__file__).resolve().parents[3]

_NOT_INSTALLED = """
import importlib.metadata, sys
usual = importlib.metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name.replace("_", "-").lower() == "lockstep-rl":
        raise importlib.metadata.PackageNotFoundError(name)
    return usual(cls, name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
from pathlib import Path
from tests.http_harness import live_server
from tests.model_zoo import tiny_checkpoint
folder = tiny_checkpoint(Path(sys.argv[1]), "moe_dense_first", 0)
with live_server(folder) as live:
    for path in ("/server_info", "/v1/loads"):
        print(live.client.get(path).json()["version"])
    print(live.client.get("/openapi.json").json()["info"]["version"])
    print(live.client.get("/dashboard/data").json()["server"]["version"])
from rollout.cli.main import main
main(["--version"])
"""


def test_a_tree_that_is_not_installed_serves(tmp_path: Path) -> None:
    """First runs on a GPU: `lockstep serve` read the metadata of a distribution that was not installed."""
    command = [sys.executable, "-c", _NOT_INSTALLED, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [VERSION] * 4 + ["lockstep", VERSION]
