"""Plans that a sender keeps: replayed without a step of Python a tensor, and never for a source that has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.logical_weights_fake import bits
from weight_sync.bucket import plan_buckets
from weight_sync.fingerprint import digest, fingerprint
from weight_sync.sender import source as forms
from weight_sync.sender.plan import TensorSource, plan_tensors
from weight_sync.sender.refresh_plan import KeptPlans, Settings
from weight_sync.sender.source import Source, SourceForm

EXPERTS = "layers.0.mlp.experts"
SETTINGS = Settings(None, True, 1 << 20, torch.device("cpu"), None)
_fits = SourceForm.fits

Sent = tuple[list[list[tuple[str, str, bytes]]], dict[str, int], str | None]


def sent(plans: KeptPlans, source: TensorSource, settings: Settings = SETTINGS) -> Sent:
    """Return what a refresh sends: (name, dtype, bytes) of each bucket's tensors, the fingerprints and the digest."""
    listed = Source(source)
    plan = plans.find(listed, settings, None)
    gatherer = plan.gatherer(listed, None)
    prints = gatherer.fingerprints()
    buckets = []
    for bucket in plan.layout.buckets:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        content = b"".join(bits(piece) for piece in gatherer.gather(bucket, flat))
        tensors = []
        for name, dtype, shape in zip(bucket.lists.names, bucket.lists.dtypes, bucket.lists.shapes, strict=True):
            size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            tensors.append((name, dtype, content[:size]))
            content = content[size:]
        assert not content
        buckets.append(tensors)
    values = dict(zip(plan.contents.lists.names, prints.values.tolist(), strict=True))
    return buckets, values, plan.contents.digest(prints)


