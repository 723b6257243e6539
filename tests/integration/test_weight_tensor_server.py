"""Tensors in the body of a call, and in shared memory of another process, into a real server: all or nothing."""

from __future__ import annotations

import base64
import contextlib
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from rollout.client.errors import ServerError
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.tensor_sender import TensorSender
from weight_sync.fingerprint import fingerprint, fingerprint_hex

PATH = "/update_weights_from_tensor"
REQUEST = {
    "text": "What is 12 + 30? Answer:",
    "sampling_params": {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True},
    "return_logprob": True,
}
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=3)


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return logical_tensors(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, max_total_tokens=2048) as running:
        yield running


@pytest.fixture(scope="module")
def sender(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorSender]:
    other = TensorSender(tensors, tmp_path_factory.mktemp("sender"))
    yield other
    other.close()


def checksums(server: ServerProcess) -> dict[str, str]:
    return server.client.weights_checker("checksum")["checksums"]


def expected(tensors: dict[str, torch.Tensor], scale: float) -> dict[str, str]:
    return {name: fingerprint_hex(fingerprint(tensor * scale)) for name, tensor in tensors.items()}


def answer(server: ServerProcess) -> tuple[list[int], list[float]]:
    reply = server.http.post("/generate", json=REQUEST)
    assert reply.status_code == 200, reply.text
    content = reply.json()
    return content["output_ids"], [entry[0] for entry in content["meta_info"]["output_token_logprobs"]]


def refreshed(server: ServerProcess, bodies: list[dict[str, Any]], version: str) -> None:
    server.client.begin_weight_update(version)
    for body in bodies:
        reply = server.http.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
    server.client.end_weight_update()
    assert server.client.weight_version() == version


def put_back(server: ServerProcess, tensors: dict[str, torch.Tensor]) -> None:
    content = base64.b64encode(save(tensors)).decode()
    refreshed(server, [{"serialized_named_tensors": [content], "format": "safetensors"}], "default")


@pytest.mark.full(but="list")
@pytest.mark.parametrize("form", ["list", "flattened", "local", "plain"])
def test_every_payload_of_another_process(
    server: ServerProcess, sender: TensorSender, tensors: dict[str, torch.Tensor], form: str
) -> None:
    before = answer(server)
    names = sorted(tensors)
    bodies = []
    for part in (names[::2], names[1::2]):
        body: dict[str, Any] = {
            "serialized_named_tensors": [sender.payload(form, part, scale=2.0)],
            "load_format": None,
        }
        if form == "flattened":
            body["load_format"] = "flattened_bucket"
        bodies.append(body)
    refreshed(server, bodies, f"{form}-1")
    assert checksums(server) == expected(tensors, 2.0)
    assert answer(server)[1] != before[1]
    sender.let_go()
    assert list(Path("/dev/shm").glob(f"torch_{sender.pid}_*")) == [], "all memory went back"
    put_back(server, tensors)
    assert checksums(server) == expected(tensors, 1.0)
    assert answer(server) == before


def test_safetensors_in_shared_memory(server: ServerProcess, tensors: dict[str, torch.Tensor]) -> None:
    content = save({name: tensor * 0.5 for name, tensor in tensors.items()})
    memory = SharedMemory(create=True, size=len(content))
    try:
        memory.buf[: len(content)] = content
        server.client.begin_weight_update("half")
        server.client.update_weights_from_tensor(shm_name=memory.name, shm_bytes=len(content), format="safetensors")
        assert bytes(memory.buf[: len(content)]) == content
        server.client.end_weight_update()
    finally:
        memory.close()
        memory.unlink()
    assert checksums(server) == expected(tensors, 0.5)
    put_back(server, tensors)


def test_clients_without_begin_and_end(
    server: ServerProcess, sender: TensorSender, tensors: dict[str, torch.Tensor]
) -> None:
    running = {"serialized_named_tensors": [sender.payload("list", [NORM], scale=3.0)], "weight_version": "running"}
    assert server.http.post(PATH, json=running).status_code == 200
    label = f"running~1of{len(tensors)}"
    assert server.client.weight_version() == label
    assert checksums(server) == expected(tensors, 1.0) | {NORM: expected(tensors, 3.0)[NORM]}
    server.client.pause("retract")
    names = sorted(tensors)
    for part in (names[:5], names[5:]):
        payload = sender.payload("flattened", part, scale=4.0)
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "weight_version": "paused"}
        assert server.http.post(PATH, json=body).status_code == 200
    assert server.client.weight_version() == label
    server.client.continue_generation()
    assert server.client.weight_version() == "paused"
    assert checksums(server) == expected(tensors, 4.0)
    sender.let_go()
    put_back(server, tensors)


Fault = Callable[[dict[str, torch.Tensor], TensorSender, Path], dict[str, Any]]


def pickled(value: Any) -> dict[str, Any]:
    return {
        "serialized_named_tensors": [
            base64.b64encode(value if isinstance(value, bytes) else pickle.dumps(value)).decode()
        ]
    }


def file_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return pickled(save(tensors)) | {"format": "safetensors"}


