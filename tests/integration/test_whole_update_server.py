"""A refresh of one call against a real server, with a request running; and refusals that leave group and version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.client import RolloutClient
from rollout.client.wire import Call
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.sender import EngineError, WeightSender

LONG = {"max_new_tokens": 400, "ignore_eos": True}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", seed=3, context_length=512)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, max_total_tokens=1024, weight_update_timeout=20) as running:
        yield running


class Counting(RolloutClient):
    """A client that notes the paths of its calls."""

    paths: list[str]

    def _exchange(self, call: Call[Any]) -> Any:
        self.paths.append(call.path)
        return super()._exchange(call)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Counting]:
    client = Counting(server.url)
    client.paths = []
    yield client
    client.close()


@pytest.fixture
def sender(client: Counting) -> Iterator[WeightSender]:
    sender = WeightSender(client, timeout_s=20.0)
    sender.connect(group_name="whole")
    client.paths.clear()
    yield sender
    sender.close()


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: tensor * factor for name, tensor in tensors.items()}


def content(server: ServerProcess) -> tuple[str, str]:
    """Return the digest of what serves, as the server computes it anew, and its label."""
    return server.client.weights_checker()["digest"], server.client.weight_version()


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_request_runs_on_over_a_refresh_of_one_call(
    server: ServerProcess, client: Counting, sender: WeightSender, folder: Path, with_manifest: bool
) -> None:
    begun, outputs, old = threading.Event(), list[Any](), server.client.weight_version()
    label = f"whole {with_manifest}"

    def generate() -> None:
        for output in server.client.stream(input_ids=[3, 1, 4], sampling_params=LONG):
            begun.set()
            outputs.append(output)

    running = threading.Thread(target=generate)
    running.start()
    assert begun.wait(20.0)
    new = scaled(logical_tensors(folder), 1.125)
    report = sender.refresh(new, label, with_manifest=with_manifest)
    assert client.paths == ["/update_weights_from_distributed"]
    (share,) = report.engines.values()
    assert share.committed and share.stall_seconds is not None and share.staging_seconds is not None
    running.join(60.0)
    assert len(outputs[-1].output_ids) == 400
    assert [span.version for span in outputs[-1].weight_versions] in ([old], [old, label])
    found = server.client.weights_checker()["checksums"]
    assert found == {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in new.items()}
    assert content(server) == (report.digest or content(server)[0], label)


def test_refusals_of_one_call_leave_the_version_and_the_group(
    server: ServerProcess, sender: WeightSender, folder: Path
) -> None:
    new = scaled(logical_tensors(folder), 1.25)
    sender.refresh(new, "before")
    before = content(server)
    name = next(iter(new))
    lacking = {other: tensor for other, tensor in new.items() if other != name}
    infinite = new | {name: torch.full_like(new[name], float("inf"))}
    for tensors, with_manifest, status in ((lacking, True, 400), (infinite, False, 400), (lacking, False, 400)):
        with pytest.raises(EngineError) as caught:
            sender.refresh(tensors, "refused", with_manifest=with_manifest)
        (failure,) = caught.value.failures.values()
        assert failure.status == status and caught.value.committed == [] and caught.value.unknown == []
        assert content(server) == before and not server.client.weight_update()["open"]
    server.client.begin_weight_update("another", update_id="another")
    with pytest.raises(EngineError, match="already open"):
        sender.refresh(new, "refused")
    state = server.client.weight_update()
    assert state["update_id"] == "another" and state["received"] == 0 and content(server) == before
    server.client.abort_weight_update("another")
    report = sender.refresh(scaled(new, 1.5), "after")
    assert content(server) == (report.digest, "after")
