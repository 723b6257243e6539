"""The files of deploy/ against each other and against the server: settings, endpoints, times, versions and keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.core.args.server_args import ServerArgs
from rollout.core.args.server_cli import serve_parser, server_args_from_namespace
from rollout.core.args.sources import parse_words
from rollout.core.errors import StartupError
from rollout.http.gate import OPEN_PATHS
from tests.deployment import check

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
MANIFESTS = [path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if path.name != "kustomization.yaml"]
AFTER_DRAIN_S = 30
"""Seconds that a supervisor grants after the drain: for weight verbs and the writing of answers."""


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def resources(kind: str) -> list[dict[str, Any]]:
    found = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text()) if one["kind"] == kind]
    assert found, kind
    return found


def pods() -> dict[str, dict[str, Any]]:
    """Return the specification of each kind of pod by its name."""
    workloads = resources("StatefulSet") + resources("Deployment")
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in workloads}


def settings(folder: Path, *words: str, variables: dict[str, str] | None = None) -> ServerArgs:
    """Return what `lockstep serve` makes of serve.yaml, with keys in `folder`."""
    path = folder / "serve.yaml"
    path.write_text((DEPLOY / "serve.yaml").read_text().replace("/run/secrets", str(folder)))
    namespace, notes = parse_words(serve_parser(), ["--config", str(path), *words], variables or {})
    assert notes == []
    return server_args_from_namespace(namespace)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("api-key", "admin-api-key"):
        (tmp_path / name).write_text(f"{name} of the test\n")
    return tmp_path


def test_the_settings_file_is_accepted_and_asks_for_keys(keys: Path) -> None:
    args = settings(keys)
    assert (args.api_key, args.admin_api_key) == ("api-key of the test", "admin-api-key of the test")
    assert args.host == "0.0.0.0" and args.weight_folders == "/models:/weights"
    (keys / "api-key").unlink()
    with pytest.raises(StartupError, match="api-key"):
        settings(keys)


def test_supervisors_wait_longer_than_the_drain(keys: Path) -> None:
    needed = settings(keys).drain_timeout + AFTER_DRAIN_S
    unit = (DEPLOY / "systemd" / "lockstep.service").read_text()
    assert float(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1]) >= needed  # type: ignore[index]
    engine = read("docker/compose.yml")["services"]["engine"]
    assert float(engine["stop_grace_period"].removesuffix("s")) >= needed
    pod = pods()["lockstep"]
    slept = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= needed + slept


def test_probes_call_endpoints_that_need_no_key(keys: Path) -> None:
    engine = pods()["lockstep"]["containers"][0]
    probes = {name: engine[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/liveness?timeout=20"}
    for name in ("Dockerfile", "Dockerfile.cuda"):
        (called,) = re.findall(r"http://127.0.0.1:(\d+)(/[^']+)'", (DEPLOY / "docker" / name).read_text())
        assert called == (str(settings(keys).port), paths["liveness"])
    assert {path.split("?")[0] for path in paths.values()} <= OPEN_PATHS
    assert probes["liveness"]["timeoutSeconds"] > 20, "the probe waits for the answer of the endpoint"
    started_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert started_s >= 600


def test_every_process_is_without_privileges() -> None:
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]} and security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
    for path in DEPLOY.glob("docker/Dockerfile*"):
        users = re.findall(r"^USER (\S+)$", path.read_text(), re.MULTILINE)
        assert users == ["10001:10001"], path.name
    for service in read("docker/compose.yml")["services"].values():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_names_and_ports_agree(keys: Path) -> None:
    port = settings(keys).port
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"lockstep:{port}"
    compose = read("docker/compose.yml")
    assert compose["services"]["engine"]["networks"]["default"]["aliases"] == ["lockstep"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]
    assert source["jsonData"]["timeInterval"].startswith(read("prometheus/prometheus.yml")["global"]["scrape_interval"])
    services = {one["metadata"]["name"]: one["spec"] for one in resources("Service")}
    engine = pods()["lockstep"]["containers"][0]
    assert services["lockstep-engines"]["ports"][0]["port"] == engine["ports"][0]["containerPort"] == port
    variables = {one["name"]: one for one in engine["env"]}
    host, _, router_port = variables["LOCKSTEP_REGISTER_URL"]["value"].removeprefix("http://").partition(":")
    assert services[host]["ports"][0]["port"] == int(router_port)
    assert all(spec["selector"]["app"] in pods() for spec in services.values())
    (stateful,) = resources("StatefulSet")
    assert stateful["spec"]["serviceName"] == "lockstep-engines"
    for policy in resources("NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"]["app"] in pods()


def test_variables_of_manifests_are_settings(keys: Path) -> None:
    (engine,) = pods()["lockstep"]["containers"]
    variables = {one["name"]: one.get("value", "8") for one in engine["env"]}
    args = settings(keys, variables=variables)
    assert (args.num_threads, args.register_url) == (8, "http://lockstep-router:30080")
    threads = read("docker/compose.yml")["services"]["engine"]["environment"]
    assert settings(keys, variables=dict.fromkeys(threads, "3")).num_threads == 3
    with pytest.raises(SystemExit):
        settings(keys, variables={"LOCKSTEP_NUM_THREADS": "many"})
    assert engine["args"] == ["serve", "--config", "/etc/lockstep/serve.yaml"]


def test_the_image_gets_what_a_wheel_is_built_from() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    taken = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored and all((ROOT / name).exists() for name in taken)
    packages = re.search(r"^include = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert packages is not None
    assert {name.strip("*") for name in yaml.safe_load(packages[1])} <= set(taken)
    for path in DEPLOY.glob("docker/Dockerfile*"):
        for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert source == "." or any(source == name or source.startswith(f"{name}/") for name in taken), source


def test_the_router_is_the_one_that_is_tested() -> None:
    pinned = re.search(r"^vllm-router==(.*)$", (ROOT / "examples/fleet/requirements.txt").read_text(), re.MULTILINE)
    images = {image["name"]: image for image in read("kubernetes/kustomization.yaml")["images"]}
    assert pinned is not None and images["vllm-router"]["newTag"] == pinned[1]
    assert {container["image"] for pod in pods().values() for container in pod["containers"]} == set(images)


def test_the_unit_names_files_that_are_here() -> None:
    unit = (DEPLOY / "systemd" / "lockstep.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *words = shlex.split(line)
    assert program == "/opt/lockstep/bin/lockstep" and words[:3] == ["serve", "--config", "/etc/lockstep/serve.yaml"]
    loaded = {one.split(":")[0] for one in re.findall(r"^LoadCredential=(.*)$", unit, re.MULTILINE)}
    assert {word.removeprefix("@%d/") for word in words if word.startswith("@%d/")} == loaded
    assert (DEPLOY / "systemd" / "lockstep.env").is_file() and (DEPLOY / "serve.yaml").is_file()


@pytest.mark.parametrize("one", check.CHECKS, ids=lambda one: one.tool)
def test_the_tools_that_are_here_accept_the_files_and_refuse_a_mistake(one: check.Check) -> None:
    if not one.is_possible():
        pytest.skip(f"{one.package} is missing; make check-deploy brings it")
    assert check.outcome(one) is None
