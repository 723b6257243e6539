"""A token's log-probability, id and routes have the same bits however its request was served.

Whole engines on the compiled operators, random small models, random schedules.  Every comparison is also made with an
engine that breaks the promise on purpose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.attention.base import AttentionBackend
from rollout.attention.registry import create_attention_backend
from rollout.core.forward_batch import ForwardBatch
from rollout.kernels.ops import Ops
from rollout.memory.kv_pool import KVPool
from tests.family_zoo import FAMILIES, also_for, family_checkpoint
from tests.invariance import Ask, Facts, Server, any_differs, assert_same, compute_threads
from tests.kernels import native_ops
from tests.late_loop import loop  # noqa: F401
from tests.model_zoo import tiny_spec
from tests.tiers import examples

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
WITH_FP8_KV = pytest.mark.parametrize("dtype", ["bfloat16, KV in fp8_e4m3", "float32, KV in fp8_e4m3"])
HELD = ("bfloat16, held in fp8", pytest.param("bfloat16, held in int4", marks=pytest.mark.full))
CHUNKS = [1, 2, 3, 7, 64, -1]
BLOCK = 128  # positions that attention takes together
VOCABULARY = 320
ODD_SIZES = "odd sizes"
WITH_FAMILIES = also_for(FAMILIES, ODD_SIZES)
EXAMPLES = settings(max_examples=16, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", ODD_SIZES)


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE of odd sizes, a dense layer, more experts than lanes; or a family of the zoo."""
    path = tmp_path_factory.mktemp("model") / "m"
    if model in FAMILIES:
        return family_checkpoint(path, model, 3)
    spec = tiny_spec(hidden_size=51, moe_intermediate_size=19, intermediate_size=45, experts=17, seed=3)
    return make_checkpoint(path, spec)


def asks(count: int, seed: int = 0, new_tokens: int = 10, longest: int = 60) -> list[Ask]:
    """Draw random prompts, every third with a shared prefix; they sample greedily or not, with or without filters."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(VOCABULARY) for _ in range(40))
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9}]
    result = []
    for i in range(count):
        own = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest)))
        prompt = shared[: rng.randint(1, 40)] + own[:20] if i % 3 == 0 else own
        params = {"max_new_tokens": rng.randint(1, new_tokens), "temperature": 0.0}
        if i % 4:
            params |= {"temperature": 1.0, "sampling_seed": rng.randrange(2**63)} | filters[i % len(filters)]
        result.append(Ask(prompt, params))
    return result


def alone(folder: Path, dtype: str, batch: list[Ask], every_token: bool = True) -> list[Facts]:
    """Run the reference: each request by itself, its prompt in one piece, on one thread."""
    facts = Server(folder, dtype, disable_radix_cache=True).alone(batch, every_token)
    assert all(x.retractions == x.cached_tokens == 0 for x in facts)
    return facts


# --- random models, random schedules -------------------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> CheckpointSpec:
    kv_heads, experts, layers = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    dense = draw(st.sampled_from([False, False, False, True]))
    return CheckpointSpec(
        seed=draw(st.integers(0, 99)),
        vocab_size=draw(st.integers(VOCABULARY, VOCABULARY + 40)),
        hidden_size=draw(st.integers(9, 100)),
        layers=layers,
        dense_first=draw(st.integers(0, layers - 1)),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 16, 24, 40, 64])),
        intermediate_size=draw(st.integers(1, 90)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 5))),
        moe_intermediate_size=draw(st.integers(1, 70)),
        norm_topk_prob=draw(st.booleans()),
        dense=dense,
        tie=draw(st.booleans()),
        context_length=256,
        dtype="float32",
    )


@dataclass(frozen=True)
class Schedule:
    """The arrival of requests, and an engine's settings."""

    order_seed: int
    gaps: list[int]
    twice: bool  # a second time, when prefixes are cached
    tight: bool  # a pool for hardly more than the longest request
    settings: dict[str, Any]

    def server(self, folder: Path, dtype: str, batch: list[Ask]) -> Server:
        pool = {"max_total_tokens": max(ask.length for ask in batch) + 9} if self.tight else {}
        return Server(folder, dtype, **pool | self.settings)

    def serve(self, server: Server, batch: list[Ask]) -> list[Facts]:
        order = random.Random(self.order_seed).sample(range(len(batch)), len(batch))
        for _ in range(1 + self.twice):
            facts = server.together([batch[i] for i in order], self.gaps)
        return [facts[order.index(i)] for i in range(len(batch))]


