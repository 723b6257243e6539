"""Frameworks that are not on PyPI: the calls that their clients were recorded to make, and checks of the answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.framework import Framework
from tests.model_zoo import tiny_checkpoint
from tests.replay import Replay, steps
from tests.server_process import ServerProcess

pytestmark = pytest.mark.full

FRAMEWORKS = {
    "nemo_rl": Framework(
        name="NeMo-RL",
        packages=("recorded at 7ea279a",),
        flags={"enable_memory_saver": True, "enable_weights_cpu_backup": True},
        not_there=("an engine that runs already: its worker starts one, see the launcher",),
    ),
    "prime_rl": Framework(
        name="prime-rl, admin client",
        packages=("recorded at 559b447",),
        flags={"enable_return_routed_experts": True, "vllm_routed_experts": "dict"},
        not_there=("/init_broadcaster (NCCL)", "LoRA"),
    ),
    "miles_adapters": Framework(
        name="miles, adapters",
        packages=("recorded at 02a214e, 03ab6d7",),
        flags={"enable_lora": True},
        not_there=("names NAME@N",),
    ),
    "slime": Framework(
        name="slime",
        packages=("recorded at 624b824",),
        flags={
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            "enable_return_routed_experts": True,
            "return_routed_experts_by_default": True,
        },
        not_there=("rollout_top_p other than 1", "post_process_weights"),
    ),
}
STEPS = {(recording, step): lines for recording in FRAMEWORKS for step, lines in steps(recording).items()}


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


@pytest.fixture(scope="module")
def replay(framework: Framework, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    folder = tmp_path_factory.mktemp("replay")
    checkpoint = tiny_checkpoint(folder / "model", layers=4, top_k=2, vocab_size=512, context_length=4096)
    with ServerProcess(checkpoint, max_total_tokens=16384, **framework.flags) as server:
        running = Replay(server, checkpoint, folder)
        yield running
        running.close()


@pytest.mark.parametrize(
    ("framework", "step"), list(STEPS), indirect=["framework"], ids=[f"{name}-{step}" for name, step in STEPS]
)
def test_a_recorded_step_gets_the_expected_answers(replay: Replay, request: pytest.FixtureRequest, step: str) -> None:
    replay.play(STEPS[request.node.callspec.params["framework"], step])
