"""A PEFT model under engine numerics: the bits of an engine with its adapter, and the gradients of the model.

Real schedulers sample, with the adapter and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn

from capture.replay import force_routes, record_routes
from rollout.adapters.peft_folder import LoraWeights
from rollout.core.errors import Conflict, UnsupportedFeature
from rollout.numerics import EngineNumerics, adapters, use_engine_numerics
from rollout.numerics.adapters import SlotAssembly
from tests.adapters import ATTENTION, DENSE, save_adapter
from tests.family_zoo import family_checkpoint
from tests.invariance import Ask
from tests.kernels import native_ops
from tests.numerics import Batch, disagreements, gradient_errors, gradients, trainer_model
from tests.scheduler_harness import Harness

SEED = 3
LEAST_AGREEMENT = 2e-4  # a loss in float32 under both, so only the order of sums differs
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LINEAR = {"r": 6, "lora_alpha": 9, "rank_pattern": {"o_proj": 3}}
STACKED = {"target_parameters": EXPERTS, "lora_alpha": 9}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**LINEAR, "target_modules": ATTENTION},
    "qwen3": {**LINEAR, "target_modules": ATTENTION + DENSE},
    "deepseek_v3": {
        **LINEAR,
        "target_modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    },
    "gpt_oss": {**LINEAR, "target_modules": ATTENTION},
    "qwen3_next": {**LINEAR, "target_modules": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj")},
    "qwen3_moe experts": {**STACKED, "target_modules": ["q_proj"], "r": 8, "rank_pattern": {"experts.down_proj": 1}},
    "deepseek_v3 experts": {**STACKED, "target_modules": ["o_proj"], "r": 64},
    "gpt_oss experts": {**STACKED, "target_modules": [], "r": 8, "rank_pattern": {"experts.gate_up_proj": 3}},
}
GATE = ("qwen3_moe", "qwen3", "qwen3_moe experts")
EACH_CASE = [pytest.param(name, marks=() if name in GATE else pytest.mark.full) for name in CASES]


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    native_ops()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


class Served:
    """A family's checkpoint and an adapter of it, and the samples of an engine that serves both."""

    def __init__(self, folder: Path, case: str) -> None:
        self.name = name = case.split()[0]
        self.folder = family_checkpoint(folder / "m", name, SEED, torch.bfloat16)
        config = {**CASES[case], "target_modules": list(CASES[case]["target_modules"])}
        self.max_rank = max(8, config["r"])
        self.adapter = save_adapter(folder / "a", name, SEED, **config)
        self.with_adapter, self.without = (self.samples(each) for each in ("a", None))

    def samples(
        self, adapter: str | None, count: int = 6, dtype: str = "bfloat16", other: Path | None = None
    ) -> tuple[list[Ask], list[Any]]:
        """Return what was asked and sampled, in one batch.  With `other` every second request has that adapter."""
        paths = f"a={self.adapter}" if other is None else f"a={self.adapter},b={other}"
        settings = {"enable_lora": True, "lora_paths": paths, "max_lora_rank": self.max_rank}
        is_moe = self.name != "qwen3"
        harness = Harness(self.folder, dtype=dtype, enable_return_routed_experts=is_moe, **settings)
        generator = torch.Generator().manual_seed(0)
        asks = []
        for number in range(count):
            prompt = torch.randint(3, 300, (2 + 9 * number,), generator=generator).tolist()
            asks.append(Ask(tuple(prompt), {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": number}))
        names = [adapter, adapter if other is None else "b"] * count
        rids = [
            harness.submit(list(ask.prompt), params=dict(ask.params), lora_name=name) for ask, name in zip(asks, names)
        ]
        harness.run()
        facts = []
        for result in (harness.results[rid] for rid in rids):
            routes = result.routes if is_moe else None
            logprobs = np.array(result.logprobs)
            facts.append(SimpleNamespace(token_ids=result.token_ids, logprobs=logprobs, routes=routes))
        return asks, facts

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Return PEFT's model with the adapter, both in training mode; the adapter is in float32."""
        model = peft.PeftModel.from_pretrained(
            trainer_model(self.folder, dtype, self.name), self.adapter, is_trainable=True
        )
        return model.train()


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("adapted"), getattr(request, "param", "qwen3_moe"))


@pytest.mark.parametrize("served", EACH_CASE, indirect=True, scope="module")
class TestCases:
    def test_log_probabilities_and_routes_are_the_engines(self, served: Served) -> None:
        model = served.model()
        with use_engine_numerics(model) as numerics:
            assert numerics.batch_invariant
            assert disagreements(model, numerics, *served.with_adapter) == []
            assert disagreements(model, numerics, *served.without), "the adapter must count"
            with model.disable_adapter():
                assert disagreements(model, numerics, *served.without) == []
            assert disagreements(model, numerics, *served.with_adapter) == []

    def test_gradients_are_those_of_the_model(self, served: Served) -> None:
        """They agree in float32, of the adapter alone: the model is frozen."""
        model, batch = served.model(torch.float32), Batch.of(*served.with_adapter)
        with use_engine_numerics(model, dtype=torch.float32) as numerics:
            found = gradients(model, batch, by_engine=True)
        wanted = gradients(model, batch, numerics.routes)
        assert found.keys() == wanted.keys() and all(".lora_" in name for name in wanted)
        assert max(gradient_errors(found, wanted).values()) < LEAST_AGREEMENT


with_experts = pytest.mark.parametrize("served", ["qwen3_moe experts"], indirect=True, scope="module")


@with_experts
def test_adapters_of_experts_agree_in_float32_with_forced_routes(served: Served) -> None:
    """Routes that the engine did not choose are followed, forward and backward; the model's own weights train, too."""
    model, samples = served.model(torch.float32), served.samples("a", 4, "float32")
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        assert disagreements(model, numerics, *samples) == []
        other = numerics.routes.roll(1, 1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp.experts." in name)
        batch = Batch.of(*samples)
        other = torch.where(other < 0, torch.arange(other.shape[-1]), other)
        found = gradients(model, batch, other, by_engine=True)
    wanted = gradients(model, batch, other)
    assert found.keys() == wanted.keys() and any(name.endswith("base_layer.gate_up_proj") for name in wanted)
    assert max(gradient_errors(found, wanted).values()) < LEAST_AGREEMENT


@pytest.mark.full
@pytest.mark.parametrize("served", ["qwen3_moe experts"], indirect=True, scope="module")
def test_the_active_one_of_two_adapters_of_experts_counts(served: Served, tmp_path: Path) -> None:
    """They differ in rank.  The engine has both in one batch, the trainer one after the other."""
    other = save_adapter(tmp_path / "b", served.name, SEED, 5, **STACKED, target_modules=["q_proj"], r=3)
    asks, facts = served.samples("a", other=other)
    sampled = {"default": (asks[::2], facts[::2]), "b": (asks[1::2], facts[1::2])}
    model = served.model()
    model.load_adapter(other, "b", is_trainable=True)
    with use_engine_numerics(model) as numerics:
        for active, inactive in (("default", "b"), ("b", "default"), ("default", "b")):
            model.set_adapter(active)
            assert disagreements(model, numerics, *sampled[active]) == []
            assert disagreements(model, numerics, *sampled[inactive]), "the adapter must count"


def test_an_adapter_of_each_expert_is_named_by_its_matrix() -> None:
    """Models whose experts are modules, as PEFT adapts them one by one."""
    experts = nn.ModuleList([nn.ModuleDict({"down_proj": nn.Linear(4, 4)})])
    each = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["down_proj"]), each)
    assert list(adapters.active_adapter(each)) == ["mlp.experts.0.down_proj"]
    assert adapters.adapts_experts(each) and adapters.greatest_rank(each) == 2


def test_the_adapter_is_read_at_every_forward(served: Served) -> None:
    """After a step of an optimiser, and after another adapter became active."""
    model = served.model()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with use_engine_numerics(model) as numerics:
        model.set_adapter("other")  # its B is zero
        assert disagreements(model, numerics, *served.without) == []
        model.set_adapter("default")
        assert disagreements(model, numerics, *served.with_adapter) == []
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        gradients(model, Batch.of(*served.with_adapter), by_engine=True)
        optimizer.step()
        assert disagreements(model, numerics, *served.with_adapter), "the adapter is another"


@pytest.mark.parametrize("served", ["qwen3_moe", "qwen3_moe experts"], indirect=True, scope="module")
def test_a_backward_is_of_the_adapter_of_its_forward(served: Served) -> None:
    """A forward of the reference model, without the adapter, comes between forward and backward."""
    model, batch = served.model(torch.float32), Batch.of(*served.with_adapter)

    def found(between: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=batch.input_ids, attention_mask=batch.mask).logits
        if between:
            with model.disable_adapter(), torch.no_grad():
                model(input_ids=batch.input_ids, attention_mask=batch.mask)
        logits[batch.mask.bool()].logsumexp(-1).sum().backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    with use_engine_numerics(model, dtype=torch.float32):
        wanted, got = found(between=False), found(between=True)
    assert wanted.keys() == got.keys() and any(each.any() for each in wanted.values())
    assert all(torch.equal(each, got[name]) for name, each in wanted.items())


@pytest.mark.parametrize("served", ["qwen3_moe", "qwen3_moe experts"], indirect=True, scope="module")
def test_parameters_may_lie_in_one_flat_tensor(served: Served) -> None:
    """Trainers that shard or fuse matrices keep views that start somewhere in a storage."""
    model, batch = served.model(torch.float32), Batch.of(*served.with_adapter)
    with use_engine_numerics(model, dtype=torch.float32):
        wanted = gradients(model, batch, by_engine=True)
        trained = [each for each in model.parameters() if each.requires_grad]
        flat = torch.cat([torch.zeros(3), *(each.detach().flatten() for each in trained)])
        for each, values in zip(trained, flat[3:].split([each.numel() for each in trained]), strict=True):
            each.data = values.view_as(each)
        found = gradients(model, batch, by_engine=True)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(each, found[name]) for name, each in wanted.items())


