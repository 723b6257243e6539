"""slime, which is not on PyPI: what its engine, rollout and weight updaters were recorded to send, and their checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.framework import Framework
from tests.model_zoo import tiny_checkpoint
from tests.replay import Replay, steps
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

FRAMEWORK = Framework(
    name="slime",
    packages=("recorded at 624b824",),
    flags={
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": True,
        "enable_return_routed_experts": True,
        "return_routed_experts_by_default": True,
    },
    not_there=("rollout_top_p other than 1", "post_process_weights"),
)
STEPS = steps("slime")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    folder = tmp_path_factory.mktemp("replay")
    checkpoint = tiny_checkpoint(folder / "model", layers=4, top_k=2, vocab_size=512, context_length=4096)
    with ServerProcess(checkpoint, max_total_tokens=16384, **FRAMEWORK.flags) as server:
        running = Replay(server, checkpoint, folder)
        yield running
        running.close()


@pytest.mark.parametrize("step", list(STEPS))
def test_replay(replay: Replay, step: str) -> None:
    replay.play(STEPS[step])
