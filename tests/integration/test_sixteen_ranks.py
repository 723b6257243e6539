"""An engine of sixteen processes that are four machines of four ranks: results, experts, a refresh, a lost rank.

It is one engine for all of it, as its start takes some 90 seconds of CPU time: 5 for each rank, and 2 for each launch.
The test takes 160 in all.  Deadlines are for two cores that other tests share.  The ranks have 2.6 GB of memory
together.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess, alive
from tests.trainer_process import TrainerProcess
from weight_sync.process_group import free_port

MACHINES, RANKS = 4, 16
EXPERTS = 32
START_S = 280.0  # less than the 300 s that ranks wait for one another
LOST_S = 60.0  # a broken connection is noticed at once; ranks end, and their launches after them
PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17]
PARAMS = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
LAYOUT = {
    "tp_size": RANKS,
    "ep_size": RANKS,
    "dp_size": 4,
    "enable_dp_attention": True,
    "moe_a2a_backend": "all_to_all",
    "ep_num_redundant_experts": 16,
    "enable_eplb": True,
    "eplb_algorithm": "balanced_by_node",
    "eplb_rebalance_num_iterations": 1_000_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5, experts=EXPERTS)


def serve(folder: Path, **settings: Any) -> ServerProcess:
    defaults = {"dtype": "float64", "enable_return_routed_experts": True, "max_total_tokens": 2048, "num_threads": 1}
    return ServerProcess(folder, start_s=START_S, **defaults | settings)


@pytest.fixture
def machines(folder: Path) -> Iterator[list[ServerProcess]]:
    nodes = LAYOUT | {"nnodes": MACHINES, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    servers = [serve(folder, **nodes, node_rank=machine) for machine in range(MACHINES)]
    try:
        servers[0].wait_ready()
        yield servers
    finally:
        for server in reversed(servers):
            server.close()


def post(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def answers(server: ServerProcess) -> list[tuple[Any, ...]]:
    """Return tokens, routes, and log-probabilities to 9 digits; sums over ranks may round the last digits otherwise."""
    asked = {"input_ids": PROMPTS, "sampling_params": PARAMS, "return_logprob": True, "return_routed_experts": True}
    replies: Any = post(server, "/generate", **asked)
    return [
        (
            reply["output_ids"],
            reply["meta_info"]["routed_experts"],
            [round(entry[0], 9) for entry in reply["meta_info"]["output_token_logprobs"]],
            reply["meta_info"]["weight_version"],
        )
        for reply in replies
    ]


def machines_of_experts(server: ServerProcess) -> list[set[int]]:
    """Return the machines that hold a slot of each expert, of all layers one after the other."""
    rows = server.http.get("/expert_location").json()["physical_to_logical_map"]
    per_machine = len(rows[0]) // MACHINES
    return [
        {slot // per_machine for slot, held in enumerate(row) if held == expert}
        for row in rows
        for expert in range(EXPERTS)
    ]


def refresh(server: ServerProcess, tensors: dict[str, torch.Tensor], version: str, folder: Path, ranks: int) -> str:
    """Broadcast all tensors from a trainer's process, and return the digest of the weights in force then."""
    trainer = TrainerProcess(tensors, folder, engine_ranks=ranks)
    try:
        trainer.wait_ready()
        post(server, "/init_weights_update_group", **trainer.join_fields())
        post(server, "/begin_weight_update", weight_version=version)
        post(server, "/update_weights_from_distributed", **trainer.send(sorted(tensors)))
        assert post(server, "/end_weight_update")["weight_version"] == version
    finally:
        trainer.close()
    digest: str = server.http.get("/model_info").json()["content_digest"]
    return digest


@pytest.mark.full
def test_four_machines_of_four_ranks_are_one_engine(
    folder: Path, tmp_path: Path, machines: list[ServerProcess]
) -> None:
    first = machines[0]
    pids = [pid for machine in machines for pid in machine.rank_pids()]
    assert len(set(pids)) == RANKS
    tensors = {name: tensor.double() * 1.25 for name, tensor in logical_tensors(folder).items()}

    with serve(folder) as alone:
        old = answers(alone)
        digest = refresh(alone, tensors, "v1", tmp_path, ranks=1)
        new = answers(alone)
    assert old != new

    assert answers(first) == old
    assert max(map(len, machines_of_experts(first))) > 1
    moved = post(first, "/eplb_rebalance")
    assert moved["decision"]["algorithm"] == "balanced_by_node" and moved["placement_epoch"] == 1, moved
    assert set(map(len, machines_of_experts(first))) == {1}, "an expert has slots on two machines"
    assert answers(first) == old

    assert refresh(first, tensors, "v1", tmp_path, ranks=RANKS) == digest
    assert answers(first) == new
    assert post(first, "/weights_checker", action="checksum")

    killed, start = 13, time.monotonic()
    os.kill(pids[killed], signal.SIGKILL)
    assert machines[killed // 4].wait_exit(LOST_S) == 1
    assert first.wait_exit(LOST_S) == 1
    assert all(machine.wait_exit(LOST_S) == 1 for machine in machines)
    assert time.monotonic() - start < LOST_S
    assert not any(alive(pid) for pid in pids)
    assert f"rank {killed}" in (said := machines[killed // 4].stderr()) and "SIGKILL" in said, said
    assert "a rank is lost" in (said := first.stderr()), said
