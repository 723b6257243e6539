"""The clock around operators sees all of them, and leaves the engine as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._ops import OpOverload

from benchmarks import python_per_step
from benchmarks.python_per_step import OperatorClock, measure, owners
from rollout.kernels.ops import Ops
from rollout.server.engine import Engine
from tests.model_zoo import tiny_checkpoint

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    torch.set_num_threads(1)
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m")
    engine = Engine(model_path=str(folder), dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048)
    yield engine
    engine.close()


def test_parts_of_a_step_add_up_to_its_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_per_step, "STEPS", 12)
    before = [vars(owner).copy() for owner in owners(engine)]
    cost = measure(engine, batch=3, prompt_tokens=5, vocab_size=engine.scheduler.runner.state.model.config.vocab_size)
    (tape, *_) = engine.scheduler.runner.recorded._tapes.values()
    assert cost.calls == len(tape.operators) + 2, "those of the tape, the head, the sampler"
    assert 0 < cost.operators_us < cost.turn_us
    assert 0 < cost.python_us < cost.turn_us
    assert sum(cost.phases_us.values()) < 1.2 * cost.turn_us
    assert cost.bound_us == 156.0
    for owner, attributes in zip(owners(engine), before, strict=True):
        held = [name for name, value in attributes.items() if isinstance(value, OpOverload | Ops) or name == "play"]
        assert held and all(getattr(owner, name) is attributes[name] for name in held)
    assert "tick" not in vars(engine.scheduler)


@pytest.mark.mutant
def test_operators_that_are_not_seen_are_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_per_step, "STEPS", 4)
    monkeypatch.setattr(python_per_step, "owners", lambda _: [])
    with pytest.raises(AssertionError, match="not seen"):
        measure(engine, batch=1, prompt_tokens=5, vocab_size=16)
    assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2, "ignore_eos": True})["output_ids"]


def test_the_clock_stops_outside_its_context(engine: Engine) -> None:
    clock = OperatorClock(owners(engine))
    request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    with clock.running():
        engine.generate(**request)
    seconds, calls = clock.take()
    assert seconds > 0 and calls > 0
    engine.generate(**request)
    assert clock.take() == (0.0, 0)
