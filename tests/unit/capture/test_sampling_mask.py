"""Sampling masks: the value and its wire forms, log-probabilities under them, and the masks of an engine.

What the engine records is compared with a float64 transformers model that follows the recorded routes.  The remaining
difference is the rounding of the engine's own float32 forward, 1e-5 at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from capture.errors import CaptureError, MaskFormatError, MaskValueError
from capture.replay import force_routes, masked_logprobs
from capture.sampling_mask import SamplingMask
from rollout.core.messages.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.core.messages.weights import UpdateWeightsFromDiskReqInput
from rollout.core.sampling_params import SamplingParams
from rollout.numerics import use_engine_numerics
from rollout.tokenizer_manager.response import sampling_mask_of
from rollout.tokenizer_manager.sample import MaskRecord
from tests.late_loop import captured_loop  # noqa: F401
from tests.model_zoo import tiny_checkpoint
from tests.scheduler_harness import Harness, Result
from tests.tiers import examples

TOLERANCE = 1e-5
MIXES: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 20, "temperature": 0.7},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 1.4},
    {"top_k": 30, "min_p": 0.01},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.05},
    {"temperature": 0.0},
]

lists_of_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6, unique=True), max_size=8)


# --- the value and its forms -------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(kept=lists_of_ids, cut=st.integers(0, 8))
def test_every_form_is_read_back(kept: list[list[int]], cut: int) -> None:
    mask = SamplingMask.from_lists(kept)
    assert mask.to_lists() == kept and len(mask) == len(kept)
    assert [mask[token].tolist() for token in range(len(mask))] == kept
    assert SamplingMask.decode_csr(*mask.encode_csr()).to_lists() == kept
    parts = [SamplingMask.from_lists(kept[:cut]), SamplingMask.from_lists(kept[cut:])]
    assert SamplingMask.joined(parts).to_lists() == kept and SamplingMask.joined(parts) == mask
    assert [mask.tokens(0, cut), mask.tokens(cut, len(kept))] == parts
    mask.require([ids[-1] for ids in kept])


@pytest.mark.parametrize(
    "kept",
    [[[]], [[1], []], [[-1]], [[3, 3]], [[4, 9, 4]], [[5], [7, 2, 7]], [[1.5]], [[2**31]], [["7"]], [3], None, [None]],
)
def test_what_no_sampler_keeps_is_refused(kept: Any) -> None:
    with pytest.raises((MaskFormatError, MaskValueError)):
        SamplingMask.from_lists(kept)


@pytest.mark.parametrize("column", [None, 7, "%%%", "AAA=", "AAAAAA==", ["AAAA"]])
def test_damaged_columns_are_refused(column: Any) -> None:
    ids, offsets = SamplingMask.from_lists([[1, 2], [3]]).encode_csr()
    for damaged in ((column, offsets), (ids, column), (ids, ids), (ids[:-8] + "AA==", offsets)):
        with pytest.raises(CaptureError):
            SamplingMask.decode_csr(*damaged)


def test_a_mask_is_of_its_tokens() -> None:
    mask = SamplingMask.from_lists([[1, 2], [3]])
    mask.require([2, 3])
    for sampled in ([2], [2, 3, 3], [3, 3], [2, 1]):
        with pytest.raises(MaskValueError):
            mask.require(sampled)
    with pytest.raises(MaskValueError, match="vocabulary"):
        masked_logprobs(torch.zeros(2, 3), torch.tensor([2, 3]), mask)


# --- the trainer's side ------------------------------------------------------------------------------------------


def dense(logits_TV: torch.Tensor, ids_T: torch.Tensor, mask: SamplingMask, temperature: float) -> torch.Tensor:
    """Compute log-probabilities by the definition: all logits outside the mask are minus infinity."""
    hidden = torch.ones_like(logits_TV, dtype=torch.bool)
    for token in range(len(mask)):
        hidden[token, torch.from_numpy(mask[token].astype(np.int64))] = False
    return (logits_TV / temperature).masked_fill(hidden, -torch.inf).log_softmax(-1).gather(1, ids_T[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_masked_logprobs_and_their_gradients(temperature: float) -> None:
    torch.manual_seed(0)
    kept = [
        sorted(np.random.default_rng(i).choice(60, size=1 + 7 * (i % 5), replace=False).tolist()) for i in range(20)
    ]
    mask, ids = SamplingMask.from_lists(kept), torch.tensor([ids[len(ids) // 2] for ids in kept])
    logits = (torch.randn(20, 60, dtype=torch.float64) * 30).requires_grad_()
    ours, theirs = masked_logprobs(logits, ids, mask, temperature), dense(logits, ids, mask, temperature)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn(20, dtype=torch.float64)
    grads = [torch.autograd.grad((values * weights).sum(), logits)[0] for values in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)
    assert masked_logprobs(logits.bfloat16(), ids, mask).dtype == torch.float32


# --- the engine's record -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two contents of one model."""
    root = tmp_path_factory.mktemp("masks")
    return [tiny_checkpoint(root / str(seed), seed=seed) for seed in (0, 1)]


