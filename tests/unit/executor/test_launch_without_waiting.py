"""A turn of the loop waits for the device only to get the results of the step that it finishes.

Engines on a stand-in of a device (`tests/device_stand_in.py`) run the same operators as engines on the CPU.  Their
outputs have the same bits.  Calls that do wait are listed, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.make_checkpoint.run import make_checkpoint
from rollout.attention import torch_native
from rollout.core import host_copy
from rollout.core.host_copy import HostCopies
from rollout.core.messages.io_struct import AbortReqInput, ContinueGenerationReqInput, PauseGenerationReqInput
from rollout.engine import build
from rollout.executor import input_builder
from rollout.memory import kv_pool
from rollout.memory.cache_manager import CacheManager
from rollout.sampling import torch_sampler
from rollout.sampling.base import PlainTokens, SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.torch_sampler import TorchSampler
from tests.device_engine import device_engine, stand_in_device
from tests.device_stand_in import DEVICE, HostWaitsError
from tests.family_zoo import FAMILIES, family_checkpoint, with_experts
from tests.model_zoo import tiny_spec
from tests.scheduler_harness import Harness, Result

RANDOM = {"temperature": 0.8, "sampling_seed": 7}
# A step of these requests costs transfers to the device, and no wait.
WITHOUT_WAITING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "random": (RANDOM, {"stream": True}),
    "top_k": (RANDOM | {"top_k": 5}, {}),
    "top_p": (RANDOM | {"top_p": 0.5}, {}),
    "bias": ({"logit_bias": {3: 2.0}}, {}),
    "minimum": ({"min_new_tokens": 5, "stop_token_ids": list(range(0, 250, 2))}, {}),
    "penalties": (RANDOM | {"repetition_penalty": 1.5, "frequency_penalty": 1.0}, {}),
    "logprobs": ({}, {"top_logprobs_num": 3, "token_ids_logprob": [1, 2]}),
    "prompt": ({}, {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [4]}),
}
# The size of a mask is known only once it is computed.
WITH_WAITING = {"mask": (RANDOM | {"top_k": 5}, {"return_sampling_mask": True})}
SETTINGS: dict[str, Any] = {"chunked_prefill_size": 8, "max_total_tokens": 64, "return_sampling_mask": True}
PROMPTS = [list(range(1, 20)), [5, 6, 7], list(range(1, 17)), [9] * 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("waits") / "model", tiny_spec(seed=1))


def facts(result: Result) -> tuple:
    finished = result.finished
    assert finished is not None
    scored = finished.prompt_logprobs
    routes = result.routes.tolist()
    prompt = scored and (scored.values, scored.alternatives)
    return (result.token_ids, result.logprobs, result.top, result.chosen, finished.reason.type, routes, prompt)


def generate(harness: Harness, kinds: list[str]) -> list[tuple]:
    """Run requests of all kinds at once, in chunks and with retractions in a small pool; then a prefix hit."""
    for prompt in PROMPTS:
        for kind in kinds:
            params, fields = (WITHOUT_WAITING | WITH_WAITING)[kind]
            harness.submit(prompt, params={"max_new_tokens": 9} | params, **fields)
    harness.run()
    for _ in range(2):
        (again,) = harness.generate([PROMPTS[0]], {"max_new_tokens": 5})
    assert again.finished is not None and again.finished.cached_tokens
    harness.check_idle()
    return [facts(result) for result in harness.results.values()]


def on_the_cpu(folder: Path, kinds: list[str], *, overlaps: bool = True) -> list[tuple]:
    """Run the requests on the CPU, by the same loop.

    Another loop makes other batches, which change the last bits on plain torch.
    """
    settings = SETTINGS | {"disable_native_kernels": True, "disable_overlap_schedule": not overlaps}
    return generate(Harness(folder, **settings), kinds)


@pytest.mark.parametrize(
    "kinds", [["greedy", "random"], *([kind] for kind in WITHOUT_WAITING), list(WITHOUT_WAITING)], ids="-".join
)
@pytest.mark.full(but="greedy-random")
def test_no_turn_waits_and_everything_is_the_same(folder: Path, kinds: list[str]) -> None:
    want = on_the_cpu(folder, kinds)
    with stand_in_device() as device:
        harness = device_engine(folder, **SETTINGS)
        assert harness.scheduler.runner.kv_pool.k[0].device == DEVICE
        with device.refusing():
            assert generate(harness, kinds) == want
        if len(kinds) > 1:
            assert harness.scheduler.stats.num_retractions


class PlainRowsSampler(TorchSampler):
    """A sampler that takes the short way for plain rows, as the sampler of CUDA devices does."""

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        device = logits_NV.device
        rows = self.plain_rows(info, device)
        assert rows is not None
        out = PlainTokens.empty(len(logits_NV), 0, device)
        self.sample_plain(logits_NV, rows, host_copy.to_device(positions_N, device), out)
        return SampledTokens.plain(out, info)


def test_plain_rows_come_without_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rows are made anew, behind a running forward, whenever a request joins or leaves."""
    monkeypatch.setattr(build, "select_sampler", lambda *_: PlainRowsSampler())
    want = on_the_cpu(folder, ["greedy", "random"])
    with stand_in_device() as device:
        harness = device_engine(folder, **SETTINGS)
        with device.refusing():
            assert generate(harness, ["greedy", "random"]) == want


@pytest.mark.parametrize("kind", WITH_WAITING)
def test_kinds_of_requests_that_wait_for_the_device_are_listed(folder: Path, kind: str) -> None:
    want = on_the_cpu(folder, [kind])
    with stand_in_device() as device:
        harness = device_engine(folder, **SETTINGS)
        waits = device.num_waits
        assert generate(harness, [kind]) == want and device.num_waits > waits
        with device.refusing(), pytest.raises(HostWaitsError):
            generate(harness, [kind])


