"""Refreshes with the same lists over a real server: the lists are known from the second one on, the content is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.client.errors import ServerError
from tests.announcements import bucket_fields, manifest_in_lists
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.weight_group_helpers import broadcast, in_background
from weight_sync.bucket import pack
from weight_sync.fingerprint import fingerprint, fingerprint_hex
from weight_sync.json_lists import JsonList
from weight_sync.process_group import free_port, init_process_group

pytestmark = pytest.mark.full

Tensors = dict[str, torch.Tensor]
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe", seed=3)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, max_total_tokens=2048, weight_update_timeout=20) as running:
        yield running


def kept(lists: dict[str, Any]) -> dict[str, Any]:
    return {name: JsonList(value) if isinstance(value, list) else value for name, value in lists.items()}


def test_lists_that_are_known_bring_new_content(server: ServerProcess, folder: Path) -> None:
    old, client, port = logical_tensors(folder), server.client, free_port()
    joined = in_background(
        lambda: client.init_weights_update_group("127.0.0.1", port, 1, 2, group_name="g", backend="gloo")
    )
    group = init_process_group("127.0.0.1", port, 0, 2, "g", "gloo", WAIT_S)
    assert joined(WAIT_S) is None
    lists = kept(bucket_fields(list(old.items()), "g", "flattened_bucket"))
    parts = ("names", "dtypes", "shapes")

    def refresh(version: str, tensors: Tensors, stated: Tensors) -> None:
        digits = manifest_in_lists(stated.items())["fingerprints"]
        manifest = {name: lists[name] for name in parts} | {"fingerprints": digits}
        client.begin_weight_update(version, manifest=manifest, update_id=version)
        called = in_background(lambda: client.update_weights_from_distributed(**lists, update_id=version))
        broadcast(group, pack(list(tensors.items())))
        if (error := called(WAIT_S)) is not None:
            raise error
        client.end_weight_update(update_id=version)

    for turn in (1, 2, 3):
        new = {name: tensor * (1 + turn / 8) for name, tensor in old.items()}
        refresh(f"v{turn}", new, new)
        live = client.weights_checker("checksum")["checksums"]
        assert live == {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in new.items()}
        assert client.weight_version() == f"v{turn}"
    with pytest.raises(ServerError, match="the manifest expects"):
        refresh("v4", old, new)
    client.abort_weight_update("v4")
    assert client.weights_checker("checksum")["checksums"] == live and client.weight_version() == "v3"
    client.destroy_weights_update_group("g")
    group.destroy()