def worst(result: Result, params: dict[str, Any], models: dict[str, Any]) -> float:
    """Return the largest difference between recorded log-probabilities and replayed ones.

    The model of each token's weight version replays it.
    """
    mask = sampling_mask_of(result.mask)
    mask.require(result.token_ids)
    recorded = torch.tensor(result.mask.logprobs, dtype=torch.float64)
    greedy, temperature = SamplingParams(**params).is_greedy, params.get("temperature", 1.0)
    if greedy:
        assert mask.to_lists() == [[token] for token in result.token_ids]
        return float(recorded.abs().max())
    ids = torch.tensor(result.prompt_ids + result.token_ids)
    differences = []
    for version, start, end in result.versions:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if len(result.versions) == 1:  # else the prefix was computed again, and its first routes are the record
                routes = torch.from_numpy(result.routes[None].astype(np.int64))
                stack.enter_context(force_routes(models[version], routes))
            logits = models[version](ids[None]).logits[0, len(result.prompt_ids) - 1 : -1]
        replayed = masked_logprobs(logits, ids[len(result.prompt_ids) :], mask, temperature)
        differences.append((replayed - recorded)[start:end].abs().max())
    return float(torch.stack(differences).max())


def models_of(folders: list[Path], versions: list[str]) -> dict[str, Any]:
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        for version, folder in zip(versions, folders)
    }


def prompts_of(count: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    shared = generator.integers(3, 90, size=24).tolist()
    return [shared[: 24 - i] + generator.integers(3, 90, size=1 + i).tolist() for i in range(count)]


def asked(harness: Harness, stream: bool = False, length: int = 20) -> list[str]:
    return [
        harness.submit(
            prompt,
            params=mix | {"max_new_tokens": length, "sampling_seed": i},
            return_sampling_mask=True,
            stream=stream,
        )
        for i, (prompt, mix) in enumerate(zip(prompts_of(len(MIXES)), [{"temperature": 1.0} | mix for mix in MIXES]))
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "settings_",
    [
        pytest.param({}, id="plenty"),
        pytest.param({"max_total_tokens": 96, "chunked_prefill_size": 7}, id="retractions"),
        pytest.param({"disable_native_kernels": True}, id="torch"),
    ],
)
def test_replayed_logprobs_are_the_recorded_ones(folders: list[Path], settings_: dict[str, Any], stream: bool) -> None:
    harness = Harness(folders[0], **settings_)
    models = models_of(folders, ["default"])
    for _ in range(2):  # the second time prompts are hit in the prefix cache
        results = [harness.results[rid] for rid in asked(harness, stream)]
        harness.run()
        assert max(worst(result, mix, models) for result, mix in zip(results, MIXES)) <= TOLERANCE
    finished = [result.finished for result in results if result.finished]
    if "max_total_tokens" in settings_:
        assert sum(record.num_retractions for record in finished) > 0
    elif not settings_:
        assert sum(record.cached_tokens for record in finished) > 0
    harness.check_idle()


def test_masks_over_a_refresh_are_of_the_weights_that_sampled(folders: list[Path]) -> None:
    """Requests are retracted before it, so that all KV after it is of the new weights."""
    harness = Harness(folders[0])
    results = [harness.results[rid] for rid in asked(harness)]
    for _ in range(9):
        harness.tick()
    harness.control(PauseGenerationReqInput, mode="retract")
    answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folders[1]), weight_version="next")
    assert answer.success, answer
    harness.control(ContinueGenerationReqInput)
    harness.run()
    models = models_of(folders, ["default", "next"])
    assert all(len(result.versions) == 2 for result in results)
    assert max(worst(result, mix, models) for result, mix in zip(results, MIXES)) <= TOLERANCE
    old = dict.fromkeys(models, models["default"])
    assert all(worst(result, mix, old) > 100 * TOLERANCE for result, mix in zip(results, MIXES[:-1]))


