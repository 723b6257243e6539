"""`use_engine_numerics` as a trainer meets it: batches of every form, the model afterwards, and refusals."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import Parameter
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from rollout.core.errors import BadRequest, Conflict, UnsupportedFeature
from rollout.kernels.build import KernelStatus
from rollout.numerics import use_engine_numerics
from rollout.numerics.sequences import Sequences
from tests.family_zoo import family_checkpoint
from tests.kernels import native_ops
from tests.numerics import trainer_model

LONGEST = 256  # positions of the zoo's models


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    native_ops()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("numerics") / "m", "qwen3_moe", 3, torch.bfloat16)


@pytest.fixture
def model(folder: Path) -> Any:
    return trainer_model(folder, torch.bfloat16)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 320, shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_sequence_has_the_same_bits_in_every_batch(model: Any) -> None:
    """It is alone, padded on either side, in a packed row or among others, with a mask or with positions."""
    one, two = tokens(1, 9), tokens(1, 14)
    with use_engine_numerics(model) as numerics, torch.no_grad():
        want, other = model(input_ids=one).logits[0], model(input_ids=two).logits[0]
        assert model(input_ids=one).logits.shape == (1, 9, 320)
        left, right = torch.zeros(2, 14, dtype=torch.int64), torch.zeros(2, 14, dtype=torch.int64)
        left[0, 5:], right[0, :9] = one, one
        left[1], right[1] = two, two
        is_token = torch.arange(14) < 9
        for ids, mask in ((left, is_token.flip(0)), (right, is_token)):
            both = torch.stack([mask, torch.ones_like(mask)])
            positions = (both.cumsum(1) - 1).clamp(min=0)
            for given in ({}, {"position_ids": positions}):
                logits = model(input_ids=ids, attention_mask=both.long(), **given).logits
                assert torch.equal(logits[0, mask], want) and torch.equal(logits[1], other)
                assert not logits[0, ~mask].any()
                assert numerics.routes is not None and (numerics.routes[0, ~mask] == -1).all()
        packed = torch.cat((one, two), dim=1)
        positions = torch.cat((torch.arange(9), torch.arange(14)))[None]
        logits = model(input_ids=packed, position_ids=positions).logits[0]
        assert torch.equal(logits[:9], want) and torch.equal(logits[9:], other)
        assert not torch.equal(model(input_ids=packed).logits[0, 9:], other), "one sequence without the positions"


@pytest.mark.parametrize("keep", [1, 4, torch.tensor([2, 5, 8])])
def test_only_the_logits_that_are_wanted(model: Any, keep: int | torch.Tensor) -> None:
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[1, 7:] = 0
    positions = slice(-keep, None) if isinstance(keep, int) else keep
    with use_engine_numerics(model):
        whole = model(input_ids=ids, attention_mask=mask).logits
        some = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits
        assert torch.equal(some, whole[:, positions])
        some.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_outputs_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    dense = trainer_model(family_checkpoint(tmp_path / "m", "qwen3", 3), torch.float32)
    with use_engine_numerics(model), use_engine_numerics(dense) as numerics:
        output = model(tokens(1, 4), use_cache=False, return_dict=True)
        assert isinstance(output, MoeCausalLMOutputWithPast) and output.logits.dtype == torch.bfloat16
        assert isinstance(dense(input_ids=tokens(1, 4)), CausalLMOutputWithPast)
        assert dense(input_ids=tokens(1, 4)).logits.dtype == torch.float32 and numerics.routes is None
        assert torch.equal(model(tokens(1, 4), return_dict=False)[0], output.logits)
        with torch.inference_mode():
            assert torch.equal(model(tokens(1, 4)).logits, output.logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(tokens(1, 4)).logits, output.logits)
        assert torch.equal(model.eval()(tokens(1, 4)).logits, output.logits)


def test_made_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        numerics = use_engine_numerics(model)
        want = model(tokens(1, 4)).logits
    with numerics:
        found = model(tokens(1, 4)).logits
        found.float().sum().backward()
    assert torch.equal(found, want)


def test_gradients_of_two_forwards_add_up(model: Any) -> None:
    """The packed weights of one forward are gone when its gradient is computed."""
    grads = []
    with use_engine_numerics(model):
        for batches in ([tokens(2, 5)], [tokens(1, 7)], [tokens(2, 5), tokens(1, 7)]):
            model.zero_grad()
            sum(model(input_ids=ids).logits.float().square().sum() for ids in batches).backward()
            grads.append([parameter.grad.float() for parameter in model.parameters()])
    assert all(torch.allclose(a + b, c, rtol=0.05, atol=1e-3 * c.abs().max()) for a, b, c in zip(*grads))


def test_frozen_parameters_get_no_gradient(model: Any) -> None:
    model.requires_grad_(False)
    trained = {"model.layers.1.mlp.experts.down_proj", "model.layers.0.self_attn.k_proj.weight"}
    for name in trained:
        model.get_parameter(name).requires_grad_()
    with use_engine_numerics(model):
        model(input_ids=tokens(1, 6)).logits.float().square().sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_a_weight_that_changes_before_its_gradient_is_an_error(model: Any) -> None:
    with use_engine_numerics(model):
        loss = model(input_ids=tokens(1, 6)).logits.float().sum()
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- the model afterwards --------------------------------------------------------------------------------------------


def test_the_model_is_restored(model: Any) -> None:
    before, want = dict(vars(model)), model(tokens(1, 6)).logits
    numerics = use_engine_numerics(model)
    assert not torch.equal(model(tokens(1, 6)).logits, want)
    with pytest.raises(Conflict, match="already"):
        use_engine_numerics(model)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    numerics.remove()
    numerics.remove()
    assert vars(model) == before and torch.equal(model(tokens(1, 6)).logits, want)
    with pytest.raises(ZeroDivisionError), use_engine_numerics(model):
        _ = 1 / 0
    assert vars(model) == before


def test_it_is_not_copied(model: Any) -> None:
    with use_engine_numerics(model):
        with pytest.raises(UnsupportedFeature, match="copied"):
            copy.deepcopy(model)
        with pytest.raises(UnsupportedFeature, match="pickled"):
            torch.save(model, io.BytesIO())
    copy.deepcopy(model)


def test_a_forward_that_fails_leaves_nothing(model: Any) -> None:
    with use_engine_numerics(model) as numerics:
        want = model(tokens(1, 6)).logits
        routes = numerics.routes
        with pytest.raises(BadRequest):
            model(tokens(1, 6) + 320)
        with torch.no_grad():
            handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(1, 6))
        handle.remove()
        assert torch.equal(model(tokens(1, 6)).logits, want) and torch.equal(numerics.routes, routes)


# --- refusals --------------------------------------------------------------------------------------------------------


class Adapted(nn.Linear):
    """A projection as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, dtype=torch.bfloat16)
        self.base_layer, self.lora_A = base, nn.Linear(base.in_features, 2, bias=False, dtype=torch.bfloat16)


