"""The docs against the code: routes, fields, flags and defaults, files and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools import endpoints
from examples.make_checkpoint.spec import FAMILIES
from rollout.core.sampling_params import NOT_ON_THE_WIRE, SamplingParams
from rollout.families import registry
from rollout.http import protocol
from rollout.http.vllm import control_protocol as vllm_control_protocol

ROOT = Path(__file__).resolve().parents[3]
API_PAGES = [*sorted((ROOT / "docs/reference/http").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]
API_PAGES.append(ROOT / "docs/operate/dashboard.md")
API = "\n".join(page.read_text() for page in API_PAGES)
FILES = (ROOT / "docs" / "files.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
OPENAI_FIELDS = {"max_completion_tokens", "top_logprobs", "user", "echo"}
"""Fields whose meaning OpenAI documents."""
OF_SGLANG = {"selector"}
"""Fields that are taken from SGLang's clients, and whose values all mean the same."""


def documented_names(text: str) -> set[str]:
    """Return the words in code font."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[\w./{}-]+", code)}


def served_paths() -> set[str]:
    """Return the path of every route in the schema of a server."""
    return {one.path for one in endpoints.all_endpoints()}


def test_every_route_is_documented() -> None:
    paths = served_paths()
    assert len(paths) > 30
    names = documented_names(API) | set(re.findall(r"POST (\S+?),?$", API, re.MULTILINE))
    headings = {word.strip(",") for line in API.splitlines() if re.match("##? ", line) for word in line.split()}
    assert not paths - names - headings
    assert "/no_such_route" not in names | headings


def test_every_documented_endpoint_exists() -> None:
    rows = [line for line in API.splitlines() if re.match(r"\| `(GET|POST)", line)]
    named = {path for row in rows for path in re.findall(r"`(?:GET |POST )?(/[\w/{}]+)`", row.split("|")[1])}
    assert len(named) > 20 and not named - served_paths()


def test_every_field_of_an_endpoint_is_documented() -> None:
    names = documented_names(API) | OF_SGLANG
    openai = names | OPENAI_FIELDS
    fields = [(one.path, name.split(".")[-1]) for one in endpoints.all_endpoints() for name, *_ in one.fields]
    assert len(fields) > 400
    assert [field for field in fields if field[1] not in (openai if field[0].startswith("/v1/") else names)] == []


@pytest.mark.parametrize(
    "arguments", [vllm_control_protocol.SleepForWeightSync, vllm_control_protocol.WakeForWeightSync]
)
def test_every_argument_of_a_worker_call_is_documented(arguments: type[protocol.Body]) -> None:
    """The schema of `/collective_rpc` has any `kwargs`."""
    assert not set(arguments.model_fields) - documented_names(API)


def test_every_sampling_parameter_is_documented() -> None:
    assert not set(SamplingParams.__struct_fields__) - NOT_ON_THE_WIRE - documented_names(API)


def test_the_files_named_in_the_tree_exist() -> None:
    (tree,) = re.findall(r"^```\n(.*?)```", FILES, re.MULTILINE | re.DOTALL)
    parents: list[str] = []
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        parents = [*parents[: len(indent) // 2], name]
        folder = ROOT.joinpath(*parents)
        assert folder.is_dir(), line
        for inner in re.findall(r"\b(\w+(?:/|\.py|\.md))(?=[,:]|$)", line[len(indent) + len(name) :]):
            assert (folder / inner).exists(), f"{line}: {inner}"
    packages = {path.parent.name for path in ROOT.glob("rollout/*/__init__.py")}
    assert not packages - {word.strip("/") for word in tree.split()}


def test_every_family_and_architecture_is_in_the_table_of_models() -> None:
    rows = [line.split("|") for line in MODELS.splitlines() if line.startswith("| `")]
    names = [set(re.findall(r"`([^`]+)`", row[1])) for row in rows]
    architectures = [set(re.findall(r"`(\w+)`", row[2])) for row in rows]
    assert set().union(*names) >= set(FAMILIES)
    assert set().union(*architectures) >= set(registry.FAMILIES)
