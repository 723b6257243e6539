"""Public bugs of routed experts (field notes, B1) in the hands of clients and trainers; each test fails on its bug.

    14  verl#6029           a rollout in parts: the routes of the whole sequence are appended once more
    15  strands-sglang#72   a server that ignores the start that it was asked for
    21  NeMo-RL#3292        40 MB of JSON a sample
    23  slime#2385          the rows of all KV slots take the host's memory
    25  NeMo-RL#4057        a layer replays the routes of another
    27  tunix#2046          padding is expert 0, which is an expert
    28  Megatron-LM#79      scores gathered from what is zero outside the top k: no gradient
    29  prime-rl#2648       parts with a gap between them are joined all the same
    30  AReaL#1496          routes that cannot be followed are replaced by the model's own, silently
    31  slime#1052          padding on the wrong side
    36  ATOM#2274 and others   every server has another shape and type, and says neither

Bugs of the engine, and bugs that cannot occur here, are in `test_regression_b1_rows.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from capture import replay
from capture.codec import decode_compact, decode_compatible, encode_compact, encode_compatible
from capture.errors import RouteFormatError, RouteValueError
from capture.replay import find_routers, force_routes, pad_routes, record_routes
from capture.routed_experts import RoutedExperts, concat, id_dtype
from capture.slot_store import RouteSlotStore
from rollout.core.messages.io_struct import AbortReqInput
from rollout.scheduler.records import RecordReader
from rollout.tokenizer_manager.response import RouteShape, routed_experts_of
from tests.parallel_harness import ParallelHarness
from tests.routes_judge import EXPERTS, LAYERS, LAYOUTS, OneRank, decisive_checkpoint, prompt
from tests.scheduler_harness import Result

TOP_K, MOE_LAYERS, HIDDEN_LAYERS = 3, (1, 2), 3
SHAPE = RouteShape(num_experts=EXPERTS, top_k=TOP_K, moe_layer_ids=MOE_LAYERS, num_hidden_layers=HIDDEN_LAYERS)
BOTH = "dp2 of tp4 all-to-all"
PROMPT = prompt(50, 13)
NUM_NEW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decisive_checkpoint(tmp_path_factory.mktemp("b1") / "model", 31)


@pytest.fixture(scope="module")
def judge(folder: Path) -> OneRank:
    judge = OneRank(folder)
    judge.says(PROMPT, NUM_NEW)
    return judge


def record(result: Result) -> RoutedExperts:
    assert result.finished is not None and result.finished.routed_experts is not None
    return routed_experts_of(result.finished.routed_experts, SHAPE)


# --- 14, 15, 29: rollouts in parts ------------------------------------------------------------------------------------


def in_two_parts(folder: Path) -> tuple[list[RoutedExperts], list[int]]:
    """A rollout that is aborted and goes on as a new request on another rank, asking for the rows it does not have."""
    with ParallelHarness(folder, **LAYOUTS[BOTH]) as harness:
        first = harness.submit(PROMPT, params={"max_new_tokens": NUM_NEW}, dp_rank=0, stream=True)
        for _ in range(6):
            harness.tick()
        harness.channel.inbox.append(AbortReqInput(rids=[first]))
        harness.run()
        had = harness.results[first]
        so_far = PROMPT + had.token_ids
        rest = harness.submit(
            so_far,
            params={"max_new_tokens": NUM_NEW - len(had.token_ids)},
            dp_rank=1,
            routed_experts_start_len=len(record(had)),
        )
        harness.run()
        return [record(had), record(harness.results[rest])], so_far + harness.results[rest].token_ids


def test_14_verl_6029_and_15_strands_72_parts_join_without_a_seam(
    folder: Path, judge: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = judge.says(PROMPT, NUM_NEW)
    parts, tokens = in_two_parts(folder)
    assert 0 < parts[1].start == len(parts[0]) < len(tokens) - 1
    joined = concat(parts)
    assert tokens == PROMPT + want.token_ids and len(joined) == len(tokens) - 1
    assert np.array_equal(joined.logical_ids_TLK, want.routes)
    routes = RecordReader._routes

    def from_zero(self: RecordReader, req, *rest):  # type: ignore[no-untyped-def]
        req.source.routed_experts_start_len = 0
        return routes(self, req, *rest)

    monkeypatch.setattr(RecordReader, "_routes", from_zero)
    parts, tokens = in_two_parts(folder)
    appended = np.concatenate([part.logical_ids_TLK for part in parts])
    assert len(appended) > len(tokens) - 1  # what a client that trusts the lengths makes of it
    with pytest.raises(RouteValueError, match="a record starts at token 0, expected"):
        concat(parts)


def test_29_prime_rl_2648_a_gap_or_an_overlap_is_refused(judge: OneRank) -> None:
    whole = record(judge.says(PROMPT, NUM_NEW))
    assert concat([whole.rows(0, 9), whole.rows(9, len(whole))]) == whole
    for end, start in ((8, 9), (10, 9)):
        parts = [whole.rows(0, end), whole.rows(start, len(whole))]
        with pytest.raises(RouteValueError, match=f"starts at token {start}, expected {end}"):
            concat(parts)
        stitched = np.concatenate([part.logical_ids_TLK for part in parts])  # wrong
        assert len(stitched) != len(whole)


# --- 21, 23, 25, 36: forms --------------------------------------------------------------------------------------------


def test_21_nemo_rl_3292_a_record_is_a_byte_a_choice() -> None:
    """The record is of a model with 128 experts, 48 layers and 8 experts a token, over 4,000 tokens."""
    random = np.random.default_rng(0)
    ids_TLK = random.random((4000, 48, 128)).argsort(axis=2)[:, :, :8].astype(id_dtype(128))
    routed = RoutedExperts(ids_TLK, 128, tuple(range(48)), 48)
    size = len(encode_compact(routed))
    assert ids_TLK.size <= size < ids_TLK.size + 1024
    assert len(json.dumps(ids_TLK[:100].tolist())) * 40 > 4 * size  # wrong: lists of numbers
    assert len(encode_compatible(routed)) > 5 * size


def test_23_slime_2385_rows_of_all_slots_are_a_byte_a_choice() -> None:
    slots, layers, top_k = 1000, 48, 8
    store = RouteSlotStore(slots, layers, top_k, 128)
    assert store.nbytes == slots * (layers * top_k + 1)
    assert RouteSlotStore(slots, layers, top_k, 300).nbytes == slots * (2 * layers * top_k + 1)
    assert torch.zeros(slots, layers, top_k, dtype=torch.int32).nbytes > 3 * store.nbytes  # wrong: what others take


def ordinals_as_layers(routed: RoutedExperts) -> str:
    """Wrong: the n-th MoE layer is written where hidden layer n belongs."""
    wide = np.zeros((len(routed), routed.num_hidden_layers, routed.top_k), dtype="<i4")
    wide[:, : routed.num_moe_layers] = routed.logical_ids_TLK
    return base64.b64encode(wide.tobytes()).decode()


def test_25_nemo_rl_4057_layers_are_named(judge: OneRank) -> None:
    """The first layer of this model is dense."""
    routed = record(judge.says(PROMPT, NUM_NEW))
    read = decode_compatible(encode_compatible(routed), HIDDEN_LAYERS, TOP_K, MOE_LAYERS, EXPERTS)
    assert np.array_equal(read.logical_ids_TLK, routed.logical_ids_TLK)
    with pytest.raises(RouteFormatError, match="a dense layer has expert ids"):
        decode_compatible(ordinals_as_layers(routed), HIDDEN_LAYERS, TOP_K, MOE_LAYERS, EXPERTS)
    assert decode_compact(encode_compact(routed)).moe_layer_ids == MOE_LAYERS


def test_36_atom_2274_a_record_says_what_it_is(judge: OneRank) -> None:
    """Read without the model: type, shape, layers, start and versions are in the record; other readings are refused."""
    routed = record(judge.says(PROMPT, NUM_NEW))
    assert decode_compact(encode_compact(routed)) == routed
    assert routed.logical_ids_TLK.shape == (len(PROMPT) + NUM_NEW - 1, LAYERS, TOP_K)
    text = encode_compatible(routed)  # SGLang's form, of which the reader must know the model
    with pytest.raises(RouteFormatError):
        decode_compatible(text, HIDDEN_LAYERS + 2, TOP_K, MOE_LAYERS, EXPERTS)
    guessed = np.frombuffer(base64.b64decode(text), dtype=np.uint8)  # wrong: another server's type and shape
    assert guessed.size != routed.logical_ids_TLK.size


# --- 27, 28, 30, 31: in the trainer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    """A trainer's model of the engine's shape, with decisive routers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=HIDDEN_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[0],
    )
    made = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for router in find_routers(made):
            router.weight.normal_(std=1.0)  # type: ignore[operator, union-attr]
    return made


IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def own_routes(model: Qwen3MoeForCausalLM) -> torch.Tensor:
    """Return the model's own choices [B, S, L, K]."""
    with record_routes(model) as recorded, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return recorded.ids().view(*IDS.shape, LAYERS, TOP_K)


def others(routes: torch.Tensor) -> torch.Tensor:
    """Valid, and different everywhere."""
    return (routes + 1) % EXPERTS


def forced(model: Qwen3MoeForCausalLM, routes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the routes that were followed [B, S, L, K], and at how many positions they were forced."""
    with force_routes(model, routes) as state, record_routes(model) as recorded, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    return recorded.ids().view(*IDS.shape, LAYERS, TOP_K), state.forced_positions


def with_expert_zero(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Wrong: where there is no row stand the first experts."""
    padded = pad_routes(sequences, EXPERTS, IDS.shape[1])
    return torch.where(padded < 0, torch.arange(TOP_K).expand_as(padded), padded)


def on_the_left(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Wrong: rows end where the longest sequence ends."""
    padded = pad_routes(sequences, EXPERTS, IDS.shape[1])
    return torch.stack([row.roll(IDS.shape[1] - len(item), 0) for row, item in zip(padded, sequences, strict=True)])


def follows(model: Qwen3MoeForCausalLM, pad: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> bool:
    """Return whether given rows are followed where their tokens are, and every other position routes by itself."""
    own, lengths = own_routes(model), (6, 4)
    given = [others(own[row, :length]) for row, length in enumerate(lengths)]
    got, count = forced(model, pad(given))
    rows_are_right = all(torch.equal(got[row, :length], given[row]) for row, length in enumerate(lengths))
    return rows_are_right and count == sum(lengths)


def test_27_tunix_2046_and_31_slime_1052_padding_is_no_expert(model: Qwen3MoeForCausalLM) -> None:
    assert follows(model, lambda given: pad_routes(given, EXPERTS, IDS.shape[1]))
    assert not follows(model, with_expert_zero)
    assert not follows(model, on_the_left)


def from_the_top_k(router, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Wrong: gathers from scores that are zero outside the router's own choice."""
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    top = scores_TE.topk(router.top_k, dim=-1)
    kept_TE = torch.zeros_like(scores_TE).scatter(1, top.indices, top.values)
    return kept_TE.gather(1, ids_TK).to(logits_TE.dtype)


def router_gradient(model: Qwen3MoeForCausalLM, routes: torch.Tensor) -> float:
    """Largest element of the first router's gradient under forced routes."""
    model.zero_grad()
    with force_routes(model, routes):
        model(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    gradient = find_routers(model)[0].weight.grad  # type: ignore[union-attr]
    return float(gradient.abs().max())  # type: ignore[union-attr, operator]


def test_28_megatron_79_forced_experts_have_gradients(
    model: Qwen3MoeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router would choose none of the forced experts."""
    chosen = own_routes(model)
    absent = torch.ones(*chosen.shape[:-1], EXPERTS).scatter(-1, chosen, 0.0).topk(TOP_K, dim=-1).indices
    assert router_gradient(model, absent) > 0
    monkeypatch.setattr(replay, "weights_of", from_the_top_k)
    monkeypatch.setattr(replay, "_check_formula", lambda *_: None)
    assert router_gradient(model, absent) == 0


def test_30_areal_1496_what_is_not_followed_is_refused_or_counted(
    model: Qwen3MoeForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_routes(model)
    routes = others(own)
    absent = routes.clone()
    absent[1, 3:] = -1
    got, count = forced(model, absent)
    assert count == 9 + 3 and torch.equal(got[0], routes[0]) and torch.equal(got[1, :3], routes[1, :3])
    broken = routes.clone()
    broken[1, 5, 1, 2] = EXPERTS
    with pytest.raises(RouteValueError, match=f"outside 0..{EXPERTS - 1}"):
        forced(model, broken)

    def forgiving(ids_TLK: np.ndarray, num_experts: int, missing: int) -> np.ndarray:
        """Wrong: a row that cannot be followed is taken for one that is not there."""
        return ((ids_TLK < 0) | (ids_TLK >= num_experts)).any(axis=(1, 2))

    monkeypatch.setattr(replay, "checked_missing_rows", forgiving)
    got, count = forced(model, broken)
    assert count == 17 and not torch.equal(got[1, 5], routes[1, 5])
