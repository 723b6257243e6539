"""Several devices: an engine of two ranks, and weights from a trainer on another device through NCCL.

In a dry run the ranks are processes on the CPU, and the groups gloo's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engines import checkpoint
from tests.gpu.needs import need_gpus, need_module
from tests.model_zoo import logical_tensors
from tests.server_process import START_S, ServerProcess
from tests.trainer_process import TrainerProcess
from weight_sync.fingerprint import fingerprint, fingerprint_hex

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17]
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
TP2 = {"tp_size": 2, "ep_size": 2}
DP2 = TP2 | {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "all_to_all"}
BFLOAT16_SLACK = 0.3  # nats, of one token: sums in another order, and an expert that rounding changes
START_OF_DRY_RUN_S = 280.0  # two processes that import torch on busy cores; a step has ten times its time then, too
DEEP_EP = DP2 | {"moe_a2a_backend": "deepep"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model") / "m", device, seed=5, dtype="float32")


@pytest.fixture(autouse=True)
def _two_devices(device: torch.device, on_cuda: bool) -> None:
    if on_cuda:
        need_gpus(device, 2)


def serve(folder: Path, device: torch.device, **settings: Any) -> ServerProcess:
    common = {"dtype": "float32", "max_total_tokens": 2048, "device": device.type, "weight_version": "v0"}
    start_s = START_S if device.type == "cuda" else START_OF_DRY_RUN_S
    return ServerProcess(folder, start_s=start_s, **common | settings)


def generated(server: ServerProcess) -> list[tuple[list[int], list[float]]]:
    body = {"input_ids": PROMPTS, "sampling_params": PARAMS, "return_logprob": True}
    answer = server.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [
        (one["output_ids"], [entry[0] for entry in one["meta_info"]["output_token_logprobs"]]) for one in answer.json()
    ]


@pytest.fixture(scope="module")
def alone(folder: Path, device: torch.device) -> list[tuple[list[int], list[float]]]:
    with serve(folder, device) as server:
        return generated(server)


def agrees(got: list[tuple[list[int], list[float]]], want: list[tuple[list[int], list[float]]]) -> bool:
    close = all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-4) for (_, a), (_, b) in zip(got, want))
    return [ids for ids, _ in got] == [ids for ids, _ in want] and close


@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tensor parallel", "data parallel attention"])
def test_two_ranks_answer_as_one(
    layout: dict[str, Any], folder: Path, device: torch.device, alone: list[tuple[list[int], list[float]]]
) -> None:
    with serve(folder, device, **layout) as server:
        assert agrees(generated(server), alone)


def test_two_ranks_with_deep_ep(folder: Path, device: torch.device) -> None:
    need_gpus(device, 2)
    need_module("deep_ep", "pip install sgl-deep-ep")
    with serve(folder, device, dtype="bfloat16") as server:  # DeepEP takes no other type
        want = generated(server)
    with serve(folder, device, dtype="bfloat16", **DEEP_EP) as server:
        got = generated(server)
    firsts = [(one[1][0], two[1][0]) for one, two in zip(got, want)]  # of the same prompts, whatever follows
    assert all(abs(one - two) < BFLOAT16_SLACK for one, two in firsts), firsts


def test_weights_from_another_device(folder: Path, device: torch.device, on_cuda: bool, tmp_path: Path) -> None:
    """The engine on the first device, the trainer on the second, a group of both."""
    new = {name: tensor * 1.25 for name, tensor in logical_tensors(folder).items()}
    backend, place = ("nccl", "cuda:1") if on_cuda else ("gloo", "cpu")
    with serve(folder, device) as server:
        trainer = TrainerProcess(new, tmp_path, backend=backend, device=place)
        try:
            assert server.http.post("/init_weights_update_group", json=trainer.join_fields()).status_code == 200
            server.client.begin_weight_update("v1")
            names = sorted(new)
            for part in (names[::2], names[1::2]):
                sent = server.http.post("/update_weights_from_distributed", json=trainer.send(part))
                assert sent.status_code == 200, sent.text
            server.client.end_weight_update()
        finally:
            trainer.close()
        expected = {name: fingerprint_hex(fingerprint(tensor)) for name, tensor in new.items()}
        assert server.client.weights_checker("checksum")["checksums"] == expected
        assert server.client.weight_version() == "v1"