def check(plans: KeptPlans, source: TensorSource, settings: Settings = SETTINGS) -> None:
    """Require that what is sent is the source as it is now."""
    found = sent(plans, source, settings)
    plan = plan_tensors(source, settings.dtype, settings.split_experts)
    buckets = [[meta.name for meta in bucket] for bucket in plan_buckets(plan.metas, settings.bucket_bytes)]
    assert [[name for name, _, _ in bucket] for bucket in found[0]] == buckets
    contents = {name: part.piece.of(plan.sources[part.source]).to(part.meta.dtype) for name, part in plan.parts.items()}
    assert {name: content for bucket in found[0] for name, _, content in bucket} == {
        name: bits(tensor) for name, tensor in contents.items()
    }
    assert found[1] == {name: fingerprint(tensor) for name, tensor in contents.items()}
    assert found[2] == digest((part.meta, found[1][name]) for name, part in plan.parts.items())


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several sizes, dtypes and layouts, fused and tied ones among them."""
    torch.manual_seed(seed)
    tensors = {f"layers.{i}.w": torch.randn(8, 8) for i in range(12)}
    tensors["norm"] = torch.randn(8).bfloat16()
    tensors["step"] = torch.tensor(seed)
    tensors["long"] = torch.randn(3, 5000)
    tensors["empty"] = torch.empty(0, 4)
    tensors["column"] = torch.randn(8, 8).t()
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.randn(3, 8, 4)
    tensors[f"{EXPERTS}.down_proj"] = torch.randn(3, 4, 4)
    tensors["embed"] = torch.randn(6, 4)
    tensors["head"] = tensors["embed"]
    return tensors


# --- changes between two refreshes; each returns what is sent then ----------------------------------------------------

State = dict[str, torch.Tensor]


def _trained(state: State) -> State:
    for tensor in state.values():
        tensor.add_(1)
    return state


def _allocated_anew(state: State) -> State:
    return {name: tensor.clone() + 1 for name, tensor in state.items() if name != "head"}


def _taken_again(state: State) -> State:
    return {name: tensor.detach() for name, tensor in state.items()}


def _swapped_data(state: State) -> State:
    state["layers.3.w"].data = torch.full((8, 8), 5.0)
    return state


def _other_shape(state: State) -> State:
    state["layers.3.w"].data = torch.full((4, 16), 5.0)
    return state


def _other_size(state: State) -> State:
    state["layers.3.w"].data = torch.full((4, 4), 5.0)
    return state


def _other_dtype(state: State) -> State:
    state["layers.3.w"] = torch.full((8, 8), 5.0).half()
    return state


def _other_strides(state: State) -> State:
    state["layers.3.w"].data = torch.randn(8, 8).t()
    return state


def _other_scattered_strides(state: State) -> State:
    """Return the tied tensors as two that begin at one place, with steps of their own."""
    wide = torch.randn(12, 8)
    state["embed"], state["head"] = wide[::2, ::2], wide.view(6, 16)[:, ::4]
    return state


def _scattered_tie(state: State) -> State:
    wide = torch.randn(12, 8)
    state["embed"] = state["head"] = wide[::2, ::2]
    return state


def _other_order(state: State) -> State:
    return dict(reversed(state.items()))


def _two_exchanged(state: State) -> State:
    state["layers.1.w"], state["layers.2.w"] = state["layers.2.w"], state["layers.1.w"]
    return state


def _other_name(state: State) -> State:
    return {name.replace("layers.5", "layers.55"): tensor for name, tensor in state.items()}


def _untied(state: State) -> State:
    state["head"] = torch.randn(6, 4)
    return state


def _tied(state: State) -> State:
    state["layers.4.w"] = state["layers.7.w"]
    return state


def _one_less(state: State) -> State:
    del state["norm"]
    return state


def _one_more(state: State) -> State:
    state["extra"] = torch.randn(3)
    return state


def _emptied_and_filled(state: State) -> State:
    """Give memory back and take other memory, as a trainer does between its phases."""
    storage = state["long"].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    state["long"].copy_(torch.randn(3, 5000))
    return state


def _one_buffer(state: State) -> State:
    """Put all of one dtype end to end."""
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values() if tensor.dtype == torch.float32])
    at = 0
    for name, tensor in state.items():
        if tensor.dtype == torch.float32:
            state[name] = flat[at : at + tensor.numel()].view(tensor.shape)
            at += tensor.numel()
    return state


CHANGES: list[Callable[[State], State]] = [
    _trained,
    _allocated_anew,
    _taken_again,
    _swapped_data,
    _other_shape,
    _other_size,
    _other_dtype,
    _other_strides,
    _other_order,
    _two_exchanged,
    _other_name,
    _untied,
    _tied,
    _one_less,
    _one_more,
    _emptied_and_filled,
    _one_buffer,
]
SAME_PLAN = [_trained, _taken_again, _swapped_data, _two_exchanged, _emptied_and_filled]


def check_all_changes(as_pairs: bool) -> None:
    """Refresh, change, refresh, take it back and refresh again; and from each kind of tie to the other."""
    given: Callable[[State], TensorSource] = (lambda state: list(state.items())) if as_pairs else (lambda state: state)
    plans = KeptPlans()
    for change in CHANGES:
        check(plans, given(model()))
        check(plans, given(change(model(1))))
        check(plans, given(model(2)))
    check(plans, given(_scattered_tie(model())))
    check(plans, given(_other_scattered_strides(model())))
    check(plans, given(_scattered_tie(model())))


def check_all_settings() -> None:
    """Send one model in several ways: as a state and as pairs, in another dtype and in other buckets."""
    plans, state = KeptPlans(), model()
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    for source in (compiled, list(compiled.items()), state):
        check(plans, source)
    for settings in (replace(SETTINGS, dtype=torch.bfloat16), replace(SETTINGS, bucket_bytes=300)):
        check(plans, state)
        check(plans, state, settings)
    whole = sent(plans, state, replace(SETTINGS, split_experts=False))[0]
    assert f"{EXPERTS}.down_proj" in {name for bucket in whole for name, _, _ in bucket}


@pytest.mark.parametrize("as_pairs", [True, False])
def test_what_is_sent_is_the_source_as_it_is_after_each_change(as_pairs: bool) -> None:
    check_all_changes(as_pairs)


def test_other_settings_have_plans_of_their_own() -> None:
    check_all_settings()


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_holds_until_the_form_changes(change: Callable[[State], State]) -> None:
    plans, state = KeptPlans(), model()
    plan = plans.find(Source(state), SETTINGS, None)
    assert plans.find(Source(state), SETTINGS, None) is plan
    assert (plans.find(Source(change(model(1))), SETTINGS, None) is plan) == (change in SAME_PLAN)


def _without_names(form: SourceForm, source: Source) -> bool:
    names, source.names = source.names, form._names
    try:
        return _fits(form, source)
    finally:
        source.names = names


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "without names": lambda patch: patch.setattr(SourceForm, "fits", _without_names),
    "without shapes": lambda patch: patch.setattr(forms, "_SHAPE", lambda tensor: torch.Size([])),
    "without dtypes": lambda patch: patch.setattr(forms, "_DTYPE", lambda tensor: None),
    "without strides": lambda patch: patch.setattr(forms, "_strides", lambda source: {}),
    "without which are scattered": lambda patch: patch.setattr(
        forms, "_strides", lambda source: {0: next((it.stride() for it in source.locals), None)}
    ),
    "without ties": lambda patch: patch.setattr(forms, "_ties", lambda source: [0]),
    "without settings": lambda patch: patch.setattr(Settings, "__eq__", lambda one, other: True),
    "by number of tensors": lambda patch: patch.setattr(
        SourceForm, "fits", lambda form, source: len(form._names) == len(source.names)
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_key_that_lacks_something_is_caught(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong variant of the key sends something that the tests above notice."""
    WRONG[wrong](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        check_all_settings()
        check_all_changes(False)
        check_all_changes(True)


def test_no_more_than_three_plans_are_kept_and_the_last_used_are() -> None:
    plans = KeptPlans()
    states = [{f"w{i}": torch.ones(2)} for i in range(4)]
    first, *others = [plans.find(Source(state), SETTINGS, None) for state in states[:3]]
    assert plans.find(Source(states[0]), SETTINGS, None) is first
    plans.find(Source(states[3]), SETTINGS, None)
    assert len(plans._plans) == 3
    assert plans.find(Source(states[0]), SETTINGS, None) is first
    assert plans.find(Source(states[1]), SETTINGS, None) is not others[0]


def test_parameters_are_sent_as_they_are_while_they_take_part_in_training() -> None:
    """Pairs of `named_parameters()` require gradients, and no graph may grow through what is sent."""
    plans = KeptPlans()
    for seed in range(2):
        torch.manual_seed(seed)
        shapes = {"a": (8, 8), "b": (8, 8), "c": (3,), "large": (1 << 10, 1 << 10), "column": (4, 4)}
        named = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()]
        named[-1] = ("column", torch.nn.Parameter(torch.randn(4, 4).t()))
        assert all(parameter.requires_grad for _, parameter in named)
        sums = [(parameter * 2).sum() for _, parameter in named]
        check(plans, named)
        check(plans, named, replace(SETTINGS, dtype=torch.bfloat16))
        torch.stack(sums).sum().backward()
    assert len(plans._plans) == 2