def test_masks_of_requests_that_run_on_over_a_refresh_are_whole(folders: list[Path]) -> None:
    """Later tokens attend to KV of both weights, so a model can only replay those before it."""
    harness = Harness(folders[0])
    results = [harness.results[rid] for rid in asked(harness, length=160)]
    for _ in range(9):
        harness.tick()
    answer = harness.control(UpdateWeightsFromDiskReqInput, model_path=str(folders[1]), weight_version="next")
    assert answer.success, answer
    harness.run()
    models = models_of(folders, ["default"])
    for result, mix in zip(results, MIXES):
        assert [version for version, *_ in result.versions] == ["default", "next"]
        sampling_mask_of(result.mask).require(result.token_ids)
        assert worst(first_span(result), mix, models) <= TOLERANCE


def first_span(result: Result) -> Result:
    """Return the result as if it had ended with its first version."""
    _, _, end = result.versions[0]
    mask = sampling_mask_of(result.mask)
    record = MaskRecord(
        result.mask.counts[:end],
        bytearray(mask.token_ids[: mask.offsets[end]].astype("<i4").tobytes()),
        result.mask.logprobs[:end],
    )
    assert result.finished is not None and result.finished.routed_experts is not None
    rows = result.routes[: len(result.prompt_ids) + end - 1]
    routed = msgspec.structs.replace(result.finished.routed_experts, data=rows.tobytes(), num_rows=len(rows))
    spans = result.finished.weight_versions[:1]
    finished = msgspec.structs.replace(result.finished, routed_experts=routed, weight_versions=spans)
    return dataclasses.replace(result, token_ids=result.token_ids[:end], mask=record, finished=finished)


