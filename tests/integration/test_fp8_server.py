"""Real servers with FP8 checkpoints: FP8 and INT4 by every transport, bf16 quantised at the write, and refusals."""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.fp8_checkpoints import QuantisedCase
from tests.fp8_reference import Named, fp8_checkpoint, set_config
from tests.pair_forms import FP8_FORM, INT4_FORM, PairForm
from tests.parameter_server_stand_in import ParameterServerStandIn
from tests.server_process import ServerProcess
from tests.trainer_process import TrainerProcess
from weight_sync.fingerprint import digest, fingerprint, fingerprint_hex
from weight_sync.sender import WeightSender
from weight_sync.tensor_meta import TensorMeta, dtype_name

PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 17, 23, 42], list(range(30, 60))]
SETTINGS = {"dtype": "bfloat16", "max_total_tokens": 1024, "num_threads": 1, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> QuantisedCase:
    return QuantisedCase(tmp_path_factory.mktemp("fp8"), "qwen3_moe")


@pytest.fixture(scope="module")
def newer(case: QuantisedCase) -> tuple[Named, Named, Named]:
    return case.newer(1)


@pytest.fixture(scope="module")
def newer_folder(
    case: QuantisedCase, newer: tuple[Named, Named, Named], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return fp8_checkpoint(tmp_path_factory.mktemp("newer") / "fp8", case.plain, lambda _: newer[1])


@pytest.fixture(scope="module")
def server(case: QuantisedCase) -> Iterator[ServerProcess]:
    with ServerProcess(case.stored, weight_version="v0", **SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def old(server: ServerProcess) -> list[Any]:
    return facts(server)


@pytest.fixture(scope="module")
def expected(newer_folder: Path, case: QuantisedCase, newer: tuple[Named, Named, Named], old: list[Any]) -> list[Any]:
    """Return the facts of a server that starts from the newer FP8 checkpoint; from its values they are the same."""
    values = fp8_checkpoint(newer_folder.parent / "values", case.plain, lambda _: newer[2])
    set_config(values, None)
    found = []
    for folder in (newer_folder, values):
        with ServerProcess(folder, **SETTINGS) as started:
            found.append(facts(started))
    assert found[0] == found[1] != old
    return found[0]


def facts(server: ServerProcess) -> list[Any]:
    """Return the tokens and log-probabilities of each answer."""
    body = {"input_ids": PROMPTS, "sampling_params": PARAMS, "return_logprob": True}
    reply = server.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in reply.json()]


def digest_of(tensors: Named) -> str:
    return digest((TensorMeta(n, t.dtype, tuple(t.shape)), fingerprint(t)) for n, t in tensors.items())


def manifest_of(tensors: Named) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "fingerprint": fingerprint_hex(fingerprint(tensor)),
        }
        for name, tensor in tensors.items()
    ]