def cut(body: dict[str, Any], count: int) -> dict[str, Any]:
    content = base64.b64decode(body["serialized_named_tensors"][0])[:-count]
    return body | pickled(content)


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[-1] = value
    return changed


def gadget(tensors: dict[str, torch.Tensor], sender: TensorSender, folder: Path) -> dict[str, Any]:
    target = str(folder / "made").encode()
    return pickled(b"\x80\x04cos\nmkdir\nX" + struct.pack("<I", len(target)) + target + b"\x85R.")


FAULTS: dict[str, tuple[Fault, str]] = {
    "a gadget": (gadget, "'os.mkdir', which is not allowed"),
    "not a pickle": (lambda t, s, f: pickled(b"hello"), "not a pickle"),
    "a cut pickle": (lambda t, s, f: cut(pickled([(NORM, t[NORM])]), 5), "ends in the middle"),
    "a cut file": (lambda t, s, f: cut(file_of(t), 4), "bytes, but its header describes"),
    "an unknown name": (lambda t, s, f: pickled([("no.such", t[NORM])]), "no.such"),
    "another shape": (lambda t, s, f: pickled([(NORM, t[NORM][1:])]), NORM),
    "another dtype": (lambda t, s, f: pickled([(NORM, t[NORM].double())]), "float64"),
    "a tensor twice": (lambda t, s, f: pickled([(NORM, t[NORM]), (NORM, t[NORM])]), "twice"),
    "not a number": (lambda t, s, f: file_of({NORM: with_value(t[NORM], math.nan)}), "not finite"),
    "infinite": (lambda t, s, f: file_of({NORM: with_value(t[NORM], math.inf)}), "not finite"),
    "direct": (lambda t, s, f: pickled([(NORM, t[NORM])]) | {"load_format": "direct"}, "checkpoint names"),
    "descriptors": (lambda t, s, f: descriptors(t, f), "set_sharing_strategy"),
    "memory that is gone": (lambda t, s, f: gone(s), "cannot open shared memory"),
    "a segment that is not there": (
        lambda t, s, f: {"format": "safetensors", "shm_name": "psm_none", "shm_bytes": 99},
        "cannot open shared memory",
    ),
}


def descriptors(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    other = TensorSender({NORM: tensors[NORM]}, folder, "file_descriptor")
    try:
        return {"serialized_named_tensors": [other.payload("list", [NORM])]}
    finally:
        other.close()


def gone(sender: TensorSender) -> dict[str, Any]:
    payload = sender.payload("list", [NORM])
    for path in Path("/dev/shm").glob(f"torch_{sender.pid}_*"):
        path.unlink()
    return {"serialized_named_tensors": [payload]}


@pytest.mark.parametrize("when", ["first", "last"])
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_bad_bucket_changes_nothing(
    server: ServerProcess, sender: TensorSender, tensors: dict[str, torch.Tensor], tmp_path: Path, name: str, when: str
) -> None:
    fault, reason = FAULTS[name]
    before = answer(server)
    server.client.begin_weight_update("never")
    if when == "last":
        rest = {other: tensor * 9 for other, tensor in tensors.items() if other != NORM}
        assert server.http.post(PATH, json=file_of(rest)).status_code == 200
    refused = server.http.post(PATH, json=fault(tensors, sender, tmp_path))
    assert refused.status_code == 400, refused.text
    assert reason in refused.json()["message"]
    assert not (tmp_path / "made").exists()
    with pytest.raises(ServerError):
        server.client.end_weight_update()
    with contextlib.suppress(ServerError):
        server.client.abort_weight_update()
    assert server.client.weight_version() == "default"
    assert checksums(server) == expected(tensors, 1.0)
    assert answer(server) == before


def test_a_flipped_bit_is_found_by_the_manifest(server: ServerProcess, tensors: dict[str, torch.Tensor]) -> None:
    stated = fingerprint_hex(fingerprint(tensors[NORM]))
    shape = list(tensors[NORM].shape)
    manifest = [{"name": NORM, "dtype": "float32", "shape": shape, "fingerprint": stated}]
    server.client.begin_weight_update("never", coverage="partial", manifest=manifest)
    content = bytearray(save({NORM: tensors[NORM]}))
    content[-7] ^= 1
    reply = server.http.post(PATH, json=pickled(bytes(content)) | {"format": "safetensors"})
    refusals = [] if reply.status_code == 200 else [reply.json()["message"]]
    try:
        server.client.end_weight_update()
    except ServerError as error:
        refusals.append(error.message)
    assert any("fingerprint" in refusal for refusal in refusals)
    with contextlib.suppress(ServerError):
        server.client.abort_weight_update()
    assert checksums(server) == expected(tensors, 1.0)


def test_the_server_is_well(server: ServerProcess, tensors: dict[str, torch.Tensor]) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
    before = answer(server)
    refreshed(server, [file_of({name: tensor * 2 for name, tensor in tensors.items()})], "good")
    assert checksums(server) == expected(tensors, 2.0)
    put_back(server, tensors)
    assert answer(server) == before