def test_routes_are_forced_on_a_model_of_peft(served: Served) -> None:
    """The hooks find the routers inside of the PEFT model."""
    model = served.model(torch.float32)
    ids = Batch.of(*served.with_adapter).input_ids
    with torch.no_grad():
        with record_routes(model) as recorded:
            model(input_ids=ids, use_cache=False)
        other = recorded.ids().unflatten(0, ids.shape).flip(-1).roll(1, 0)
        with force_routes(model, other), record_routes(model) as forced:
            model(input_ids=ids, use_cache=False)
    assert torch.equal(forced.ids(), other.flatten(0, 1))


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(model: Any, message: str) -> None:
    with pytest.raises(UnsupportedFeature, match=message):
        use_engine_numerics(model)


def test_what_the_engine_cannot_serve_is_refused(served: Served) -> None:
    base = trainer_model(served.folder, torch.bfloat16)
    refused(
        peft.get_peft_model(base, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])), "'default' is IA3"
    )
    for settings, message in (
        ({"target_modules": ["q_proj"], "use_dora": True}, "adapted by a variant"),
        ({"target_modules": ["q_proj"], "lora_dropout": 0.1}, "dropout"),
        ({"target_modules": ["embed_tokens"]}, "routed experts: model.embed_tokens is none"),
    ):
        base = trainer_model(served.folder, torch.bfloat16)
        refused(peft.get_peft_model(base, peft.LoraConfig(r=2, **settings)), message)


