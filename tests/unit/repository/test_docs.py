"""The docs against the code: routes, fields, flags and defaults, files and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools import endpoints
from examples.make_checkpoint.spec import FAMILIES
from rollout.core.messages.io_struct import VERBS
from rollout.core.sampling_params import SamplingParams
from rollout.families import registry
from rollout.http import protocol
from rollout.http.control.body import body_of
from rollout.http.native.generate import GenerateRequest
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.http.vllm import control_protocol as vllm_control_protocol

ROOT = Path(__file__).resolve().parents[3]
API_PAGES = [*sorted((ROOT / "docs/reference/http").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]
API_PAGES.append(ROOT / "docs/operate/dashboard.md")
API = "\n".join(page.read_text() for page in API_PAGES)
FILES = (ROOT / "docs" / "files.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
# Fields of OpenAI's own documentation, and the few that have no effect.
OPENAI_FIELDS = {
    *("model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "user"),
    *("response_format", "temperature", "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty"),
    *("logit_bias", "stream"),
}
NOT_FOR_RL = {"spaces_between_special_tokens"}


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


@pytest.mark.parametrize(
    "body",
    [
        GenerateRequest,
        protocol.AbortRequest,
        protocol.RouteProbeRequest,
        protocol.TrainerMetricsRequest,
        *(body_of(verb) for verb in VERBS if verb.endpoint.path is not None),
        vllm_control_protocol.AbortRequestsRequest,
        vllm_control_protocol.ResetPrefixCacheRequest,
        vllm_control_protocol.InitInfo,
        vllm_control_protocol.StartWeightUpdateRequest,
        vllm_control_protocol.UpdateInfo,
        vllm_control_protocol.UpdateWeightsRequest,
        vllm_control_protocol.FinishWeightUpdateRequest,
        vllm_control_protocol.CollectiveRpcRequest,
        vllm_control_protocol.SleepForWeightSync,
        vllm_control_protocol.WakeForWeightSync,
        ChatCompletionRequest,
    ],
)
def test_every_body_field_is_documented(body: type[protocol.Body]) -> None:
    fields = set(body.model_fields) - {"selector"}  # accepted for SGLang's clients, both values mean the same
    if body is ChatCompletionRequest:
        fields -= OPENAI_FIELDS
    assert not fields - documented_names(API) - {"stream_options"}


def test_every_sampling_parameter_is_documented() -> None:
    assert not set(SamplingParams.__struct_fields__) - documented_names(API) - NOT_FOR_RL


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