def test_a_plan_keeps_no_memory_of_the_trainer() -> None:
    plans, state = KeptPlans(), model()
    sent(plans, state)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in state.values()]
    assert not any(storage.expired() for storage in storages)
    state.clear()
    assert all(storage.expired() for storage in storages)
    check(plans, model(1))


def _calls(work: Callable[[], Any]) -> int:
    """Count the calls of Python functions in `work`."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_replay_takes_no_step_of_python_a_tensor() -> None:
    """The second refresh of ten times as many tensors calls as many functions of Python, but for texts."""

    def calls(num_tensors: int) -> int:
        named = [(f"w{i}", torch.full((64,), float(i))) for i in range(num_tensors)]
        plans = KeptPlans()
        plans.find(Source(named), SETTINGS, None)

        def replay() -> None:
            listed = Source(named)
            plan = plans.find(listed, SETTINGS, None)
            gatherer = plan.gatherer(listed, None)
            prints = gatherer.fingerprints()
            prints.by_name(plan.contents.lists.names)
            plan.contents.digest(prints)
            for bucket in plan.layout.buckets:
                gatherer.gather(bucket, torch.empty(bucket.num_bytes, dtype=torch.uint8))

        replay()
        return _calls(replay)

    few, many = calls(100), calls(1000)
    assert many <= few + 5, (few, many)