def test_a_parameter_of_another_module_than_experts_is_refused(served: Served) -> None:
    base = trainer_model(served.folder, torch.bfloat16)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.gate.weight"])
    refused(peft.get_peft_model(base, config), "linear layers and of routed experts: .*gate is none")


def test_merged_adapters_and_several_are_refused(served: Served) -> None:
    model = served.model()
    model.merge_adapter()
    refused(model, "not merged")
    model.unmerge_adapter()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    refused(model, "one active adapter, got default, other")


def test_the_model_inside_is_in_use_too(served: Served) -> None:
    model = served.model()
    with use_engine_numerics(model), pytest.raises(Conflict):
        use_engine_numerics(model.get_base_model())
    with use_engine_numerics(model) as numerics:
        assert isinstance(numerics, EngineNumerics)


# --- mistakes are noticed ---------------------------------------------------------------------------------------------


@pytest.mark.mutant
def test_a_scale_that_is_left_out_is_noticed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = served.model(), adapters.active_adapter
    monkeypatch.setattr(
        "rollout.numerics.model.active_adapter",
        lambda model: {name: each._replace(scale=1.0) for name, each in read(model).items()},
    )
    with use_engine_numerics(model) as numerics:
        assert disagreements(model, numerics, *served.with_adapter)


@pytest.mark.mutant
def test_gradients_of_another_place_are_noticed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = served.model(torch.float32), Batch.of(*served.with_adapter)
    right = SlotAssembly.gradients
    monkeypatch.setattr(
        SlotAssembly, "gradients", lambda self, gradient, wanted: right(self, gradient.roll(1, -1), wanted)
    )
    with use_engine_numerics(model, dtype=torch.float32) as numerics:
        found = gradients(model, batch, by_engine=True)
    assert max(gradient_errors(found, gradients(model, batch, numerics.routes)).values()) > LEAST_AGREEMENT


def _scale_twice(modules: dict[str, LoraWeights]) -> dict[str, LoraWeights]:
    return {name: each._replace(scale=each.scale**2) for name, each in modules.items()}


def _next_experts(modules: dict[str, LoraWeights]) -> dict[str, LoraWeights]:
    return {name: LoraWeights(each.a.roll(1, 0), each.b.roll(1, 0), each.scale) for name, each in modules.items()}


@pytest.mark.mutant
@with_experts
@pytest.mark.parametrize("wrong", [_scale_twice, _next_experts])
def test_wrong_adapters_of_experts_are_noticed(
    served: Served, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., dict[str, LoraWeights]]
) -> None:
    """A scale that is applied twice, and matrices of the expert before."""
    model, read = served.model(), adapters.active_adapter

    def wrongly(model: Any) -> dict[str, LoraWeights]:
        found = read(model)
        return {**found, **wrong({name: each for name, each in found.items() if ".experts." in name})}

    monkeypatch.setattr("rollout.numerics.model.active_adapter", wrongly)
    with use_engine_numerics(model) as numerics:
        assert disagreements(model, numerics, *served.with_adapter)
