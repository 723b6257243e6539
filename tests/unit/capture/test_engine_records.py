"""Records of an engine, in parts and in every form, as clients and trainers read them."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from capture.codec import decode_compact, decode_compatible, encode_compact, encode_compatible
from capture.errors import RouteFormatError, RouteValueError
from capture.routed_experts import RoutedExperts, concat
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


def in_two_parts(folder: Path) -> tuple[list[RoutedExperts], list[int]]:
    """Abort a rollout, and continue it on another rank by a request for the missing rows.

    Return the record of each part, and all tokens.
    """
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
    assert len(appended) > len(tokens) - 1  # the reading of a client that trusts the lengths
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


def ordinals_as_layers(routed: RoutedExperts) -> str:
    """Write the n-th MoE layer where hidden layer n belongs (a wrong encoder)."""
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
    """A record states type, shape, layers, start and versions, and needs no model; other readings are refused."""
    routed = record(judge.says(PROMPT, NUM_NEW))
    assert decode_compact(encode_compact(routed)) == routed
    assert routed.logical_ids_TLK.shape == (len(PROMPT) + NUM_NEW - 1, LAYERS, TOP_K)
    text = encode_compatible(routed)  # SGLang's form, of which the reader must know the model
    with pytest.raises(RouteFormatError):
        decode_compatible(text, HIDDEN_LAYERS + 2, TOP_K, MOE_LAYERS, EXPERTS)
    guessed = np.frombuffer(base64.b64decode(text), dtype=np.uint8)  # wrong: another server's type and shape
    assert guessed.size != routed.logical_ids_TLK.size
