"""Whole engines with the settings that change what is held or how tokens are found: keys and values in FP8, weights in
8 and 4 bits, prompts of latents in expanded form, and a draft model.

Each is compared with an engine that differs in that setting alone, within rounding.  `--quantization` is of CUDA: a dry
run holds the weights by `--cpu-weight-format` and `--cpu-linear-format` instead, which have kernels of their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.attention import flashinfer_expanded
from rollout.attention.registry import ATTENTION_BACKENDS
from rollout.core.forward_batch import ForwardBatch
from rollout.executor.graph_runner import GraphRunner
from rollout.families.registry import load_model_config
from tests.family_zoo import family_checkpoint
from tests.gpu.engines import LOGPROB_SLACK, checkpoint, disagreement, engine, graphs_of, recordings
from tests.gpu.needs import need_module
from tests.gpu.numbers import error_of
from tests.gpu.test_attention import FLASHINFER_HOW
from tests.gpu.test_parity import SIZES
from tests.local_refresh import refresh
from tests.model_zoo import logical_tensors
from tests.scheduler_harness import Harness, Result

PROMPTS = [[(7 * i + 3 * j) % 300 for j in range(9 + 11 * i)] for i in range(4)]
K_SCALE, V_SCALE = 0.0131, 3.5
FP8_SLACK = 0.2  # measured on a CPU: 0.07 to 0.09; 2.4 where scales are not read


@pytest.fixture(autouse=True)
def _recordings(device: torch.device) -> Iterator[None]:
    with recordings(device):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "model", device, seed=1)


def scores(harness: Harness, sequences: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of every token but the first."""
    found: list[float] = []
    for one in harness.generate(sequences, {"max_new_tokens": 0}, logprob_start_len=0):
        assert one.finished is not None and one.finished.prompt_logprobs is not None
        found += one.finished.prompt_logprobs.values[1:]
    return torch.tensor(found)


# --- keys and values in FP8 -------------------------------------------------------------------------------------------