def set_adapter(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)


def rename(model: Any, name: str) -> None:
    model.__class__ = type(name, (type(model),), {})


def set_parameter(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change_it(model: Any) -> None:
        module, _, attribute = name.rpartition(".")
        held = getattr(model.get_submodule(module), attribute)
        setattr(model.get_submodule(module), attribute, Parameter(change(held.detach())))

    return change_it


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another family": (
        lambda model: setattr(model, "__class__", type("BertForMaskedLM", (type(model),), {})),
        "BertForMaskedLM is not supported; the engine serves",
    ),
    "adapters": (set_adapter, "lora_A|base_layer"),
    "an adapter around the whole": (lambda model: rename(model, "PeftModel"), "PeftModel is not supported"),
    "float16": (set_parameter("lm_head.weight", torch.Tensor.half), "lm_head.weight is torch.float16"),
    "another shape": (set_parameter("lm_head.weight", lambda held: held[:-1]), "shape"),
    "two devices": (set_parameter("lm_head.weight", lambda held: held.to("meta")), "one device"),
    "a missing tensor": (lambda model: delattr(model.model.norm, "weight"), "missing"),
    "quantised": (lambda model: setattr(model, "hf_quantizer", object()), "quantised"),
    "dropout in attention": (lambda model: setattr(model.config, "attention_dropout", 0.1), "attention_dropout is 0.1"),
    "dropout": (lambda model: model.model.add_module("drop", nn.Dropout(0.2)), "model.drop has 0.2"),
    "an option": (lambda model: setattr(model.config, "hidden_act", "gelu"), "hidden_act"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_are_refused(model: Any, what: str) -> None:
    change, reason = REFUSED[what]
    change(model)
    before = dict(vars(model))
    with pytest.raises(UnsupportedFeature, match=reason):
        use_engine_numerics(model)
    assert vars(model) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_are_refused(model: Any, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedFeature, match=str(dtype)):
        use_engine_numerics(model, dtype=dtype)


def test_without_compiled_operators_numerics_are_refused_or_marked_inexact(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused with the reason, unless `allow_inexact` is set; then `batch_invariant` is false."""
    monkeypatch.setattr("rollout.numerics.checks.load_kernels", lambda: KernelStatus(False, "no C++ compiler"))
    with pytest.raises(UnsupportedFeature, match="no C\\+\\+ compiler"):
        use_engine_numerics(model)
    with use_engine_numerics(model, allow_inexact=True) as numerics:
        assert not numerics.batch_invariant
        found = model(input_ids=tokens(2, 9)).logits
        found.float().square().sum().backward()
    distances = (found - model(input_ids=tokens(2, 9)).logits).abs().amax(-1).flatten()
    assert (distances < 0.3).float().mean() >= 0.8  # on some processors rounding sends a token to other experts
    assert all(parameter.grad is not None for parameter in model.parameters())


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, BadRequest, "input_ids"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 3, 64)}, BadRequest, "input_ids"),
    "a cache": ({"input_ids": tokens(1, 3), "use_cache": True}, UnsupportedFeature, "use_cache"),
    "router logits": ({"input_ids": tokens(1, 3), "output_router_logits": True}, UnsupportedFeature, "router_logits"),
    "labels": ({"input_ids": tokens(1, 3), "labels": tokens(1, 3)}, UnsupportedFeature, "labels"),
    "one dimension": ({"input_ids": tokens(3)}, BadRequest, "input_ids must be"),
    "numbers": ({"input_ids": torch.zeros(1, 3)}, BadRequest, "input_ids must be"),
    "a token too high": ({"input_ids": torch.tensor([[3, 320]])}, BadRequest, "320"),
    "a negative token": ({"input_ids": torch.tensor([[3, -100]])}, BadRequest, "-100"),
    "no token": ({"input_ids": tokens(2, 0)}, BadRequest, "no token"),
    "only padding": (
        {"input_ids": tokens(1, 2), "attention_mask": torch.zeros(1, 2, dtype=torch.int64)},
        BadRequest,
        "no token",
    ),
    "a mask with holes": (
        {"input_ids": tokens(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])},
        BadRequest,
        "holes",
    ),
    "a mask of four dimensions": (
        {"input_ids": tokens(1, 3), "attention_mask": torch.ones(1, 1, 3, 3)},
        BadRequest,
        "attention_mask must be",
    ),
    "positions from one": (
        {"input_ids": tokens(1, 3), "position_ids": torch.tensor([[1, 2, 3]])},
        BadRequest,
        "count up from 0",
    ),
    "positions that jump": (
        {"input_ids": tokens(1, 3), "position_ids": torch.tensor([[0, 2, 3]])},
        BadRequest,
        "count up from 0",
    ),
    "positions of left padding": (
        {
            "input_ids": tokens(1, 3),
            "attention_mask": torch.tensor([[0, 1, 1]]),
            "position_ids": torch.tensor([[0, 1, 2]]),
        },
        BadRequest,
        "count up from 0",
    ),
    "positions of another length": (
        {"input_ids": tokens(1, 3), "position_ids": torch.tensor([[0, 1]])},
        BadRequest,
        "position_ids",
    ),
    "too long": ({"input_ids": tokens(1, LONGEST + 1)}, BadRequest, "longer than"),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_are_refused(model: Any, what: str) -> None:
    arguments, kind, reason = CALLS[what]
    with use_engine_numerics(model), pytest.raises(kind, match=reason):
        model(**arguments)


def test_a_model_that_becomes_another(model: Any) -> None:
    with use_engine_numerics(model):
        with pytest.raises(UnsupportedFeature, match="float16"):
            model.half()(input_ids=tokens(1, 3))
        model.float()(input_ids=tokens(1, 3))
        with pytest.raises(UnsupportedFeature, match="one device"):
            model.to("meta")(input_ids=tokens(1, 3))


def test_what_else_is_refused(model: Any) -> None:
    with use_engine_numerics(model):
        with pytest.raises(UnsupportedFeature, match="not supported under engine numerics"):
            model.generate(tokens(1, 3), max_new_tokens=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable()
        with pytest.raises(UnsupportedFeature, match="checkpointing"):
            model(input_ids=tokens(1, 3))


# --- sequences -------------------------------------------------------------------------------------------------------


def test_sequences_of_a_batch() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    positions = torch.tensor([[9, 0, 1, 2], [0, 1, 7, 7], [0, 0, 0, 0], [0, 1, 0, 1]])
    sequences = Sequences.of(torch.arange(16).view(4, 4), mask, positions)
    assert sequences.lengths == [3, 2, 2, 2]
    assert sequences.token_ids.tolist() == [1, 2, 3, 4, 5, 12, 13, 14, 15]
    assert sequences.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 1]
    spread = sequences.spread(sequences.token_ids, -1).view(4, 4)
    assert torch.equal(spread, torch.where(mask.bool(), torch.arange(16).view(4, 4), -1))
    batch = sequences.step(has_states=True)
    assert [row[:n].tolist() for row, n in zip(batch.req_to_token, sequences.lengths)] == [
        [0, 1, 2],
        [3, 4],
        [5, 6],
        [7, 8],
    ]
    assert batch.states is not None and batch.states.sources.tolist() == [-1] * 4


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
