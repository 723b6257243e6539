"""Two real trainer ranks with sharded tensors, and real engines: the scenarios of `tests/sharded_trainer.py`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess
from tests.sharded_trainer import run_ranks


@pytest.mark.parametrize("scenarios", ["random_gathers,refusals", "fsdp_refresh,engine_refuses,other_rank_fails"])
def test_two_trainer_ranks(scenarios: str) -> None:
    run_ranks(scenarios)


def test_a_trainer_rank_that_dies() -> None:
    run_ranks("other_rank_dies", exits=(0, 7))


def test_fsdp_model_to_two_servers(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", dtype="bfloat16")
    with ExitStack() as stack:
        servers = [ServerProcess(checkpoint, dtype="bfloat16", max_total_tokens=512) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
        run_ranks("serve", str(checkpoint), *(server.url for server in servers))
