"""Sixteen adapters and none in one batch: each token has the bits that it has alone, in every schedule.

Adapters have ranks from 1 to 64, for attention, latent attention, dense layers, shared experts and routed experts.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.layers.lora import LoraSlots
from rollout.layers.moe.experts import Experts
from tests.adapters import ATTENTION, DENSE, MIXED_RANKS, mixed_adapters
from tests.family_zoo import family_checkpoint
from tests.invariance import Ask, Facts, Server, any_differs, assert_same
from tests.kernels import native_ops
from tests.late_loop import loop  # noqa: F401

SEED, VOCABULARY = 3, 320
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
# Endings of names: dense layers and experts have the same three, so that the last choice is everything.
TARGETS: dict[str, Sequence[Sequence[str]]] = {
    "qwen3_moe": [ATTENTION, DENSE, ("q_proj", "experts.3.down_proj"), (*ATTENTION, *DENSE)],
    "deepseek_v3": [LATENT, ("shared_experts.down_proj",), DENSE, (*LATENT, *DENSE)],
}
CASES = [
    ("deepseek_v3", "bfloat16"),
    *[
        pytest.param(*case, marks=pytest.mark.full)
        for case in (("deepseek_v3", "float32"), ("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32"))
    ],
]


@dataclass(frozen=True)
class Schedule:
    """The arrival of requests, and an engine's settings."""

    settings: dict[str, Any]
    gaps: tuple[int, ...] = ()
    pause: str | None = None  # this mode, in the middle
    twice: bool = False  # a second time, when prefixes are cached
    tight: bool = False  # a pool for hardly more than the longest request
    order_seed: int = 1


SCHEDULES = (
    Schedule({"chunked_prefill_size": 7}, gaps=(0, 2, 1), pause="in_place"),
    Schedule({"chunked_prefill_size": 3}, pause="retract", twice=True),
    Schedule({"max_running_requests": 5}, gaps=(1, 4), tight=True, order_seed=2),
)
ANY = st.builds(
    Schedule,
    st.fixed_dictionaries(
        {
            "chunked_prefill_size": st.sampled_from([1, 2, 3, 7, 64, -1]),
            "disable_radix_cache": st.booleans(),
            "max_running_requests": st.sampled_from([2, 5, 256]),
        }
    ),
    gaps=st.lists(st.integers(0, 4), max_size=8).map(tuple),
    pause=st.sampled_from([None, "in_place", "retract"]),
    twice=st.booleans(),
    tight=st.booleans(),
    order_seed=st.integers(0, 99),
)


class Mixed:
    """A model, its adapters, requests for all of them and for none, and what each is answered alone."""

    def __init__(self, folder: Path, family: str, dtype: str) -> None:
        native_ops()
        self.dtype = dtype
        self.checkpoint = family_checkpoint(folder / "model", family, SEED)
        self.adapters = mixed_adapters(self.checkpoint, folder, TARGETS[family])
        self.batch = _asks([None, *self.adapters, None, "a15", "a2"])
        self.want = self.server(disable_radix_cache=True).alone(self.batch)

    def server(self, **given: Any) -> Server:
        paths = ",".join(f"{name}={path}" for name, path in self.adapters.items())
        slots = {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": len(MIXED_RANKS)}
        return Server(self.checkpoint, self.dtype, **slots | given)

    def served(self, schedule: Schedule) -> list[Facts]:
        """Return what the requests are answered in a schedule, in the order of `batch`."""
        pool = {"max_total_tokens": max(ask.length for ask in self.batch) + 9} if schedule.tight else {}
        server = self.server(**pool | schedule.settings)
        order = random.Random(schedule.order_seed).sample(range(len(self.batch)), len(self.batch))
        for _ in range(1 + schedule.twice):
            facts = _arrive(server, [self.batch[index] for index in order], schedule)
        return [facts[order.index(index)] for index in range(len(self.batch))]


def _asks(names: Sequence[str | None]) -> list[Ask]:
    """Draw a prompt for each name, with a prefix that all share; two of three requests sample."""
    rng = random.Random(SEED)
    shared, asked = tuple(rng.randrange(5, VOCABULARY) for _ in range(12)), []
    for number, name in enumerate(names):
        own = tuple(rng.randrange(5, VOCABULARY) for _ in range(rng.randint(1, 24)))
        params: dict[str, Any] = {"max_new_tokens": rng.randint(2, 6), "temperature": 0.0}
        if number % 3:
            params |= {"temperature": 1.0, "sampling_seed": rng.randrange(2**63)}
        asked.append(Ask((*shared, *own), params, name))
    return asked


def _arrive(server: Server, batch: Sequence[Ask], schedule: Schedule) -> list[Facts]:
    harness, rids = server.harness, []
    for number, ask in enumerate(batch):
        rids.append(server.submit(ask))
        for _ in range(schedule.gaps[number] if number < len(schedule.gaps) else 0):
            harness.tick()
    if schedule.pause is not None:
        for _ in range(3):
            harness.tick()
        assert harness.control(PauseGenerationReqInput, mode=schedule.pause).success
        assert harness.control(ContinueGenerationReqInput).success
    harness.run()
    harness.check_idle()
    return server.facts(rids)


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Mixed]:
    return functools.cache(lambda *case: Mixed(tmp_path_factory.mktemp("mixed"), *case))


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_sixteen_adapters_and_none_in_chosen_schedules(of: Callable[..., Mixed], family: str, dtype: str) -> None:
    mixed, served = of(family, dtype), list[Facts]()
    for schedule in SCHEDULES:
        got = mixed.served(schedule)
        assert_same(got, mixed.want)
        served += got
    assert any(each.retractions for each in served) and any(each.cached_tokens for each in served)
    assert_same(mixed.server().rescored(mixed.batch[::3], mixed.want[::3]), mixed.want[::3])
    assert len({facts.vocabulary[0].tobytes() for facts in mixed.want}) == len(mixed.want)


