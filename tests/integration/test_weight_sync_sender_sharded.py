"""Real trainer ranks with sharded tensors, and real engines: the scenarios of `tests/sharded_trainer.py`, on two ranks,
and of `tests/fsdp_tp_trainer.py`, on four.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.client import ServerError
from tests.family_zoo import family_checkpoint
from tests.model_zoo import logical_tensors, tiny_checkpoint
from tests.server_process import ServerProcess
from tests.sharded_trainer import run_ranks
from weight_sync.sender import EngineError, WeightSender

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "scenarios",
    [
        "random_gathers,refusals,group_of_whole_tensors",
        "fsdp_refresh,engine_refuses,other_rank_fails",
        "shared_group_loses_an_engine",
    ],
)
def test_two_trainer_ranks_refresh_and_fail_together(scenarios: str) -> None:
    run_ranks(scenarios)


@pytest.mark.gate
def test_plans_of_shards_are_replayed_until_their_form_changes() -> None:
    run_ranks("replays")


@pytest.mark.gate
def test_fsdp_with_tensor_parallelism_on_four_ranks() -> None:
    run_ranks("wrong_variants,other_meshes,refresh_and_train", exits=(0,) * 4, module="tests.fsdp_tp_trainer")


@pytest.mark.gate
def test_trainer_ranks_that_disagree_are_refused_before_begin_and_live_on_d2() -> None:
    """D2: ranks whose plans or arguments differ are refused; 0e5f155 lost a trainer process to SIGABRT."""
    run_ranks("plans_that_differ")


def test_a_trainer_rank_that_dies() -> None:
    run_ranks("other_rank_dies", exits=(0, 7))


def test_fsdp_model_to_two_servers_then_one_is_killed(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype="bfloat16")
    with ExitStack() as stack:
        servers = [ServerProcess(checkpoint, dtype="bfloat16", max_total_tokens=512) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
        run_ranks("serve", str(checkpoint), *(server.url for server in servers))
        check_that_a_killed_server_changes_nothing(checkpoint, *servers)


def test_fsdp_model_with_interleaved_experts_to_a_server(tmp_path: Path) -> None:
    checkpoint = family_checkpoint(tmp_path / "model", "gpt_oss", 0, torch.bfloat16)
    settings = {"max_total_tokens": 512, "skip_tokenizer_init": True, "attention_backend": "torch_native"}
    with ServerProcess(checkpoint, dtype="bfloat16", **settings) as server:
        run_ranks("serve", str(checkpoint), server.url)


def check_that_a_killed_server_changes_nothing(checkpoint: Path, kept: ServerProcess, killed: ServerProcess) -> None:
    """Kill one of two servers when both have verified.

    Check that the other keeps its weights, and takes the next ones alone.
    """

    class Dying:
        def __getattr__(self, verb: str) -> Callable[..., Any]:
            def call(**arguments: Any) -> Any:
                reply = getattr(killed.client, verb)(**arguments)
                if arguments.get("phase") == "verify":
                    killed.process.kill()
                    raise ConnectionError("killed")
                return reply

            return call

    before = kept.client.weights_checker()["per_engine_checksum"]
    tensors = {name: tensor.bfloat16() for name, tensor in logical_tensors(checkpoint).items()}
    sender = WeightSender({"kept": kept.client, "killed": Dying()}, timeout_s=30.0, on_engine_failure="abort_all")
    sender.connect()
    with pytest.raises(EngineError, match="engine killed: "):
        sender.refresh(tensors, "step-2", bucket_bytes=64 << 10)
    assert kept.client.weight_version() == "step-1"
    assert kept.client.weights_checker()["per_engine_checksum"] == before
    with pytest.raises(ServerError, match="no weight update is open"):
        kept.client.end_weight_update("commit")
    sender = WeightSender(kept.client, timeout_s=30.0)
    sender.connect(group_name="alone")
    report = sender.refresh(tensors, "step-3")
    assert kept.client.weight_version() == "step-3"
    assert kept.client.weights_checker()["per_engine_checksum"] == report.digest != before
    sender.close()
