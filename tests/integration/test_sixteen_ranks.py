"""An engine of sixteen processes that are four machines of four ranks: results, experts, a refresh, a lost rank.

The start of an engine takes some 90 seconds of CPU time: 5 for each rank, and 2 for each launch.  So one engine serves
nearly all of it, in a test of 160 seconds.  Deadlines are for two cores that other tests share.  The ranks have 2.6 GB
of memory together.
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

from tests.family_zoo import family_checkpoint, in_dtype
from tests.model_zoo import logical_tensors
from tests.server_process import ServerProcess, alive
from tests.tiny_tokenizer import write_tiny_tokenizer
from tests.trainer_process import TrainerProcess
from weight_sync.process_group import free_port

MACHINES, RANKS = 4, 16
EXPERTS, GROUPS = 32, 8  # groups of the router's experts
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
    """DeepSeek-V3: its router takes the best experts of the best groups, so a token's experts are in few groups."""
    sizes = {"n_routed_experts": EXPERTS, "n_group": GROUPS, "topk_group": 4}
    path = family_checkpoint(tmp_path_factory.mktemp("model") / "m", "deepseek_v3", 5, **sizes)
    write_tiny_tokenizer(path)
    return path


def serve(folder: Path, **settings: Any) -> ServerProcess:
    defaults = {"dtype": "float64", "enable_return_routed_experts": True, "max_total_tokens": 2048, "num_threads": 1}
    return ServerProcess(folder, start_s=START_S, **defaults | settings)


@pytest.fixture
def machines(request: pytest.FixtureRequest, folder: Path) -> Iterator[list[ServerProcess]]:
    """Four machines with the settings `LAYOUT`, some of which a test may replace."""
    nodes = LAYOUT | getattr(request, "param", {}) | {"nnodes": MACHINES, "dist_init_addr": f"127.0.0.1:{free_port()}"}
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


def map_of(server: ServerProcess) -> list[list[int]]:
    """Return the expert of each slot, a row a layer; slots lie machine by machine."""
    rows: list[list[int]] = server.http.get("/expert_location").json()["physical_to_logical_map"]
    return rows


def machines_of_groups(rows: list[list[int]]) -> set[int]:
    """Return the numbers of machines that hold a slot of a group of experts, for all layers and groups."""
    per_machine, per_group = len(rows[0]) // MACHINES, EXPERTS // GROUPS
    return {
        len({slot // per_machine for slot, expert in enumerate(row) if expert // per_group == group})
        for row in rows
        for group in range(GROUPS)
    }


def rebalance(server: ServerProcess, planner: str) -> None:
    """Move experts for the first time, by the planner of the settings; then each group is on one machine."""
    unaware = post(server, "/eplb_rebalance", algorithm="balanced", dry_run=True)["physical_to_logical_map"]
    assert max(machines_of_groups(unaware)) > 1, "a planner that knows no machines cannot be told apart"
    before = map_of(server)
    moved = post(server, "/eplb_rebalance")
    assert moved["decision"]["algorithm"] == planner and moved["placement_epoch"] == 1, moved
    assert machines_of_groups(map_of(server)) == {1}, "a group of experts has slots on two machines"
    assert map_of(server) != before


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
    tensors = {name: 1.25 * tensor for name, tensor in in_dtype(logical_tensors(folder), torch.float64).items()}

    with serve(folder) as alone:
        old = answers(alone)
        digest = refresh(alone, tensors, "v1", tmp_path, ranks=1)
        new = answers(alone)
    assert old != new

    assert answers(first) == old
    assert max(machines_of_groups(map_of(first))) > 1
    rebalance(first, "balanced_by_node")
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


@pytest.mark.full
@pytest.mark.parametrize(
    "machines", [{"eplb_algorithm": "deepseek_hierarchical", "ep_num_redundant_experts": 0}], indirect=True
)
def test_whole_groups_move_between_four_machines(machines: list[ServerProcess]) -> None:
    """There is a slot for each expert: with more, the plan mostly has an expert twice on a rank, and is refused."""
    first = machines[0]
    old, at_start = answers(first), map_of(first)
    rebalance(first, "deepseek_hierarchical")
    of_machine = EXPERTS // MACHINES
    for row, row_before in zip(map_of(first), at_start, strict=True):
        parts = [(row[i : i + of_machine], row_before[i : i + of_machine]) for i in range(0, EXPERTS, of_machine)]
        assert any(set(now) != set(before) for now, before in parts), "no group has moved to another machine"
    assert answers(first) == old