def test_without_overlap_a_step_waits_for_its_own_results(folder: Path) -> None:
    want = on_the_cpu(folder, ["greedy"], overlaps=False)
    with stand_in_device() as device:
        harness = device_engine(folder, disable_overlap_schedule=True, **SETTINGS)
        with device.refusing():
            assert generate(harness, ["greedy"]) == want


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_no_model_family_waits_for_the_device(family: str, tmp_path: Path) -> None:
    """Latent attention, windows, sinks and recurrent states do not wait outside of their operators.

    The stand-in does not look inside an operator.
    """
    folder = family_checkpoint(tmp_path / "model", family, 1, torch.float32)
    settings = {"enable_return_routed_experts": family in with_experts(), "chunked_prefill_size": 8}
    on_cpu = Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False, **settings)
    want = [result.token_ids for result in on_cpu.generate(PROMPTS, {"max_new_tokens": 8})]
    with stand_in_device() as device:
        harness = device_engine(folder, **settings)
        with device.refusing():
            assert [result.token_ids for result in harness.generate(PROMPTS, {"max_new_tokens": 8})] == want


def in_the_midst(harness: Harness) -> list[tuple]:
    """Pause in both modes, and abort, each while a step is in flight; return the results."""
    rids = [harness.submit(prompt, params={"max_new_tokens": 30}) for prompt in PROMPTS]
    for mode in ("in_place", "retract"):
        for _ in range(5):
            harness.tick()
        assert harness.scheduler._in_flight is not None
        assert harness.control(PauseGenerationReqInput, mode=mode).success
        assert harness.scheduler._in_flight is None
        assert harness.control(ContinueGenerationReqInput).success
    for _ in range(3):
        harness.tick()
    harness.channel.inbox.append(AbortReqInput(rids=rids[:1]))
    harness.run()
    harness.check_idle()
    return [facts(harness.results[rid]) for rid in rids]


def test_pauses_and_aborts_wait_for_the_step_in_flight_alone(folder: Path) -> None:
    want = in_the_midst(Harness(folder, disable_native_kernels=True, disable_overlap_schedule=False))
    assert [reason for *_, reason, _, _ in want] == ["abort", "length", "length", "length"]
    with stand_in_device() as device:
        harness = device_engine(folder)
        with device.refusing():
            assert in_the_midst(harness) == want


# --- wrong engines ----------------------------------------------------------------------------------------------------


def lengths_from_the_device(patch: pytest.MonkeyPatch) -> None:
    """Plan attention by lengths that are read on the device (wrong)."""
    plan = torch_native._plan_decode

    def planned(batch: Any, dtype: torch.dtype) -> Any:
        batch.decode = batch.decode._replace(seq_lens_host=batch.decode.seq_lens)
        return plan(batch, dtype)

    patch.setattr(torch_native, "_plan_decode", planned)


def from_pageable_memory(patch: pytest.MonkeyPatch) -> None:
    """Send a step's inputs from pageable memory (wrong)."""
    for module in (host_copy, kv_pool, input_builder, torch_sampler):
        patch.setattr(module, "to_device", lambda tensor, device: tensor.to(device, non_blocking=True))


def blocking_results(patch: pytest.MonkeyPatch) -> None:
    """Copy results to the host at once (wrong)."""
    patch.setattr(HostCopies, "copy", lambda self, tensor: tensor.cpu())


def looks_at_a_token(patch: pytest.MonkeyPatch) -> None:
    """Make the sampler branch on the tokens that it sampled (wrong)."""
    sample = TorchSampler.sample

    def sampled(self: TorchSampler, *args: Any) -> Any:
        tokens = sample(self, *args)
        assert bool((tokens.token_ids >= 0).all())
        return tokens

    patch.setattr(TorchSampler, "sample", sampled)


def picks_by_a_mask(patch: pytest.MonkeyPatch) -> None:
    """Select the rows of logits by a mask (wrong)."""
    built = input_builder._with_extends

    def with_mask(*args: Any) -> Any:
        batch = built(*args)
        batch.logits_rows = torch.zeros_like(batch.input_ids).index_fill_(0, batch.logits_rows, 1) > 0
        return batch

    patch.setattr(input_builder, "_with_extends", with_mask)


def slots_of_the_device(patch: pytest.MonkeyPatch) -> None:
    """Read a request's slots in the table on the device (wrong)."""
    patch.setattr(CacheManager, "slots", lambda self, req, start, end: self.pool.table[req.pool_index, start:end].cpu())


WRONG = [lengths_from_the_device, from_pageable_memory, blocking_results, looks_at_a_token]


@pytest.mark.parametrize("wrong", [*WRONG, picks_by_a_mask, slots_of_the_device], ids=lambda wrong: wrong.__name__)
@pytest.mark.mutant
def test_a_wait_is_noticed(
    folder: Path, wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    with stand_in_device() as device:
        harness = device_engine(folder, **SETTINGS)
        with device.refusing(), pytest.raises(HostWaitsError):
            generate(harness, ["greedy"])


@pytest.mark.mutant
def test_results_that_are_read_too_early_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong engine reads the results of a step without its event."""
    want = on_the_cpu(folder, ["greedy"])
    monkeypatch.setattr(HostCopies, "wait", lambda self, wait_for: None)
    with stand_in_device(), pytest.raises((AssertionError, IndexError)):  # garbage is no slot and no token
        assert generate(device_engine(folder, **SETTINGS), ["greedy"]) == want
