"""Servers of several ranks as processes: results, refreshes, replicas, two machines, and a rank that dies."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess, alive
from tests.trainer_process import TrainerProcess
from weight_sync.process_group import free_port
from weight_sync.sender import EngineError, WeightSender

PROMPTS = [[7, 3, 9], list(range(20, 60)), [5], [4] * 17]
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
TP2 = {"tp_size": 2, "ep_size": 2}
DP2 = TP2 | {"dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "all_to_all"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", "moe_dense_first", seed=5)


def serve(folder: Path, **settings: Any) -> ServerProcess:
    defaults = {"dtype": "float64", "enable_return_routed_experts": True, "max_total_tokens": 2048, "num_threads": 1}
    return ServerProcess(folder, **defaults | settings)


def generate(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    body = {"input_ids": PROMPTS, "sampling_params": PARAMS, "return_logprob": True} | body
    response = server.http.post("/generate", json=body | {"return_routed_experts": True})
    assert response.status_code == 200, response.text
    return response.json()


def facts(reply: dict[str, Any]) -> tuple[Any, ...]:
    """Return tokens, routes, and log-probabilities to 9 digits; sums over ranks may round the last digits otherwise."""
    meta = reply["meta_info"]
    logprobs = [round(entry[0], 9) for entry in meta["output_token_logprobs"]]
    return reply["output_ids"], meta["routed_experts"], logprobs


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Any]]:
    """Return the facts of one rank before a refresh, under "old"."""
    with serve(folder) as server:
        return {"old": [facts(reply) for reply in generate(server)]}


def new_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.double() * 1.25 for name, tensor in logical_tensors(folder).items()}


@pytest.mark.full
def test_groups_whose_model_drafts_answer_as_one_rank_does(folder: Path, expected: dict) -> None:
    """The draft is the served model, whose experts both groups compute together."""
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folder)}
    with serve(folder, **DP2, **draft) as server:
        assert [facts(reply) for reply in generate(server)] == expected["old"]
        long = PARAMS | {"max_new_tokens": 200}
        (reply,) = generate(server, input_ids=PROMPTS[:1], sampling_params=long)
        assert reply["output_ids"][:8] == expected["old"][0][0]
        metrics = server.http.get("/metrics").text
        assert re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} [1-9]", metrics, re.MULTILINE)


@pytest.mark.full(but="tp2")
@pytest.mark.parametrize(
    "settings",
    [TP2, DP2, DP2 | {"disable_overlap_schedule": False}],
    ids=["tp2", "dp2", "dp2_overlap"],
)
def test_ranks_answer_as_one_rank_before_and_after_a_refresh(
    folder: Path, expected: dict, tmp_path: Path, settings: dict[str, Any]
) -> None:
    tensors = new_tensors(folder)
    with serve(folder, **settings) as server:
        assert [facts(reply) for reply in generate(server)] == expected["old"]
        trainer = TrainerProcess(tensors, tmp_path, engine_ranks=2)
        try:
            assert server.http.post("/init_weights_update_group", json=trainer.join_fields()).status_code == 200
            assert server.http.post("/begin_weight_update", json={"weight_version": "v1"}).status_code == 200
            names = sorted(tensors)
            for part in (names[::2], names[1::2]):
                fields = trainer.send(part)
                assert server.http.post("/update_weights_from_distributed", json=fields).status_code == 200
            ended = server.http.post("/end_weight_update", json={})
            assert ended.status_code == 200 and ended.json()["weight_version"] == "v1", ended.text
        finally:
            trainer.close()
        after = generate(server)
        name = "model.layers.1.mlp.experts.3.down_proj.weight"
        read = server.http.post("/get_weights_by_name", json={"name": name, "truncate_size": 3}).json()
        digest = server.http.get("/model_info").json()["content_digest"]
    with serve(folder) as alone:
        path = tmp_path / "v1"
        _checkpoint(folder, path, tensors)
        body = {"model_path": str(path), "weight_version": "v1"}
        assert alone.http.post("/update_weights_from_disk", json=body).status_code == 200
        assert [facts(reply) for reply in after] == [facts(reply) for reply in generate(alone)]
        assert alone.http.post("/get_weights_by_name", json={"name": name, "truncate_size": 3}).json() == read
        assert alone.http.get("/model_info").json()["content_digest"] == digest
    assert all(reply["meta_info"]["weight_version"] == "v1" for reply in after)


def _checkpoint(folder: Path, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            (path / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


@pytest.mark.full
def test_a_bucket_that_one_rank_cannot_take_changes_nothing(folder: Path, expected: dict, tmp_path: Path) -> None:
    tensors = new_tensors(folder)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    with serve(folder, **TP2) as server:
        trainer = TrainerProcess(tensors, tmp_path, engine_ranks=2)
        try:
            assert server.http.post("/init_weights_update_group", json=trainer.join_fields()).status_code == 200
            assert server.http.post("/begin_weight_update", json={"weight_version": "v1"}).status_code == 200
            fields = trainer.send(sorted(tensors))
            refused = server.http.post("/update_weights_from_distributed", json=fields)
            assert refused.status_code == 400 and "model.norm.weight" in refused.text
            assert server.http.post("/end_weight_update", json={}).status_code == 409
        finally:
            trainer.close()
        assert [facts(reply) for reply in generate(server)] == expected["old"]


@pytest.mark.full
def test_the_sender_refreshes_all_ranks_and_a_placement_is_adopted(folder: Path) -> None:
    tensors = new_tensors(folder)
    with serve(folder, **TP2, ep_num_redundant_experts=4, enable_eplb=True) as server:
        before = generate(server)
        location = server.http.get("/expert_location").json()
        sender = WeightSender(server.client, timeout_s=30.0)
        sender.connect()
        try:
            sender.refresh(tensors, "v1")
        finally:
            sender.close()
        after, adopted = generate(server), server.http.get("/expert_location").json()
        assert (location["placement_epoch"], adopted["placement_epoch"]) == (0, 1)
        assert adopted["physical_to_logical_map"] != location["physical_to_logical_map"]
        assert [facts(reply) for reply in after] != [facts(reply) for reply in before]
        answer = server.http.post("/eplb_rebalance", json={"dry_run": True})
        assert answer.status_code == 200 and "decision" in answer.json(), answer.text
        moved = server.http.post(
            "/eplb_rebalance", json={"physical_to_logical_map": location["physical_to_logical_map"]}
        )
        assert moved.status_code == 200 and moved.json()["placement_epoch"] == 2, moved.text
        assert [facts(reply)[:2] for reply in generate(server)] == [facts(reply)[:2] for reply in after]
        assert server.http.get("/health_generate").status_code == 200


@pytest.mark.full
def test_one_sender_refreshes_servers_of_one_and_of_two_ranks_together(folder: Path) -> None:
    """N23: the sender asks each engine for its ranks."""
    tensors = new_tensors(folder)
    with serve(folder) as alone, serve(folder, **TP2) as pair, serve(folder, **DP2) as replicas:
        servers = {"alone": alone, "pair": pair, "replicas": replicas}
        sender = WeightSender({name: server.client for name, server in servers.items()}, timeout_s=30.0)
        sender.connect()
        report = sender.refresh(tensors, "v1")
        sender.close()
        assert [engine.committed for engine in report.engines.values()] == [True, True, True]
        assert {engine.transport for engine in report.engines.values()} == {"shared memory"}
        answers = [[facts(reply) for reply in generate(server)] for server in servers.values()]
        assert answers[0] == answers[1] == answers[2]
        sender = WeightSender({"pair": pair.client}, timeout_s=30.0)
        with pytest.raises(EngineError, match="engine_world_size is 1, but the engine has 2 ranks"):
            sender.connect(engine_world_size=1)


@pytest.mark.full(but="1")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_server_down_with_the_reason(folder: Path, victim: int) -> None:
    server = serve(folder, **TP2)
    try:
        server.wait_ready()
        pids = server.rank_pids()
        assert len(pids) == 2
        os.kill(pids[victim], signal.SIGKILL)
        assert server.wait_exit(15) == 1
        said = server.stderr()
        assert f"rank {victim}" in said and "SIGKILL" in said, said
        assert not any(alive(pid) for pid in pids) and server.leftovers() == []
    finally:
        server.close()


@pytest.mark.full
@pytest.mark.parametrize("ready", [True, False])
def test_ranks_end_with_their_server(folder: Path, ready: bool) -> None:
    """Ranks end with a killed server, also while they still wait for each other."""
    server = serve(folder, **TP2)
    try:
        if ready:
            server.wait_ready()
        deadline = time.monotonic() + 20
        while len(pids := server.rank_pids()) < 2:
            assert time.monotonic() < deadline
        server.process.kill()
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline + 20, "a rank outlived its server"
            time.sleep(0.05)
    finally:
        server.close()


@pytest.mark.full
def test_a_signal_ends_all_ranks_in_order(folder: Path) -> None:
    server = serve(folder, **DP2)
    try:
        server.wait_ready()
        pids = server.rank_pids()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit() == 0
        assert not any(alive(pid) for pid in pids) and server.leftovers() == []
    finally:
        server.close()


@pytest.mark.full
def test_replicas_share_the_requests_and_the_refresh(folder: Path, expected: dict, tmp_path: Path) -> None:
    tensors = new_tensors(folder)
    with serve(folder, dp_size=2, session_pin_fraction=0.5) as server:
        replies = generate(server)
        assert [facts(reply) for reply in replies] == expected["old"]
        assert {reply["meta_info"]["dp_rank"] for reply in replies} == {0, 1}
        (asked,) = generate(server, input_ids=PROMPTS[:1], routed_dp_rank=1)
        assert asked["meta_info"]["dp_rank"] == 1 and facts(asked) == expected["old"][0]
        body = {"input_ids": [1], "sampling_params": PARAMS, "routed_dp_rank": 2}
        refused = server.http.post("/generate", json=body)
        assert refused.status_code == 400 and "routed_dp_rank" in refused.text
        _check_session_on_both_ranks(server)
        assert [load["dp_rank"] for load in server.http.get("/get_load").json()] == [0, 1]
        path = tmp_path / "v1"
        _checkpoint(folder, path, tensors)
        body = {"model_path": str(path), "weight_version": "v1"}
        assert server.http.post("/update_weights_from_disk", json=body).status_code == 200
        new = [generate(server, input_ids=PROMPTS[:1], routed_dp_rank=rank)[0] for rank in (0, 1)]
        assert facts(new[0]) == facts(new[1]) != expected["old"][0]
        assert [reply["meta_info"]["weight_version"] for reply in new] == ["v1", "v1"]


def _check_session_on_both_ranks(server: ServerProcess) -> None:
    body = {"input_ids": PROMPTS[1], "sampling_params": PARAMS}
    kept = len(PROMPTS[1]) + 7  # the last token has no KV
    for rank in (1, 0):
        headers = {"X-Session-ID": "agent", "X-data-parallel-rank": str(rank)}
        meta = server.http.post("/generate", json=body, headers=headers).json()["meta_info"]
        assert (meta["dp_rank"], meta["session_id"]) == (rank, "agent")
        for _ in range(10):  # any rank may answer first: each rank's numbers are its own
            loads = server.http.get("/v1/loads").json()["loads"]
            assert [load["num_used_tokens"] for load in loads] == ([0, kept] if rank else [kept, kept])
    report = server.http.get("/sessions/agent").json()
    assert (report["num_finished"], report["dp_rank"], report["pinned_tokens"]) == (2, 0, 2 * kept)
    finished = server.http.post("/finish_session", params={"session_id": "agent"})
    assert finished.json()["num_released_tokens"] == 2 * kept


@pytest.mark.full
@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tp2", "dp2"])
def test_two_launches_make_one_engine(folder: Path, expected: dict, layout: dict[str, Any]) -> None:
    nodes = layout | {"nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    second = serve(folder, **nodes, node_rank=1)
    first = serve(folder, **nodes, node_rank=0)
    try:
        first.wait_ready()
        assert [facts(reply) for reply in generate(first)] == expected["old"]
        assert len(first.rank_pids()) == len(second.rank_pids()) == 1
        first.process.send_signal(signal.SIGTERM)
        assert first.wait_exit() == 0
        assert second.wait_exit() == 0
    finally:
        second.close()
        first.close()


@pytest.mark.full
def test_a_machine_that_is_lost_ends_the_other(folder: Path) -> None:
    nodes = TP2 | {"nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    second = serve(folder, **nodes, node_rank=1)
    first = serve(folder, **nodes, node_rank=0)
    try:
        first.wait_ready()
        second.process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert second.wait_exit(15) == 1
        assert first.wait_exit(15) == 1 and time.monotonic() - start < 15
        assert "a rank is lost" in first.stderr()
    finally:
        second.close()
        first.close()
