"""Six trainer processes send their shards at once to two engines of two ranks, and one is killed at each point."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.model_zoo import tiny_checkpoint
from tests.server_process import ServerProcess

SETTINGS = {"dtype": "bfloat16", "tp_size": 2, "ep_size": 2, "max_total_tokens": 512, "num_threads": 1}
POINTS = ("before_begin", "in_bucket", "between_buckets", "before_end", "in_end")


def run_plays(folder: Path, plays: list[str], within_s: float) -> None:
    """Play on two fresh servers, which serve on after each play."""
    checkpoint = tiny_checkpoint(folder / "model", "moe_dense_first", dtype="bfloat16")
    with ExitStack() as stack:
        servers = [ServerProcess(checkpoint, **SETTINGS) for _ in range(2)]
        for server in servers:
            stack.enter_context(server)
        command = [sys.executable, "-m", "tests.shard_trainer", str(checkpoint), ",".join(plays)]
        done = subprocess.run(
            [*command, *(server.url for server in servers)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_six_ranks_send_at_once_and_one_is_killed_in_its_bucket(tmp_path: Path) -> None:
    run_plays(tmp_path, ["good", "good", "in_bucket:3", "good"], within_s=400.0)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1, 4])
def test_a_trainer_rank_is_killed_at_each_point(tmp_path: Path, victim: int) -> None:
    """After each point the engines take the next version."""
    plays = [play for point in POINTS for play in ("good", f"{point}:{victim}")]
    run_plays(tmp_path, [*plays, "good"], within_s=1200.0)
