"""Interrupted samples: the request for the rest, and parts that join to the record of an uninterrupted sample."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.hidden_states import HiddenStates
from capture.routed_experts import RoutedExperts
from capture.sampling_mask import SamplingMask
from rollout.client import FinishReason, GenerationOutput, JoinError, RolloutClient, TokenLogprob, VersionSpan
from rollout.client import partial as partial_module
from rollout.client.partial import PER_TOKEN, join, rest_of
from rollout.client.types import GenerateOptions
from rollout.core.continued import continued_seed
from rollout.core.errors import BadRequest
from rollout.core.sampling_params import SamplingParams
from rollout.sampling.torch_sampler import uniform
from tests.canned_server import CannedServer, serving
from tests.tiers import examples

ABORT = FinishReason("abort", message="Aborted")


def recorded(prompt: int = 5, count: int = 9, start: int = 0, cuts: tuple[int, ...] = (3, 7)) -> GenerationOutput:
    """Return a sample in one piece, whose weight version changes at `cuts`, in tokens of the output."""
    rows = prompt + count - 1 - start
    ids = np.argsort(np.random.default_rng(count).random((rows, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    edges = sorted({0, count, *(cut for cut in cuts if 0 < cut < count)})
    spans = [VersionSpan(f"v{i}", a, b, i) for i, (a, b) in enumerate(pairwise(edges))]
    # Row i was computed with token start + i; here by the version of the token that it led to.
    ends = [min(max(prompt + b - 1 - start, 0), rows) for b in edges]
    routed = [(f"v{i}", a, b) for i, (a, b) in enumerate(zip([0, *ends[1:]], ends[1:])) if a < b]
    token_logprobs = [TokenLogprob(-0.5 - i, 100 + i, None) for i in range(count)]
    return GenerationOutput(
        rid="whole",
        text="".join(chr(97 + i % 26) for i in range(count)),
        output_ids=[100 + i for i in range(count)],
        finish_reason=FinishReason("length", length=count),
        prompt_tokens=prompt,
        completion_tokens=count,
        cached_tokens=2,
        weight_version=spans[-1].version if spans else "v0",
        weight_versions=spans,
        logprobs=[each.logprob or 0.0 for each in token_logprobs],
        token_logprobs=token_logprobs,
        top_logprobs=[[each, TokenLogprob(-9.0, 1, None)] for each in token_logprobs],
        chosen_logprobs=None,
        sampling_mask=SamplingMask.from_lists([[100 + i, *range(i % 4)] for i in range(count)]),
        sampling_logprobs=[-i / 8 for i in range(count)],
        prompt_logprobs=[TokenLogprob(None, 1, None)] * prompt,
        routed_experts=RoutedExperts(ids, 8, (1, 2), 3, start, tuple(routed)),
        hidden_states=HiddenStates(_numbers(rows), "bfloat16", (0, 3), start, tuple(routed)),
        prompt_ids=list(range(prompt)),
    )


def _numbers(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 1 << 16, (rows, 2, 4)).astype("<u2")


def _some_states(whole: GenerationOutput, first: int, end: int) -> HiddenStates | None:
    """Return rows of the sample as a server sends them: None for no row."""
    states = whole.hidden_states
    assert states is not None
    if first == end:
        return None
    spans = [(v, max(a, first) - first, min(b, end) - first) for v, a, b in states.weight_versions]
    kept = tuple((v, a, b) for v, a, b in spans if a < b)
    return HiddenStates(states.raw_TLD[first:end], states.dtype, states.layers, states.start + first, kept)


def cut(whole: GenerationOutput, at: int) -> tuple[GenerationOutput, GenerationOutput]:
    """Return the parts that a server would have sent, had it been interrupted after `at` tokens."""
    assert whole.text is not None and whole.prompt_tokens is not None
    assert whole.routed_experts is not None and whole.prompt_ids is not None
    routes = whole.routed_experts
    rows = max(whole.prompt_tokens + at - 1 - routes.start, 0)

    def tokens(part: slice) -> dict[str, Any]:
        values = {name: getattr(whole, name) for name in PER_TOKEN}
        mask = values.pop("sampling_mask")
        sliced = {name: None if each is None else each[part] for name, each in values.items()}
        return sliced | {"sampling_mask": mask.tokens(*part.indices(len(mask))[:2])}

    def spans(first: int, end: int) -> list[VersionSpan]:
        cut = [s._replace(start=max(s.start, first), end=min(s.end, end)) for s in whole.weight_versions]
        return [s._replace(start=s.start - first, end=s.end - first) for s in cut if s.start < s.end]

    count = len(whole.output_ids)
    first, last = spans(0, at), spans(at, count)
    return (
        replace(
            whole,
            rid="first",
            text=whole.text[:at],
            **tokens(slice(None, at)),
            finish_reason=ABORT,
            completion_tokens=at,
            weight_versions=first,
            weight_version=first[-1].version,
            routed_experts=routes.rows(0, rows),
            hidden_states=_some_states(whole, 0, rows),
        ),
        replace(
            whole,
            text=whole.text[at:],
            **tokens(slice(at, None)),
            finish_reason=None if whole.finish_reason is None else replace(whole.finish_reason, length=count - at),
            prompt_tokens=whole.prompt_tokens + at,
            prompt_ids=[*whole.prompt_ids, *whole.output_ids[:at]],
            completion_tokens=count - at,
            cached_tokens=7,
            weight_versions=last,
            prompt_logprobs=None,
            routed_experts=routes.rows(rows, len(routes)),
            hidden_states=_some_states(whole, rows, len(routes)),
        ),
    )


@st.composite
def samples(draw: st.DrawFn) -> GenerationOutput:
    prompt, count = draw(st.integers(1, 6)), draw(st.integers(2, 12))
    cuts = tuple(draw(st.lists(st.integers(1, 11), max_size=3)))
    return recorded(prompt, count, draw(st.integers(0, prompt)), cuts)


def joined_anyhow(whole: GenerationOutput, at: list[int]) -> GenerationOutput:
    """Cut `whole` after each of these counts of tokens, and join it part by part."""
    done = 0
    rest, result = whole, None
    for count in at:
        part, rest = cut(rest, count - done)
        done = count
        result = part if result is None else join(result, part)
    return rest if result is None else join(result, rest)


@given(samples(), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_split_joins_to_the_whole(whole: GenerationOutput, data: st.DataObject) -> None:
    at = sorted(data.draw(st.sets(st.integers(1, len(whole.output_ids) - 1), min_size=1, max_size=4)))
    assert joined_anyhow(whole, at) == whole


def _wrong_spans(first: GenerationOutput, rest: GenerationOutput) -> list[VersionSpan]:
    return first.weight_versions + rest.weight_versions


def _wrong_routes(first: GenerationOutput, rest: GenerationOutput) -> Any:
    return first.routed_experts


def _wrong_states(first: GenerationOutput, rest: GenerationOutput) -> Any:
    return rest.hidden_states


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_joined_spans", _wrong_spans),
        ("_joined_routes", _wrong_routes),
        ("_joined_states", _wrong_states),
        ("PER_TOKEN", {name: how for name, how in PER_TOKEN.items() if name != "top_logprobs"}),
        ("_joined_entries", lambda name, first, rest: getattr(rest, name)),
    ],
)
def test_a_wrong_join_is_noticed(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded()
    parts = cut(whole, 4)
    monkeypatch.setattr(partial_module, name, wrong)
    assert join(*parts) != whole


def test_a_part_without_tokens_changes_nothing() -> None:
    whole = recorded()
    first, _ = cut(whole, 4)
    nothing = replace(whole, rid="none", output_ids=[], finish_reason=ABORT, routed_experts=None)
    assert join(first, nothing) == replace(first, rid="none", meta_info=nothing.meta_info)
    assert join(nothing, whole) == whole


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rest: replace(rest, prompt_tokens=rest.prompt_tokens + 1), "prompt of"),
        (lambda rest: replace(rest, prompt_tokens=None), "prompt of"),
        (
            lambda rest: replace(rest, prompt_ids=[9] * len(rest.prompt_ids)),
            "the prompt of whole differs from the tokens of first",
        ),
        (lambda rest: replace(rest, logprobs=None), "another number of entries in logprobs"),
        (lambda rest: replace(rest, top_logprobs=rest.top_logprobs[1:]), "another number of entries in top_logprobs"),
        (lambda rest: replace(rest, sampling_mask=None), "another number of entries in sampling_mask"),
        (lambda rest: replace(rest, sampling_logprobs=[]), "another number of entries in sampling_logprobs"),
        (
            lambda rest: replace(rest, chosen_logprobs=[None] * len(rest.output_ids)),
            "another number of entries in chosen_logprobs",
        ),
        (lambda rest: replace(rest, routed_experts=None), "only one"),
        (lambda rest: replace(rest, hidden_states=replace(rest.hidden_states, start=0)), "hidden states start at"),
        (lambda rest: replace(rest, weight_versions=rest.weight_versions[1:]), "weight version"),
        (lambda rest: replace(rest, routed_experts=rest.routed_experts.rows(1, len(rest.routed_experts))), "rows"),
        (
            lambda rest: replace(
                rest, routed_experts=replace(rest.routed_experts, start=rest.routed_experts.start - 1)
            ),
            "rows",
        ),
        (lambda rest: replace(rest, routed_experts=replace(rest.routed_experts, num_hidden_layers=4)), "models"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(change: Any, reason: str) -> None:
    first, rest = cut(recorded(), 4)
    with pytest.raises(JoinError, match=reason):
        join(first, change(rest))


# --- the request -------------------------------------------------------------------------------------------------


def test_the_rest_is_asked_with_what_is_left() -> None:
    first, _ = cut(recorded(start=2), 4)
    options: GenerateOptions = {
        "sampling_params": {"max_tokens": 9, "min_tokens": 6, "temperature": 0.5, "n": 8},
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_routed_experts": True,
        "routed_experts_start_len": 2,
        "return_hidden_states": True,
        "hidden_states_start_len": 2,
        "session_id": "s",
    }
    rest = rest_of(first, options)
    assert rest == {
        "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 2, "temperature": 0.5, "n": 1},
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": 5 + 4 - 1,
        "return_hidden_states": True,
        "hidden_states_start_len": 5 + 4 - 1,
        "session_id": "s",
        "input_ids": [0, 1, 2, 3, 4, 100, 101, 102, 103],
    }
    assert rest_of(replace(first, prompt_ids=None), {**options, "input_ids": [7] * 5})["input_ids"][:6] == [7] * 5 + [
        100
    ]
    default = rest_of(first, {})["sampling_params"]
    assert default == {"n": 1, "max_new_tokens": SamplingParams().max_new_tokens - 4, "min_new_tokens": 0}


def test_a_sample_that_has_not_begun_is_asked_as_it_was() -> None:
    options: GenerateOptions = {
        "sampling_params": {"max_new_tokens": 3, "frequency_penalty": 1.0},
        "logprob_start_len": 0,
    }
    begun = replace(recorded(), output_ids=[], finish_reason=ABORT, routed_experts=None)
    assert rest_of(begun, options) == {
        **options,
        "sampling_params": {"max_new_tokens": 3, "frequency_penalty": 1.0, "n": 1},
        "input_ids": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda o: replace(o, finish_reason=FinishReason("stop")), {}, "has ended"),
        (lambda o: replace(o, prompt_ids=None), {}, "ids of the prompt"),
        (lambda o: o, {"input_ids": [[1], [2]]}, "ids of the prompt"),
        (lambda o: o, {"sampling_params": [{}]}, "one sampling_params"),
        (lambda o: o, {"sampling_params": {"max_new_tokens": 4}}, "all 4 tokens"),
        (
            lambda o: o,
            {"sampling_params": {"frequency_penalty": 0.1}},
            "presence_penalty are not supported: a resumed request",
        ),
        (
            lambda o: o,
            {"sampling_params": {"presence_penalty": -0.1}},
            "presence_penalty are not supported: a resumed request",
        ),
        (lambda o: o, {"sampling_params": {"max_new_tokens": "x"}}, "sampling_params"),
        (lambda o: replace(o, weight_versions=[]), {}, "weight version"),
        (lambda o: replace(o, weight_versions=o.weight_versions[:-1]), {}, "weight version"),
        (lambda o: replace(o, logprobs=o.logprobs[1:]), {}, "logprobs has 3 entries"),
        (
            lambda o: replace(o, **dict.fromkeys(list(PER_TOKEN)[1:])),
            {"return_logprob": True},
            "no log-probabilities",
        ),
        (lambda o: replace(o, routed_experts=None), {"return_routed_experts": True}, "lacks rows"),
        (lambda o: replace(o, hidden_states=None), {"return_hidden_states": True}, "lacks rows of hidden states"),
        (
            lambda o: replace(o, routed_experts=recorded(count=20).routed_experts),
            {"return_routed_experts": True},
            "more rows",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_before_anything_is_sent(change: Any, options: Any, reason: str) -> None:
    first, _ = cut(recorded(), 4)
    with RolloutClient("http://127.0.0.1:9") as client, pytest.raises(BadRequest, match=reason):
        client.resume(change(first), **options)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
@settings(max_examples=examples(200), deadline=None)
def test_the_seed_goes_on_where_it_stopped(seed: int, position: int, further: int) -> None:
    def number(seed: int, position: int) -> float:
        return float(uniform(np.array([seed % 2**64], dtype=np.uint64), np.array([position]))[0])

    assert -(2**63) <= continued_seed(seed, position) < 2**63
    assert number(continued_seed(seed, position), further) == number(seed, position + further)


def test_a_text_is_decoded_anew_and_cut_at_its_stop_string() -> None:
    """Characters may be cut by the seam."""
    first, _ = cut(recorded(), 4)
    asked: list[Any] = []

    def answer(body: Any) -> Any:
        asked.append(body)
        meta = {
            "id": "rest",
            "finish_reason": {"type": "stop", "matched": "END"},
            "prompt_tokens": 9,
            "weight_versions": [{"version": "v9", "start": 0, "end": 2}],
            "weight_version": "v9",
        }
        return {"text": "\ufffdx", "output_ids": [7, 8], "meta_info": meta}

    plain = replace(first, **dict.fromkeys(list(PER_TOKEN)[1:]), routed_experts=None)
    canned = CannedServer({"/generate": answer, "/detokenize": {"text": "héxEND"}})
    with serving(canned) as url, RolloutClient(url) as client:
        output = client.resume(plain, sampling_params={"max_new_tokens": 9, "stop": ["END"]})
        kept = client.resume(plain, sampling_params={"max_new_tokens": 9, "stop": ["END"], "no_stop_trim": True})
    assert (output.text, kept.text) == ("héx", "héxEND")
    assert output.output_ids == [*plain.output_ids, 7, 8]
    assert output.weight_versions[-1] == VersionSpan("v9", 4, 6)
    assert canned.asked[-1].body == {"tokens": output.output_ids, "skip_special_tokens": True}


def test_a_rest_is_of_the_version_of_the_adapter_that_began_it() -> None:
    label = {"name": "poet", "version": 1, "content_digest": "d1"}
    first, rest = (replace(part, meta_info={"adapter": label}) for part in cut(recorded(), 4))
    options = GenerateOptions(input_ids=[1, 2], lora_path="poet")
    assert rest_of(first, options)["lora_path"] == "poet@1"
    assert rest_of(replace(first, meta_info={}), options)["lora_path"] == "poet", "a server that does not say"
    assert join(first, rest).meta_info["adapter"] == label
    for other in ({}, {"adapter": label | {"content_digest": "d2"}}):  # as of a server that counts versions anew
        with pytest.raises(JoinError, match="adapters with other contents: d1"):
            join(first, replace(rest, meta_info=other))