schedules = st.builds(
    Schedule,
    order_seed=st.integers(0, 99),
    gaps=st.lists(st.integers(0, 4), max_size=8),
    twice=st.booleans(),
    tight=st.booleans(),
    settings=st.fixed_dictionaries(
        {
            "chunked_prefill_size": st.sampled_from(CHUNKS),
            "disable_radix_cache": st.booleans(),
            "max_running_requests": st.sampled_from([2, 5, 256]),
        }
    ),
)


RETRACTS = Schedule(
    order_seed=0,
    gaps=[],
    twice=True,
    tight=True,
    settings={"chunked_prefill_size": 7, "disable_radix_cache": False, "max_running_requests": 256},
)
"""A schedule of `asks(7, seed=5)` in which a request is retracted, and prefixes are found."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bfloat16, KV in fp8_e4m3", *HELD])
def test_any_model_in_any_schedule(dtype: str) -> None:
    seen = {"retractions": 0, "cached": 0, "several routes": 0}
    in_gate = 6 if "held in" in dtype else 16

    @settings(EXAMPLES, max_examples=examples(16, gate=in_gate))
    @given(specs(), schedules, st.integers(0, 99), st.sampled_from([60, BLOCK + 12]))
    @example(tiny_spec(), RETRACTS, 5, 60)
    def check(spec: CheckpointSpec, schedule: Schedule, seed: int, longest: int) -> None:
        batch = asks(7, seed, longest=longest)
        with TemporaryDirectory() as temporary:
            folder = make_checkpoint(Path(temporary) / "model", spec)
            want = alone(folder, dtype, batch)
            server = schedule.server(folder, dtype, batch)
            got = schedule.serve(server, batch)
            assert_same(got, want)
            assert_same(server.rescored(batch, want), want)
        seen["retractions"] += sum(x.retractions for x in got)
        seen["cached"] += sum(x.cached_tokens for x in got)
        seen["several routes"] += len({x.routes.tobytes() for x in got}) == len(batch)

    check()
    assert all(seen.values()), seen


STATE_LIMITS = st.builds(
    lambda running, spare, interval: {
        "max_running_requests": running,
        "max_state_rows": running + spare,
        "state_snapshot_interval": interval,
    },
    st.sampled_from([2, 5, 32]),
    st.sampled_from([0, 1, 3, 40]),
    st.sampled_from([1, 4, 16, 64]),
)
WINDOW_LIMITS = st.builds(lambda running: {"max_running_requests": running}, st.sampled_from([2, 3, 5]))


@pytest.mark.full
@DTYPES
@pytest.mark.parametrize(
    ("name", "limits", "lengths", "count"),
    [("qwen3_next", STATE_LIMITS, [20, 150], 30), ("gpt_oss, long window", WINDOW_LIMITS, [150, 700], 15)],
    ids=["states", "windows"],
)
def test_memory_of_sequences_in_any_schedule(
    tmp_path: Path, dtype: str, name: str, limits: Any, lengths: list[int], count: int
) -> None:
    """With few rows of states or pages of windows, a request gets the bits that it gets alone; prefixes are found."""
    folder = family_checkpoint(tmp_path / "model", name, 3, max_position_embeddings=1024)
    seen = {"retractions": 0, "cached": 0}

    @settings(max_examples=examples(count), deadline=None, derandomize=True, database=None)
    @given(schedules, limits, st.integers(0, 99), st.sampled_from(lengths))
    def check(schedule: Schedule, limits: dict[str, int], seed: int, longest: int) -> None:
        batch = asks(7, seed, new_tokens=40, longest=longest)
        want = alone(folder, dtype, batch)
        longer = [Ask((*ask.prompt, *facts.token_ids, 7), ask.params) for ask, facts in zip(batch, want, strict=True)]
        schedule = replace(schedule, settings=schedule.settings | limits)
        server = schedule.server(folder, dtype, longer)
        got = schedule.serve(server, batch)
        assert_same(got, want)
        again = server.together(longer, schedule.gaps)
        assert_same(again, alone(folder, dtype, longer))
        seen["retractions"] += sum(x.retractions for x in (*got, *again))
        seen["cached"] += sum(x.cached_tokens for x in again)

    check()
    assert all(seen.values()), seen


# --- each promise by itself ------------------------------------------------------------------------------------------


@DTYPES
@WITH_FAMILIES
def test_a_request_among_256_others_gets_the_same_bits(folder: Path, dtype: str) -> None:
    batch = asks(6, seed=1)
    want = alone(folder, dtype, batch)
    others = [Ask(ask.prompt, ask.params | {"max_new_tokens": 12}) for ask in asks(250, seed=2, longest=12)]
    server = Server(folder, dtype)
    everything = others[:100] + batch + others[100:]
    rids = [server.submit(ask, every_token=100 <= i < 106) for i, ask in enumerate(everything)]
    most = 0
    while server.harness.tick():
        most = max(most, len(server.harness.scheduler.queues.running))
    assert most >= 250
    assert_same(server.facts(rids[100:106]), want)


@DTYPES
@pytest.mark.parametrize("chunk", CHUNKS)
@WITH_FAMILIES
def test_a_prompt_in_chunks_of_any_size_gets_the_same_bits(folder: Path, dtype: str, chunk: int) -> None:
    batch = asks(6, seed=4)
    want = alone(folder, dtype, batch)
    server = Server(folder, dtype, chunked_prefill_size=chunk)
    assert_same(server.together(batch, gaps=[0, 2, 5]), want)
    assert_same(server.rescored(batch, want), want)


@DTYPES
@WITH_FAMILIES
def test_a_prompt_with_a_cached_prefix_gets_the_same_bits(folder: Path, dtype: str) -> None:
    rng = random.Random(0)
    # A hit leaves tokens of the longer prompts to compute: they begin before a block's end, and end after it.
    lengths = range(BLOCK - 12, BLOCK)
    at_the_edge = [Ask(tuple(rng.randrange(VOCABULARY) for _ in range(n)), {"max_new_tokens": 6}) for n in lengths]
    batch = asks(6, seed=5) + at_the_edge
    want = alone(folder, dtype, batch)
    server = Server(folder, dtype)
    server.together(batch)
    again = server.together(batch)
    assert_same(again, want)
    assert all(facts.cached_tokens == server.hit(len(ask.prompt) - 1) for ask, facts in zip(batch, again, strict=True))
    # This hit covers decoded tokens, whose KV came from steps of one token.
    longer = [Ask((*ask.prompt, *facts.token_ids, 7), ask.params) for ask, facts in zip(batch, want, strict=True)]
    got = server.together(longer)
    assert_same(got, alone(folder, dtype, longer))
    assert all(new.cached_tokens >= server.hit(len(ask.prompt)) for new, ask in zip(got, batch, strict=True))


@DTYPES
@WITH_FAMILIES
def test_before_and_after_retraction(folder: Path, dtype: str) -> None:
    batch = [Ask(ask.prompt, ask.params | {"max_new_tokens": 30}) for ask in asks(8, seed=6)]
    got = Server(folder, dtype, max_total_tokens=110).together(batch)
    assert_same(got, alone(folder, dtype, batch))
    assert sum(facts.retractions > 0 for facts in got) >= 3


@DTYPES
def test_one_and_two_threads(tmp_path: Path, dtype: str) -> None:
    """The operators wake a team of threads for these sizes, and torch would: more than 32768 elements."""
    spec = tiny_spec(hidden_size=128, intermediate_size=131, moe_intermediate_size=67, context_length=1024, seed=1)
    folder = make_checkpoint(tmp_path / "model", spec)
    rng = random.Random(0)
    batch = [
        Ask(tuple(rng.randrange(VOCABULARY) for _ in range(length)), {"max_new_tokens": 3, "temperature": 0.0})
        for length in (301, 523, 77)
    ]
    want = alone(folder, dtype, batch)
    for threads in (2, 1):
        with compute_threads(threads):
            for chunk in (-1, 301):
                server = Server(folder, dtype, chunked_prefill_size=chunk)
                assert_same(server.together(batch), want)
                assert_same(server.rescored(batch, want), want)


@DTYPES
def test_a_large_vocabulary_on_two_threads(tmp_path: Path, dtype: str) -> None:
    """A row has more logits than torch gives to one thread, and many are equal in bfloat16."""
    spec = tiny_spec(vocab_size=40001, hidden_size=24, layers=1, dense_first=0)
    folder = make_checkpoint(tmp_path / "model", spec)
    batch = asks(12, seed=7)
    want = alone(folder, dtype, batch, every_token=False)
    with compute_threads(2):
        assert_same(alone(folder, dtype, batch, every_token=False), want)
        server = Server(folder, dtype)
        assert_same(server.together(batch, every_token=False), want)
        assert_same(server.rescored(batch, want, every_token=False), want)


@DTYPES
@WITH_FAMILIES
def test_seeds_give_the_same_samples_in_every_batch(folder: Path, dtype: str) -> None:
    """Requests sample at temperatures and with filters, penalties and biases, which scored prompts do not have."""
    params: list[dict[str, Any]] = [
        {"temperature": 0.6},
        {"temperature": 1.4, "top_p": 0.7},
        {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 1.0, "repetition_penalty": 1.3, "top_k": 9},
        {"temperature": 0.9, "logit_bias": {5: 2.0, 17: -3.0}, "min_p": 0.02},
        {"temperature": 1.0, "min_new_tokens": 4},
    ]
    prompts = [ask.prompt for ask in asks(6, seed=8)]
    batch = [
        Ask(prompt, extra | {"sampling_seed": seed, "max_new_tokens": 12})
        for seed, (prompt, extra) in enumerate(zip(prompts, params, strict=True))
    ]
    want = alone(folder, dtype, batch)
    others = asks(30, seed=9)
    got = Server(folder, dtype, chunked_prefill_size=16).together(others[:20] + batch + others[20:], gaps=[0, 1] * 15)
    assert_same(got[20:26], want)
    assert len({tuple(facts.token_ids) for facts in want}) >= len(batch) - 1


@WITH_FP8_KV
def test_keys_and_values_in_fp8(folder: Path, dtype: str) -> None:
    """A number in the pool does not depend on the batch that wrote it, so that all promises hold."""
    batch = asks(6, seed=4)
    assert any_differs(alone(folder, dtype, batch), alone(folder, dtype.partition(",")[0], batch))
    test_a_request_among_256_others_gets_the_same_bits(folder, dtype)
    for chunk in CHUNKS:
        test_a_prompt_in_chunks_of_any_size_gets_the_same_bits(folder, dtype, chunk)
    test_a_prompt_with_a_cached_prefix_gets_the_same_bits(folder, dtype)
    test_before_and_after_retraction(folder, dtype)
    test_seeds_give_the_same_samples_in_every_batch(folder, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16, KV in fp8_e4m3"])
def test_keys_and_values_in_fp8_at_scales(folder: Path, dtype: str, tmp_path: Path) -> None:
    path, layers = tmp_path / "scales.json", 3
    factors = {"0": {str(layer): 0.0131 * (layer + 1) for layer in range(layers)}}
    path.write_text(json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}))
    batch, given = asks(6, seed=4), {"quantization_param_path": str(path)}
    want = Server(folder, dtype, disable_radix_cache=True, **given).alone(batch)
    assert any_differs(want, alone(folder, dtype, batch))
    server = Server(folder, dtype, chunked_prefill_size=7, **given)
    assert_same(server.together(batch, gaps=[0, 2, 5]), want)
    assert_same(server.together(batch), want)
    assert_same(server.rescored(batch, want), want)


@pytest.mark.parametrize("dtype", ["bfloat16, KV in fp8_e4m3"])
def test_windows_and_states_beside_keys_in_fp8(tmp_path: Path, dtype: str) -> None:
    for name in ("qwen3_next", "gpt_oss, long window"):
        folder = family_checkpoint(tmp_path / name, name, 3)
        batch = asks(6, seed=4)
        want = alone(folder, dtype, batch)
        server = Server(folder, dtype, chunked_prefill_size=7)
        assert_same(server.together(batch, gaps=[0, 2, 5]), want)
        assert_same(server.together(batch), want)


# --- engines that break the promise ----------------------------------------------------------------------------------


def splits_sums_of_large_batches(ops: Ops) -> Ops:
    """Return operators that add up features in two sums if a batch has more than four rows.

    A kernel for large batches may do so.
    """

    def linear(hidden_TD: torch.Tensor, *weight: Any) -> torch.Tensor:
        if hidden_TD.shape[0] <= 4:
            return ops.linear(hidden_TD, *weight)
        first = hidden_TD.clone()
        first[:, hidden_TD.shape[1] // 2 :] = 0
        second = hidden_TD - first
        return ops.linear(first, *weight) + ops.linear(second, *weight)

    return ops.replace(linear=linear)


def adds_experts_one_by_one(ops: Ops) -> Ops:
    """Return operators that add experts' outputs in memory, in the order of ids, if a batch has more than one row.

    Atomic additions may do so.
    """

    def experts(hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, *w: Any) -> torch.Tensor:
        if hidden_TD.shape[0] == 1:
            return ops.fused_experts(hidden_TD, ids_TK, weights_TK, *w)
        ids_TK, order_TK = ids_TK.sort(dim=1)
        slots_TKD = ops.fused_experts(hidden_TD, ids_TK, None, *w)
        total_TD = torch.zeros_like(hidden_TD)
        for k, weights_T in enumerate(weights_TK.gather(1, order_TK).unbind(1)):
            total_TD += slots_TKD[:, k] * weights_T[:, None]
        return total_TD

    return ops.replace(fused_experts=experts)


def rounds_by_threads(ops: Ops) -> Ops:
    """Return operators whose last bit depends on the number of threads."""

    def linear(hidden_TD: torch.Tensor, *weight: Any) -> torch.Tensor:
        out = ops.linear(hidden_TD, *weight)
        return out * (1 + torch.finfo(out.dtype).eps) if torch.get_num_threads() > 1 else out

    return ops.replace(linear=linear)


class OtherBlocksInPrefill(AttentionBackend):
    """A wrong backend: it decodes with the compiled operator and extends with torch, in other blocks of keys."""

    def __init__(self, decoding: AttentionBackend) -> None:
        super().__init__(decoding.kv)
        self._decoding, self._extending = decoding, create_attention_backend("torch_native", decoding.kv)
        self._now = decoding

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None

    def plan(self, batch: ForwardBatch) -> None:
        self._now = self._extending if batch.extend_lens else self._decoding
        self._now.plan(batch)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._now.attend(layer, q, scale, window, sinks)


@pytest.mark.mutant
@DTYPES
@pytest.mark.parametrize("wrong", [splits_sums_of_large_batches, adds_experts_one_by_one])
def test_operators_that_depend_on_the_batch_are_noticed(folder: Path, dtype: str, wrong: Callable[[Ops], Ops]) -> None:
    batch = asks(6, seed=4)
    reference = Server(folder, dtype, disable_radix_cache=True)
    reference.replace_ops(wrong)
    want = reference.alone(batch)
    for chunk in (-1, 3):
        server = Server(folder, dtype, chunked_prefill_size=chunk)
        server.replace_ops(wrong)
        assert any_differs(server.together(batch), want)
        assert any_differs(server.rescored(batch, want), want)


@pytest.mark.mutant
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bfloat16, KV in fp8_e4m3"])
def test_attention_that_depends_on_the_chunk_is_noticed(folder: Path, dtype: str) -> None:
    batch = asks(6, seed=4)

    def wrong(**options: Any) -> Server:
        server = Server(folder, dtype, **options)
        runner = server.harness.scheduler.runner
        runner.attention = OtherBlocksInPrefill(runner.attention)
        return server

    want = wrong(disable_radix_cache=True).alone(batch)
    assert any_differs(wrong().rescored(batch, want), want)
    assert any_differs(wrong(chunked_prefill_size=7).together(batch), want)


@pytest.mark.mutant
@DTYPES
def test_numbers_that_depend_on_the_threads_are_noticed(folder: Path, dtype: str) -> None:
    batch = asks(2, seed=4)
    server = Server(folder, dtype, disable_radix_cache=True)
    server.replace_ops(rounds_by_threads)
    want = server.alone(batch)
    with compute_threads(2):
        assert any_differs(server.alone(batch), want)


@pytest.mark.mutant
def test_samples_that_depend_on_the_others_are_noticed(folder: Path) -> None:
    """Requests without a seed get seeds in the order of their arrival."""
    batch = [Ask(ask.prompt, {"temperature": 1.0, "max_new_tokens": 10}) for ask in asks(3, seed=8)]
    want = [Server(folder, "float32").together([ask])[0] for ask in batch]
    assert not any_differs(Server(folder, "float32").together(batch[:1]), want[:1])
    assert any_differs(Server(folder, "float32").together(batch), want)
