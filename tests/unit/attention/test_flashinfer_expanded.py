"""Prompts of latent attention in expanded form, on FlashInfer's stand-in: against float64, in rounds, in an engine.

Shapes: T tokens, P positions, H heads, R rank of latents, rd rotated elements, v value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.attention import flashinfer_expanded
from rollout.attention.base import LatentForm
from rollout.attention.flashinfer_expanded import (
    ExpandedPrompts,
    FlashInferExpandedBackend,
    rounds_of,
    saves_products,
)
from rollout.attention.flashinfer_sequences import StepSequences
from rollout.attention.registry import ATTENTION_BACKENDS, create_attention_backend
from rollout.core.args.checks import check_settings
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import FullKV, LatentKV
from rollout.memory.kv_pool import KVPool
from tests.attention_steps import TOLERANCES, AttentionSteps, LayerCase, Layout
from tests.family_zoo import family_checkpoint
from tests.flashinfer_stand_in import stand_in
from tests.kernels import error
from tests.scheduler_harness import Harness

FORM = LatentForm(num_heads=4, nope=64, rotary=64, value=128, rank=128, scale=0.1)
PUBLISHED = LatentForm(num_heads=128, nope=128, rotary=64, value=128, rank=512, scale=0.1)
MIXED = Layout([(0, 0, 9), (3, 17, 30), (1, 40, 12), (2, 0, 5), (4, 33, 3)], [(5, 70)])
DTYPE = torch.bfloat16


class Step:
    """Steps of one latent layer, with the matrix [H (nope + v), R] that makes keys and values of latents."""

    def __init__(self, form: LatentForm = FORM, device: str = "cpu") -> None:
        """Make steps over the stand-in, or on CUDA over the package."""
        case = LayerCase(LatentKV(form.rank, form.rotary), form.num_heads, scale=form.scale)
        self.form, self.steps = form, AttentionSteps([case], DTYPE, device=device)
        generator = torch.Generator().manual_seed(1)
        rows = form.num_heads * (form.nope + form.value)
        self.weight = (torch.randn(rows, form.rank, generator=generator) / form.rank**0.5).to(DTYPE)
        self.library = stand_in() if device == "cpu" else import_module("flashinfer")
        new_event = self.library.Event if device == "cpu" else None
        self.backend = FlashInferExpandedBackend(self.steps.pool, self.library, new_event)

    def expand(self, latents_PL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        form, weight = self.form, self.weight.to(latents_PL.device).double()
        plain, turned = latents_PL.double().split([form.rank, form.rotary], 1)
        both = (plain @ weight.t()).unflatten(1, (form.num_heads, -1))
        shared = turned.unsqueeze(1).expand(-1, form.num_heads, -1)
        keys = torch.cat((both[..., : form.nope], shared), 2)
        return keys.to(latents_PL.dtype), both[..., form.nope :].to(latents_PL.dtype)

    def queries(self, layout: Layout) -> torch.Tensor:
        return self.steps.q(0, layout)[..., : self.form.nope + self.form.rotary].contiguous()

    def exact(self, layout: Layout) -> torch.Tensor:
        """Return the values [T, H v] of the prompts, in float64."""
        found, row, queries = [], 0, self.queries(layout).cpu().double()
        for request, cached, new in layout.extends:
            keys, values = self.expand(self.steps.keys[0][request, : cached + new, 0].double())
            scores = torch.einsum("thd,phd->htp", queries[row : row + new], keys) * self.form.scale
            ahead = torch.arange(cached + new) > torch.arange(cached, cached + new)[:, None]
            found.append(torch.einsum("htp,phv->thv", scores.masked_fill(ahead, -torch.inf).softmax(-1), values))
            row += new
        return torch.cat(found).flatten(1)

    def check(self, layout: Layout) -> None:
        """Attend twice, as two layers do, and compare the prompts and the tokens that decode."""
        form = self.form
        self.backend.plan(self.steps.batch(layout))
        cut = sum(new for _, _, new in layout.extends)
        assert self.backend.expanded_tokens(form) == cut
        decodes = self.steps.q(0, layout)[cut:]
        for _ in range(2):
            values, latents = self.backend.attend_expanded(0, form, self.queries(layout)[:cut], decodes, self.expand)
            # keys and values are rounded, and parts of a result once more
            assert error(values.cpu(), self.exact(layout)) < 1.5 * TOLERANCES[DTYPE]
            alone = Layout(decodes=layout.decodes)
            want = self.steps.exact(0, alone) if layout.decodes else torch.empty(0, form.num_heads * form.rank)
            assert latents.shape == want.shape and (
                not layout.decodes or error(latents.cpu(), want) < TOLERANCES[DTYPE]
            )


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """Return steps in which all prompts are expanded, whatever that costs."""
    monkeypatch.setattr(flashinfer_expanded, "saves_products", lambda *_: True)
    return Step()


@pytest.mark.parametrize("most", [8192, 32, 7])
def test_prompts_agree_with_float64(step: Step, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are joined in one round and in several; the next step has other lengths."""
    monkeypatch.setattr(flashinfer_expanded, "_ROUND", most)
    for layout in (MIXED, Layout([(0, 0, 20)]), Layout([(3, 47, 2), (0, 9, 1)], [(5, 71), (4, 8)]), MIXED):
        step.check(layout)