@pytest.mark.full
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_sixteen_adapters_and_none_in_any_schedule(of: Callable[..., Mixed], family: str, dtype: str) -> None:
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(ANY)
    def check(schedule: Schedule) -> None:
        mixed = of(family, dtype)
        assert_same(mixed.served(schedule), mixed.want)

    check()


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_requests_without_an_adapter_have_the_bits_of_a_server_without(
    of: Callable[..., Mixed], family: str, dtype: str
) -> None:
    mixed = of(family, dtype)
    without = [index for index, ask in enumerate(mixed.batch) if ask.adapter is None]
    plain = Server(mixed.checkpoint, dtype, disable_radix_cache=True)
    assert_same(plain.alone([mixed.batch[index] for index in without]), [mixed.want[index] for index in without])


# --- engines that break the promise ---------------------------------------------------------------------------------


def in_two_sums(patch: pytest.MonkeyPatch) -> None:
    """Add up the features of more than four rows in two sums, as a kernel for large batches may."""
    right = LoraSlots.add

    def add(self: LoraSlots, out: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] <= 4:
            return right(self, out, hidden, slots)
        first = hidden.clone()
        first[:, hidden.shape[1] // 2 :] = 0
        return right(self, right(self, out, first, slots), hidden - first, slots)

    patch.setattr(LoraSlots, "add", add)


def _shifted(slots: torch.Tensor) -> torch.Tensor:
    """Return the slots of a batch with several, each one too far."""
    several = slots[slots >= 0].unique().numel() > 1
    return torch.where(slots >= 0, (slots + 1) % len(MIXED_RANKS), slots) if several else slots


def one_slot_too_far(patch: pytest.MonkeyPatch) -> None:
    right = LoraSlots.add
    patch.setattr(LoraSlots, "add", lambda self, out, hidden, slots: right(self, out, hidden, _shifted(slots)))


def one_slot_too_far_in_experts(patch: pytest.MonkeyPatch) -> None:
    right = Experts._adapters
    patch.setattr(Experts, "_adapters", lambda self, lora, slots: right(self, lora, _shifted(slots)))


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", [in_two_sums, one_slot_too_far, one_slot_too_far_in_experts])
def test_adapters_that_depend_on_the_batch_are_noticed(
    of: Callable[..., Mixed], wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything runs in Python, where the wrong parts are."""
    mixed = of("qwen3_moe", "float32")
    wrong(monkeypatch)
    batch = [replace(ask, prompt=ask.prompt[:4]) for ask in mixed.batch[:12]]
    facts = []
    for way in (Server.alone, Server.together):
        server = mixed.server(disable_radix_cache=True)
        server.harness.scheduler.runner.recorded = None
        facts.append(way(server, batch))
    assert any_differs(facts[1], facts[0])