def ok(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


# --- transports: each sends a bucket -----------------------------------------------------------------------------

Send = Callable[[ServerProcess, Named], None]


def by_safetensors(server: ServerProcess, tensors: Named) -> None:
    payload = base64.b64encode(save({name: tensor.contiguous() for name, tensor in tensors.items()})).decode()
    ok(server, "/update_weights_from_tensor", serialized_named_tensors=[payload], format="safetensors")


def by_pickle(server: ServerProcess, tensors: Named) -> None:
    payload = base64.b64encode(pickle.dumps(list(tensors.items()))).decode()
    ok(server, "/update_weights_from_tensor", serialized_named_tensors=[payload])


def by_ipc(server: ServerProcess, tensors: Named) -> None:
    with ParameterServerStandIn(1 << 19, "json") as sender:
        thread = threading.Thread(target=sender.update, args=(list(tensors.items()),), daemon=True)
        thread.start()
        ok(server, "/update_weights_from_ipc", zmq_handles=sender.handles)
        thread.join(30)


def by_broadcast(load_format: str | None, folder: Path, whole: Named) -> tuple[Send, Callable[[], None]]:
    trainer = TrainerProcess(whole, folder)
    joined: list[bool] = []

    def send(server: ServerProcess, tensors: Named) -> None:
        if not joined:
            ok(server, "/init_weights_update_group", **trainer.join_fields())
            joined.append(True)
        ok(server, "/update_weights_from_distributed", **trainer.send(list(tensors), load_format))

    return send, trainer.close


TRANSPORTS: dict[str, Send | str | None] = {
    "safetensors": by_safetensors,
    "pickle": by_pickle,
    "ipc": by_ipc,
    "distributed": None,
    "flattened": "flattened_bucket",
}


def refreshed_in_parts(
    server: ServerProcess, transport: str, folder: Path, stored: Named, form: PairForm
) -> dict[str, Any]:
    """Refresh with a bucket of the elements of weights, then one of scales and plain tensors; return the answer."""
    send, close = TRANSPORTS[transport], lambda: None
    if not callable(send):
        send, close = by_broadcast(send, folder, stored)
    try:
        server.client.begin_weight_update("v1", manifest=manifest_of(stored))
        firsts = form.firsts(stored)
        send(server, firsts)
        state = server.http.get("/weight_update").json()
        assert (state["received"], state["unpaired"]) == (0, len(firsts))
        send(server, {name: tensor for name, tensor in stored.items() if name not in firsts})
        return server.client.end_weight_update()
    finally:
        close()


@pytest.mark.full(but="flattened")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_int4_by_every_transport(
    server: ServerProcess, case: QuantisedCase, newer: tuple[Named, Named, Named], transport: str, tmp_path: Path
) -> None:
    """A server with FP8 takes parts in INT4."""
    stored = INT4_FORM.quantised(newer[0])
    values = INT4_FORM.values_of(stored, torch.bfloat16)
    ended = refreshed_in_parts(server, transport, tmp_path, stored, INT4_FORM)
    assert (ended["content_digest"], ended["held_digest"]) == (digest_of(stored), digest_of(values))
    ok(server, "/update_weights_from_disk", model_path=str(case.stored), weight_version="v0")


@pytest.mark.full(but=("safetensors", "flattened"))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fp8_by_every_transport(
    server: ServerProcess,
    case: QuantisedCase,
    newer: tuple[Named, Named, Named],
    expected: list[Any],
    old: list[Any],
    transport: str,
    tmp_path: Path,
) -> None:
    """Every pair is cut apart: a bucket of weights, then one of scales and plain tensors."""
    _, fp8, values = newer
    assert facts(server) == old
    ended = refreshed_in_parts(server, transport, tmp_path, fp8, FP8_FORM)
    assert (ended["content_digest"], ended["held_digest"]) == (digest_of(fp8), digest_of(values))
    assert facts(server) == expected
    info = server.http.get("/model_info").json()
    assert (info["content_digest"], info["held_digest"]) == (digest_of(fp8), digest_of(values))
    ok(server, "/update_weights_from_disk", model_path=str(case.stored), weight_version="v0")
    assert facts(server) == old


@pytest.mark.full
def test_fp8_by_our_own_sender(
    server: ServerProcess, case: QuantisedCase, newer: tuple[Named, Named, Named], expected: list[Any], old: list[Any]
) -> None:
    _, fp8, _ = newer
    sender = WeightSender(server.client, timeout_s=30.0)
    sender.connect()
    try:
        report = sender.refresh(fp8, "v1", bucket_bytes=1 << 18)
    finally:
        sender.close()
    assert report.digest == digest_of(fp8) == server.http.get("/model_info").json()["content_digest"]
    assert facts(server) == expected
    ok(server, "/update_weights_from_disk", model_path=str(case.stored), weight_version="v0")
    assert facts(server) == old


@pytest.mark.full
def test_half_a_pair_is_a_refused_update(
    server: ServerProcess, newer: tuple[Named, Named, Named], old: list[Any]
) -> None:
    fp8 = dict(newer[1])
    name = next(name for name in fp8 if name.endswith("_scale_inv"))
    del fp8[name]
    server.client.begin_weight_update("v1")
    by_safetensors(server, fp8)
    reply = server.http.post("/end_weight_update", json={})
    assert reply.status_code == 400 and f"has no {name}" in reply.text
    assert facts(server) == old


@pytest.mark.full(but="1 rank")
@pytest.mark.parametrize("ranks", [1, 2], ids=["1 rank", "2 ranks"])
def test_bf16_is_quantised_at_the_write(
    case: QuantisedCase,
    newer: tuple[Named, Named, Named],
    expected: list[Any],
    ranks: int,
) -> None:
    """The server serves what the FP8 checkpoint of the trainer's weights gives, and tells both digests."""
    sent, _, values = newer
    names = sorted(sent)
    with ServerProcess(case.stored, quantize_weight_updates=True, tp_size=ranks, **SETTINGS) as server:
        server.client.begin_weight_update("v1", manifest=manifest_of(sent))
        for part in range(2):
            by_safetensors(server, {name: sent[name] for name in names[part::2]})
        ended = server.client.end_weight_update()
        assert (ended["content_digest"], ended["held_digest"]) == (digest_of(sent), digest_of(values))
        found = facts(server)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert found == expected or ranks > 1, "sums over ranks may round otherwise"
        checked = server.client.weights_checker("checksum")
        assert checked["digest"] == checked["expected_digest"] == digest_of(sent)
        assert checked["held_digest"] == digest_of(values)
        assert checked["checksums"] == {n: fingerprint_hex(fingerprint(t)) for n, t in values.items()}
        base = server.http.post("/begin_weight_update", json={"base_digest": digest_of(sent)})
        assert base.status_code == 200, "a base is what was sent"
        ok(server, "/abort_weight_update")


@pytest.mark.full
def test_the_option_needs_an_fp8_checkpoint(case: QuantisedCase) -> None:
    server = ServerProcess(case.plain, quantize_weight_updates=True, **SETTINGS)
    try:
        assert server.process.wait(60) != 0
        lines = server.stderr().strip().splitlines()
        assert "--quantize-weight-updates" in lines[-1] and "quantization_config" in lines[-1]
    finally:
        server.close()