def with_scales(folder: Path, plain: Path) -> Path:
    """Copy a checkpoint, and add scales of keys and values to it."""
    shutil.copytree(plain, folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")  # else it is the only file that is read
    layers = range(load_model_config(plain).num_hidden_layers)
    sides = (("k", K_SCALE), ("v", V_SCALE))
    scales = {f"model.layers.{i}.self_attn.{side}_scale": torch.tensor(scale) for i in layers for side, scale in sides}
    save_file(scales, folder / "scales.safetensors")
    return folder


@pytest.mark.parametrize("scaled", [False, True], ids=["scales of 1", "scales of the checkpoint"])
def test_an_engine_with_keys_and_values_in_fp8(
    scaled: bool, tmp_path: Path, device: torch.device, facts: dict[str, Any]
) -> None:
    """Compare scores with an engine of whole keys, and scores of samples with scores of the same tokens as a prompt."""
    plain = checkpoint(tmp_path / "model", device, "dense", seed=1)
    served, dense = (
        with_scales(tmp_path / "scaled", plain) if scaled else plain,
        {"enable_return_routed_experts": False},
    )
    whole, held = engine(plain, device, **dense), engine(served, device, kv_cache_dtype="fp8_e4m3", **dense)
    assert held.scheduler.runner.kv_pool.stored == torch.float8_e4m3fn
    results = held.generate(PROMPTS, {"max_new_tokens": 12})
    sequences = [one.prompt_ids + one.token_ids for one in results]
    near, exact = scores(held, sequences), scores(whole, sequences)
    facts |= {
        "mean difference": (near - exact).abs().mean().item(),
        "attention": type(held.scheduler.runner.attention).__name__,
    }
    assert 0 < facts["mean difference"] < FP8_SLACK + LOGPROB_SLACK[device.type] / 2
    ends = torch.tensor([len(sequence) - 1 for sequence in sequences]).cumsum(0).tolist()
    again = [near[end - 12 : end] for end in ends]
    for one, scored in zip(results, again, strict=True):
        assert (torch.tensor(one.logprobs) - scored).abs().max() < 0.01 + 2 * LOGPROB_SLACK[device.type]


# --- weights in 8 and 4 bits ------------------------------------------------------------------------------------------


def holding(form: str, folder: Path, device: torch.device) -> Harness:
    """Start an engine that holds experts and projections in this form."""
    if device.type == "cuda":
        return engine(folder, device, quantization=form)
    return engine(folder, device, dtype="bfloat16", cpu_weight_format=form, cpu_linear_format=form)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_an_engine_that_holds_weights_in_fewer_bits(
    form: str, folder: Path, device: torch.device, facts: dict[str, Any]
) -> None:
    """It answers as an engine that got the values which it holds, in bfloat16, by a refresh."""
    held, whole = holding(form, folder, device), engine(folder, device, dtype="bfloat16")
    weights, original = held.scheduler.runner.state.model.weights, logical_tensors(folder)
    values = {name: weights.places(name)[0].read().cpu() for name in weights.metas()}
    errors = [error_of(value, original[name]) for name, value in values.items() if value.dim() == 2]
    quantised = [error for error in errors if error > 0.005]
    facts |= {"quantised": len(quantised), "error of values": max(errors)}
    assert len(quantised) > len(errors) // 2 and max(errors) < {"fp8": 0.04, "int4": 0.15}[form]
    assert refresh(whole, values, "values").success
    params = {"max_new_tokens": 12}
    answers = [harness.generate(PROMPTS, params) for harness in (held, whole)]
    sequences = [one.prompt_ids + one.token_ids for one in answers[0]]
    difference = (scores(held, sequences) - scores(whole, sequences)).abs()
    facts |= {"median difference": difference.median().item(), "largest": difference.max().item()}
    assert facts["median difference"] < LOGPROB_SLACK["cuda"] / 2  # of bfloat16 on either device
    assert all(len(one.token_ids) == 12 for one in answers[0])


# --- prompts in expanded form -----------------------------------------------------------------------------------------


def test_an_engine_that_expands_prompts_of_latents(
    tmp_path: Path, device: torch.device, on_cuda: bool, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    """Prompts in chunks, with a shared prefix and next to others that decode, give the answers of the absorbed form."""
    expanded: list[int] = []
    backend = flashinfer_expanded.FlashInferExpandedBackend
    attend = backend.attend_expanded
    monkeypatch.setattr(
        backend, "attend_expanded", lambda self, *given: expanded.append(len(given[2])) or attend(self, *given)
    )
    monkeypatch.setattr(flashinfer_expanded, "saves_products", lambda form, lens, prefixes: bool(lens.sum()))
    sizes, names, more = SIZES["deepseek_v3"], ("flashinfer", "flashinfer_expanded"), {}
    if on_cuda:
        need_module("flashinfer", FLASHINFER_HOW)
    else:
        sizes = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
        names, more = ("torch_native", "flashinfer_expanded"), {"disable_native_kernels": True}
        in_unit_test = ("tests.unit.attention.test_flashinfer_expanded", "OnStandIn")
        monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer_expanded", in_unit_test)
    model = family_checkpoint(tmp_path / "model", "deepseek_v3", 3, **sizes, num_hidden_layers=2)
    answers = []
    for name in names:
        harness = engine(model, device, attention_backend=name, chunked_prefill_size=16, **more)
        assert not expanded or name == names[1]
        answers.append(harness.generate([PROMPTS[3][:n] + PROMPTS[1] for n in (0, 30, 17)], {"max_new_tokens": 8}))
    facts["calls in expanded form"] = len(expanded)
    assert max(expanded) == 16
    assert disagreement(*answers, LOGPROB_SLACK[device.type]) is None


# --- a draft model ----------------------------------------------------------------------------------------------------


class Verified:
    """Counts the steps that verify drafts: as replays of a whole recording, and as others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.replayed = self.other = 0
        forward = GraphRunner.forward

        def counted(runner: GraphRunner, batch: ForwardBatch, with_routes: bool) -> Any:
            found = forward(runner, batch, with_routes)
            if len(batch.logits_rows) > len(batch.extend_lens) + len(batch.decode.seq_lens):
                self.replayed += found is not None
                self.other += found is None
            return found

        patch.setattr(GraphRunner, "forward", counted)


def drafted(folder: Path, draft: Path, device: torch.device) -> Harness:
    """Start an engine that verifies all that the draft proposes."""
    settings: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    settings |= {"speculative_num_draft_tokens": 3, "max_running_requests": 4}
    harness = engine(folder, device, cuda_graph_max_bs=16, context_length=256, **settings)
    harness.scheduler._steps._drafting._choice = None
    return harness


@pytest.mark.parametrize("same", [True, False], ids=["the model itself", "another model"])
def test_an_engine_with_a_draft_model(
    same: bool,
    folder: Path,
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
) -> None:
    """Answers are those without drafts; steps that verify are replayed; a draft with the same weights is kept."""
    draft = folder if same else checkpoint(tmp_path / "draft", device, seed=9)
    counts, results = Verified(monkeypatch), []
    plain, harness = engine(folder, device, context_length=256), drafted(folder, draft, device)
    for one in (plain, harness):
        results.append(answered(one))
    assert disagreement(*results, LOGPROB_SLACK[device.type]) is None
    tally = harness.scheduler._steps._drafting.counts
    facts |= {"drafted": tally.num_drafted, "kept": tally.num_kept, "replayed": counts.replayed, "other": counts.other}
    assert tally.num_drafted > 20 and (not same or tally.num_kept > 0.7 * tally.num_drafted)
    graphs_of(harness)
    assert counts.replayed > 3


def answered(harness: Harness) -> list[Result]:
    rids = []
    for number, prompt in enumerate(PROMPTS):
        random = {"temperature": 0.9, "sampling_seed": number} if number % 2 else {}
        rids.append(harness.submit(prompt, params={"max_new_tokens": 16 + number} | random))
        harness.tick()
    harness.run()
    harness.check_idle()
    return [harness.results[rid] for rid in rids]
