"""NeMo-RL, whose package on PyPI is empty: what its worker was recorded to send, and what it checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.framework import Framework
from tests.model_zoo import tiny_checkpoint
from tests.replay import Replay, steps
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

FRAMEWORK = Framework(
    name="NeMo-RL",
    packages=("recorded at 7ea279a",),
    flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True},
    not_there=("an engine that runs already: its worker starts one, see the launcher",),
)
STEPS = steps("nemo_rl")


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