def test_a_round_has_neighbours_with_prefixes_alone() -> None:
    rounds = rounds_of(np.array([0, 5, 3, 0, 9, 0, 1]), 6)
    assert [(each.sequences, each.first_n.tolist(), each.counts_n.tolist()) for each in rounds] == [
        (slice(1, 3), [0, 0], [5, 1]),
        (slice(2, 3), [1], [2]),
        (slice(4, 5), [0], [6]),
        (slice(4, 5), [6], [3]),
        (slice(6, 7), [0], [1]),
    ]
    assert rounds_of(np.array([0, 0]), 6) == []


def test_prefixes_are_expanded_for_enough_new_tokens() -> None:
    """DeepSeek-V3 saves 768 products a query and key, and expands a latent by 131,072: 171 new tokens pay for it."""
    prefix = np.array([1 << 20])
    assert [saves_products(PUBLISHED, np.array([new]), prefix) for new in (170, 172)] == [False, True]
    assert saves_products(PUBLISHED, np.array([1]), np.array([0])), "a prompt without a prefix always saves"
    assert not saves_products(PUBLISHED, np.array([], dtype=np.int64), np.array([], dtype=np.int64))


def test_a_step_of_too_many_rounds_is_absorbed(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, cut in ((3, 12), (2, 0)):
        monkeypatch.setattr(flashinfer_expanded, "_ROUND", 15)
        monkeypatch.setattr(flashinfer_expanded, "_MAX_ROUNDS", most)
        step.backend.plan(step.steps.batch(Layout([(1, 40, 12)])))
        assert step.backend.expanded_tokens(FORM) == cut


def test_a_step_that_saves_nothing_is_absorbed() -> None:
    step = Step()
    step.backend.plan(step.steps.batch(Layout([(1, 40, 12)])))
    assert step.backend.expanded_tokens(FORM) == 0
    step.backend.plan(step.steps.batch(Layout(decodes=[(5, 70)])))
    assert step.backend.expanded_tokens(FORM) == 0
    captured = step.backend.for_graph(1)
    captured.plan(step.steps.batch(Layout(decodes=[(5, 70)])))
    assert captured.expanded_tokens(FORM) == 0


def test_sizes_without_a_kernel_are_refused_before_a_step_needs_one() -> None:
    """The largest step runs at startup.  It may save nothing, and a later one something."""
    step = Step()
    step.backend.plan(step.steps.batch(Layout([(1, 40, 12)])))
    with pytest.raises(StartupError, match="no kernel for keys of 48 elements and values of 32: give flashinfer"):
        step.backend.expanded_tokens(FORM._replace(nope=32, rotary=16, value=32))


# --- engines ----------------------------------------------------------------------------------------------------------


class OnStandIn(FlashInferExpandedBackend):
    """The backend that `create_attention_backend` makes, for an engine on a CPU."""

    expanded: list[int] = []

    def __init__(self, kv: KVPool) -> None:
        library = stand_in((torch.float32, torch.bfloat16))
        super().__init__(kv, library, library.Event)

    @staticmethod
    def obstacle(kv: KVPool, kernels_available: bool) -> str | None:
        return None

    def attend_expanded(self, layer: int, form: LatentForm, prompts: torch.Tensor, *rest: Any) -> Any:
        self.expanded.append(len(prompts))
        return super().attend_expanded(layer, form, prompts, *rest)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer_expanded", (__name__, "OnStandIn"))
    monkeypatch.setattr(OnStandIn, "expanded", [])
    monkeypatch.setattr(flashinfer_expanded, "saves_products", lambda form, lens, prefixes: bool(lens.sum()))
    yield


def test_an_engine_answers_as_with_torch(engines: None, tmp_path: Path) -> None:
    """Requests share prefixes, come in chunks, and run among others that decode."""
    sizes = {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
    folder = family_checkpoint(tmp_path / "model", "deepseek_v3", 3, **sizes, num_hidden_layers=2)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 300, 30).tolist()
    prompts = [shared[:n] + rng.integers(3, 300, m).tolist() for n, m in ((0, 3), (30, 5), (30, 21), (17, 1))]
    answers = []
    for name in ("torch_native", "flashinfer_expanded"):
        harness = Harness(folder, attention_backend=name, disable_native_kernels=True, chunked_prefill_size=16)
        answers.append(harness.generate(prompts, {"max_new_tokens": 6}))
    assert OnStandIn.expanded and max(OnStandIn.expanded) == 16
    for ours, theirs in zip(*answers):
        assert ours.token_ids == theirs.token_ids and len(ours.token_ids) == 6
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_models_sizes_and_settings_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, reason in ((FullKV(2, 128), "which this model lacks"), (LatentKV(512, 64), "runs on CUDA, not on cpu")):
        with pytest.raises(StartupError, match=f"--attention-backend flashinfer_expanded: it .*{reason}"):
            create_attention_backend("flashinfer_expanded", KVPool(4, [kind], DTYPE))
    with pytest.raises(StartupError, match="no kernel for keys of 48 elements and values of 32: give flashinfer"):
        ExpandedPrompts(stand_in(), FORM._replace(nope=32, rotary=16, value=32), (DTYPE, DTYPE), torch.zeros(1))
    with pytest.raises(StartupError, match="flashinfer_expanded does not apply adapters"):
        check_settings(ServerArgs(model_path="m", attention_backend="flashinfer_expanded", enable_lora=True))


# --- mistakes are noticed ---------------------------------------------------------------------------------------------


@pytest.mark.mutant
@pytest.mark.parametrize(
    "wrong", ["not causal", "prefixes left out", "slots of the new tokens", "sums of another base"]
)
def test_wrong_plans_are_noticed(step: Step, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, slots_of = ExpandedPrompts._plan, StepSequences.slots_of
    if wrong == "not causal":
        monkeypatch.setattr(ExpandedPrompts, "_plan", lambda self, w, q, k, causal: plan(self, w, q, k, False))
    elif wrong == "prefixes left out":
        monkeypatch.setattr(flashinfer_expanded, "rounds_of", lambda *_: [])
    elif wrong == "slots of the new tokens":
        monkeypatch.setattr(
            StepSequences, "slots_of", lambda self, which, first, counts: slots_of(self, which, 0 * first, counts)
        )
    else:
        merge = step.library.merge_state_in_place
        step.library.merge_state_in_place = lambda v, s, other, its: merge(v, s, other, its * 0.7)
    with pytest.raises(AssertionError):
        step.check(MIXED)
