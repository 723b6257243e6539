"""A forward played from its tape has the bits of the model in Python, for every batch.

A forward whose operators depend on the batch is never played.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.expert_location import ExpertLocationMetadata
from eplb.placement import ExpertPlacement
from rollout.executor.recorded_forward import RecordedForward, Recording, Tape
from rollout.model.decoder import DecoderForCausalLM
from tests.family_zoo import FAMILIES, family_checkpoint
from tests.forward_harness import ForwardHarness
from tests.kernels import native_ops
from tests.model_zoo import load_tiny
from tests.tiers import examples

Step = tuple[dict[int, list[int]], dict[int, int]]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderForCausalLM:
    folder = family_checkpoint(tmp_path_factory.mktemp("family") / "model", request.param, 0)
    return load_tiny(folder, torch.bfloat16, ops=native_ops())


class Player:
    """A player that runs the steps of a harness by a forward, and keeps hidden states and routes."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        self.harness = ForwardHarness(model, backend="native_cpu")
        self.recorded = RecordedForward(model)
        self.model = model
        self.played = 0

    @torch.inference_mode()
    def step(self, step: Step, forced: bool = False, in_python: bool = False) -> list[torch.Tensor]:
        batch = self.harness.batch(*step)
        layers, top_k = len(self.model.moe_layer_ids), self.model.config.num_experts_per_tok
        if forced and layers:
            rows = torch.stack([(torch.arange(top_k) + t) % 5 for t in range(batch.num_tokens)])
            batch.forced_routes = rows.expand(layers, -1, -1).contiguous()
        routes = [torch.zeros(batch.num_tokens, top_k, dtype=torch.uint8) for _ in range(layers)]
        self.harness.attention.plan(batch)
        hooks = [lambda layer, ids: routes[layer].copy_(ids)]
        context = self.harness.context(batch, hooks)
        if in_python:
            return [self.model(batch, context), *routes]
        hidden, played = self.recorded(batch, context, "key", routes)
        self.played += played
        return [hidden, *routes]


def _steps(sizes: list[list[int]], decodes: list[int]) -> list[Step]:
    steps: list[Step] = []
    for number, counts in enumerate(sizes):
        extends = {r: [(7 * number + 3 * i + r) % 320 for i in range(n)] for r, n in enumerate(counts) if n}
        decoding = {r: (11 * number + r) % 320 for r in range(decodes[number]) if number and r not in extends}
        steps.append((extends, decoding) if extends or decoding else ({0: [1, 2]}, {}))
    return steps


SIZES = st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=3, max_size=7)


@settings(max_examples=examples(60), deadline=None)
@given(sizes=SIZES, decodes=st.lists(st.integers(0, 4), min_size=7, max_size=7), forced=st.booleans())
def test_a_played_forward_has_the_bits_of_the_model(
    model: DecoderForCausalLM, sizes: list[list[int]], decodes: list[int], forced: bool
) -> None:
    player, python = Player(model), Player(model)
    for step in [({4: [1, 2, 3]}, {}), ({4: [5]}, {}), *_steps(sizes, decodes)]:
        got, want = player.step(step, forced), python.step(step, forced, in_python=True)
        assert all(map(torch.equal, got, want))
    assert player.played >= len(sizes) - 1, "the third step of another size than one before is played"
    for mine, theirs in zip(player.harness.pool.k, python.harness.pool.k, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def _counts_tokens(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.view(hidden.shape[0], 2, -1).flatten(1)


def _branches(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 2 if hidden.shape[0] % 2 else hidden


def _joins(hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden[:, :1], hidden[:, 1:]], dim=1)


def _reads_back(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * float(hidden.shape[0])


@pytest.mark.parametrize("change", [_counts_tokens, _branches, _joins, _reads_back])
def test_what_is_not_the_same_for_every_batch_is_never_played(
    model: DecoderForCausalLM, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = type(model.model.norm)
    inner: Any = norm.__call__

    def call(self: Any, *args: Any) -> torch.Tensor:
        out = inner(self, *args)
        return change(out) if self is model.model.norm else out

    monkeypatch.setattr(norm, "__call__", call)
    player, python = Player(model), Player(model)
    for tokens in (3, 2, 5, 4, 3):
        step: Step = ({0: list(range(tokens))}, {})
        assert all(map(torch.equal, player.step(step), python.step(step, in_python=True)))
    assert player.played == 0


def test_another_placement_is_another_tape(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "model", "qwen3_moe", 0)
    rows = [torch.randperm(8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    placement = ExpertPlacement(ExpertLocationMetadata(torch.stack(rows), 8))
    moved, plain = (load_tiny(folder, torch.float32, placement=p, ops=native_ops()) for p in (placement, None))
    one, two = Player(moved), Player(plain)
    for tokens in (3, 2, 5, 4):
        step: Step = ({0: list(range(tokens))}, {})
        assert all(map(torch.equal, one.step(step), two.step(step)))
    assert one.played == two.played == 2


def test_a_clocked_tape_plays_the_same_and_times_every_operator(model: DecoderForCausalLM) -> None:
    clocked, plain = Player(model), Player(model)
    seen = []

    def play(tape: Tape, inputs: list[torch.Tensor]) -> torch.Tensor:
        result, nanoseconds = tape.play_clocked(inputs)
        assert len(nanoseconds) == len(tape.operators) and min(nanoseconds) > 0
        seen.append(len(nanoseconds))
        return result

    clocked.recorded.play = play
    for tokens in (3, 2, 5, 4):
        step: Step = ({0: list(range(tokens))}, {})
        assert all(map(torch.equal, clocked.step(step), plain.step(step)))
    assert len(seen) == plain.played == 2


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["inputs swapped", "a constant kept"])
def test_a_wrong_tape_is_noticed(model: DecoderForCausalLM, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Recording.tape
    kept: list[torch.Tensor] = []

    class WrongTape:
        def __init__(self, tape: Any) -> None:
            self._tape = tape

        def play(self, inputs: list[torch.Tensor]) -> torch.Tensor:
            if wrong == "inputs swapped":
                return self._tape.play([inputs[1], inputs[0], *inputs[2:]])
            kept.append(inputs[1])
            return self._tape.play([inputs[0], kept[0][:1].expand_as(inputs[1]).contiguous(), *inputs[2:]])

    monkeypatch.setattr(Recording, "tape", lambda self, count: WrongTape(inner(self, count)))
    player, python = Player(model), Player(model)
    found = []
    for tokens in (3, 2, 5, 4):
        step: Step = ({0: [9 * t % 320 for t in range(tokens)]}, {})
        found.append(torch.equal(player.step(step)[0], python.step(step, in_python=True)[0]))
    assert player.played and not all(found)


_FIRST_REQUEST = """
import sys
from rollout.server.engine import Engine
engine = Engine(model_path=sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_total_tokens=64)
engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
assert engine.scheduler.runner.recorded._tapes, "recorded"
sys.exit("torch._dynamo" in sys.modules)
"""


def test_recording_does_not_wait_for_torchs_compiler(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "model", "llama", 0)
    run = subprocess.run([sys.executable, "-c", _FIRST_REQUEST, str(folder)], capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()[-2000:] or "torch._dynamo was imported"