def test_a_pause_that_retracts_keeps_masks(folders: list[Path]) -> None:
    harness = Harness(folders[0])
    results = [harness.results[rid] for rid in asked(harness)]
    for _ in range(6):
        harness.tick()
    harness.control(PauseGenerationReqInput, mode="retract")
    harness.control(ContinueGenerationReqInput)
    harness.run()
    models = models_of(folders, ["default"])
    assert max(worst(result, mix, models) for result, mix in zip(results, MIXES)) <= TOLERANCE
    assert all(result.finished and result.finished.num_retractions for result in results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_engines_operators_only_the_last_sum_differs(folders: list[Path], dtype: str) -> None:
    """Logits have the engine's bits then, and log-probabilities come from a sum of float32 over the mask."""
    harness = Harness(folders[0], dtype=dtype)
    results = [harness.results[rid] for rid in asked(harness)]
    harness.run()
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad(), use_engine_numerics(model, dtype=getattr(torch, dtype)):
        for result, mix in zip(results, MIXES[:-1]):
            ids = torch.tensor(result.prompt_ids + result.token_ids)
            logits = model(ids[None]).logits[0, len(result.prompt_ids) - 1 : -1]
            mask = sampling_mask_of(result.mask)
            replayed = masked_logprobs(logits, ids[len(result.prompt_ids) :], mask, mix.get("temperature", 1.0))
            torch.testing.assert_close(replayed, torch.tensor(result.mask.logprobs), rtol=0, atol=2e-6)


def test_support_mode_gives_every_id_its_logprob(folders: list[Path]) -> None:
    harness = Harness(folders[0])
    prompt, params = prompts_of(1)[0], {"temperature": 1.0, "top_p": 0.8, "max_new_tokens": 12}
    rid = harness.submit(prompt, params=params, return_sampling_mask=True, sampling_logprobs_mode="support")
    harness.run()
    record = harness.results[rid].mask
    mask, values = sampling_mask_of(record), np.frombuffer(bytes(record.kept_logprobs), dtype="<f4")
    assert len(values) == len(mask.token_ids)
    sums = np.add.reduceat(np.exp(values.astype(np.float64)), mask.offsets[:-1])
    np.testing.assert_allclose(sums, 1.0, atol=1e-5)
    sampled = np.repeat(harness.results[rid].token_ids, np.diff(mask.offsets)) == mask.token_ids
    np.testing.assert_array_equal(values[sampled], np.array(record.logprobs, dtype=np.float32))


def test_a_mask_over_the_limit_ends_its_request_and_no_other(folders: list[Path]) -> None:
    """The record holds no token without its mask, and the engine keeps no part of the request."""
    harness = Harness(folders[0], sampling_mask_max_tokens=8)
    wide = {"temperature": 1.0, "min_p": 1e-6, "max_new_tokens": 10}
    narrow = {"temperature": 1.0, "top_k": 8, "max_new_tokens": 10}
    asks = [(wide, True, False), (narrow, True, False), (wide, True, True), (wide, False, False)]
    rids = [
        harness.submit(prompt, params=params, return_sampling_mask=masked, stream=stream)
        for prompt, (params, masked, stream) in zip(prompts_of(4), asks)
    ]
    harness.run()
    for rid, refused in zip(rids, (True, False, True, False)):
        result = harness.results[rid]
        assert result.finished is not None
        reason = result.finished.reason
        assert (reason.type == "abort") is refused, reason
        if refused:
            assert reason.status_code == 400 and "--sampling-mask-max-tokens is 8" in str(reason.message)
            assert len(result.token_ids) == len(result.mask.counts) == 0
        else:
            assert len(result.token_ids) == 10
    harness.check_idle()


@pytest.mark.mutant
@pytest.mark.parametrize(
    "wrong",
    [
        lambda kept: [ids[:-1] if len(ids) > 1 and ids[-1] != 0 else ids for ids in kept],
        lambda kept: [sorted({*ids, 0}) for ids in kept],
        lambda kept: [kept[0], *kept[:-1]],
    ],
    ids=["one id is missing", "one id too many", "masks of the token before"],
)
def test_a_wrong_mask_is_noticed(folders: list[Path], wrong: Callable[[list[list[int]]], list[list[int]]]) -> None:
    harness = Harness(folders[0])
    result = harness.generate(
        prompts_of(1), params={"temperature": 1.0, "top_k": 6, "max_new_tokens": 12}, return_sampling_mask=True
    )[0]
    models = models_of(folders, ["default"])
    assert worst(result, {"top_k": 6}, models) <= TOLERANCE
    mask = SamplingMask.from_lists(wrong(sampling_mask_of(result.mask).to_lists()))
    record = dataclasses.replace(
        result.mask, counts=np.diff(mask.offsets).tolist(), token_ids=bytearray(mask.token_ids.astype("<i4").tobytes())
    )
    with contextlib.suppress(MaskValueError):  # the sampled token is not among them
        assert worst(dataclasses.replace(result, mask=record), {"top_k": 6}, models) > TOLERANCE
