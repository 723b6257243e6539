"""The owner of a call, over HTTP and real groups: strangers, repeated calls, outcomes of updates, refused bodies."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.trainer_process import TrainerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.process_group import free_port

pytestmark = pytest.mark.full

Tensors = dict[str, torch.Tensor]
FIRST, SECOND = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3)


@pytest.fixture(scope="module")
def old(folder: Path) -> Tensors:
    return logical_tensors(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, max_total_tokens=2048, weight_update_timeout=4) as running:
        yield running


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def bucket(server: ServerProcess, tensors: Tensors, **fields: Any) -> httpx.Response:
    payload = base64.b64encode(save(tensors)).decode()
    return post(
        server, "/update_weights_from_tensor", serialized_named_tensors=[payload], format="safetensors", **fields
    )


def serves(server: ServerProcess, tensors: Tensors) -> bool:
    live = server.client.weights_checker("checksum")["checksums"]
    return live == {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in tensors.items()}


def halves(tensors: Tensors) -> list[Tensors]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[first::2]} for first in (0, 1)]


def refresh(server: ServerProcess, tensors: Tensors, version: str) -> None:
    assert post(server, "/begin_weight_update", weight_version=version).status_code == 200
    for part in halves(tensors):
        assert bucket(server, part).status_code == 200
    assert post(server, "/end_weight_update").status_code == 200


def test_w07_what_is_left_of_one_trainer_is_not_taken_for_another_s(server: ServerProcess, old: Tensors) -> None:
    """A's lease runs out, B begins its part of the tensors: A's late call without a label changes nothing."""
    refresh(server, old, "v1")
    a, b = ({name: tensor * factor for name, tensor in old.items()} for factor in (3.0, 5.0))
    (lost, late), (part, _) = halves(a), halves(b)
    assert post(server, "/begin_weight_update", lease_s=0.3).status_code == 200
    assert bucket(server, lost).status_code == 200
    time.sleep(0.6)
    begun = post(server, "/begin_weight_update", weight_version="8", coverage="partial", update_id="b")
    assert begun.status_code == 200, begun.text
    stray = bucket(server, late)
    assert stray.status_code == 409, stray.text
    assert begun.json()["update_id"] == "b"
    assert post(server, "/end_weight_update").status_code == 409
    assert post(server, "/abort_weight_update", update_id="a").status_code == 409
    assert bucket(server, part, update_id="b").status_code == 200
    ended = post(server, "/end_weight_update", update_id="b")
    assert ended.status_code == 200 and ended.json()["weight_version"] == "8", ended.text
    assert serves(server, old | part)
    assert post(server, "/end_weight_update", update_id="b").json() == ended.json()
    told = server.client.weight_update("b")
    assert told["outcome"] == "committed" and told["weight_version"] == "8"
    assert server.client.weight_update("a&b")["outcome"] == "unknown"
    refused = post(server, "/begin_weight_update", coverage="partial")
    assert refused.status_code == 400 and "update_id" in refused.json()["message"]


def test_engine_03_a_pause_outlives_a_continue_that_waited(server: ServerProcess, old: Tensors) -> None:
    """The continue waits behind a rendezvous with a master that is not there."""
    assert post(server, "/pause_generation").status_code == 200
    dead = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    joining = threading.Thread(target=post, args=(server, "/init_weights_update_group"), kwargs=dead)
    older = threading.Thread(target=post, args=(server, "/continue_generation"))
    joining.start()
    time.sleep(0.5)
    older.start()
    time.sleep(0.5)
    assert older.is_alive() and post(server, "/pause_generation").json()["paused"] is True
    older.join(30)
    joining.join(30)
    assert server.client.server_info()["internal_states"][0]["paused"] is True
    assert post(server, "/continue_generation").json()["paused"] is False


@pytest.mark.parametrize("body", ["unknown form", "too large"])
def test_w17_a_call_that_is_refused_unread_leaves_its_group(
    server: ServerProcess, old: Tensors, tmp_path: Path, body: str
) -> None:
    """The call's broadcast is under way: the next call of equal size must not take it for its own content."""
    refresh(server, old, f"before {body}")
    trainer = TrainerProcess({name: old[name] * 7 for name in (FIRST, SECOND)}, tmp_path)
    try:
        trainer.wait_ready()
        joined = post(server, "/init_weights_update_group", **trainer.join_fields())
        assert joined.status_code == 200, joined.text
        fields = trainer.send([FIRST])
        if body == "unknown form":
            refused = post(server, "/update_weights_from_distributed", **fields | {"load_format": "zip"})
            assert refused.status_code == 400 and "zip" in refused.json()["message"]
        else:
            fields["dtypes"] = ["float32" + " " * (65 << 20)]
            assert post(server, "/update_weights_from_distributed", **fields).status_code == 413
        next_call = fields | {"names": [SECOND], "dtypes": ["float32"]}
        assert post(server, "/update_weights_from_distributed", **next_call).status_code == 404
        assert serves(server, old)
    finally:
        trainer.close()
