"""The form of a trainer's tensors when they are sent."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
import torch

from tests.gathered import Gathered
from tests.logical_weights_fake import DOWN, EMBED, GATE_UP, LM_HEAD, NORM, bits, expert_name, fused, version
from weight_sync.bucket import pack
from weight_sync.errors import TransactionStateError, WeightRequestError
from weight_sync.fingerprint import fingerprint
from weight_sync.sender import (
    EngineError,
    EngineReport,
    ProgressBar,
    RefreshReport,
    WeightSender,
    named_tensors_of,
    split_fused_experts,
)
from weight_sync.sender.link import split_pieces
from weight_sync.sender.meshes import SendingMeshes
from weight_sync.sender.plan import plan_tensors
from weight_sync.sender.statement import RefreshStatement, digest_of


class TiedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.LayerNorm(3, bias=False)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("bias", torch.ones(3))
        self.register_buffer("step", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_named_tensors_are_those_of_a_checkpoint_once_each() -> None:
    model = TiedModel()
    named = dict(named_tensors_of(model))
    assert list(named) == ["bias", "step", "embed_tokens.weight", "norm.weight"]
    assert named["embed_tokens.weight"].data_ptr() == model.embed_tokens.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in named.values())
    assert dict(named_tensors_of(model.state_dict())).keys() == named.keys()


def test_correction_biases_are_never_cast() -> None:
    """Engines hold them in float32, and refuse others."""
    state = {"gate.weight": torch.ones(2, 3), "gate.e_score_correction_bias": torch.ones(2)}
    named = dict(named_tensors_of(state, torch.bfloat16))
    assert [tensor.dtype for tensor in named.values()] == [torch.bfloat16, torch.float32]
    parts = plan_tensors(state, dtype=torch.bfloat16).parts
    assert [part.meta.dtype for part in parts.values()] == [torch.bfloat16, torch.float32]


def test_cast_leaves_integers_and_the_model_alone() -> None:
    model = TiedModel()
    named = dict(named_tensors_of(model, torch.bfloat16))
    assert {name: tensor.dtype for name, tensor in named.items()} == {
        "bias": torch.bfloat16,
        "step": torch.int64,
        "embed_tokens.weight": torch.bfloat16,
        "norm.weight": torch.bfloat16,
    }
    assert model.norm.weight.dtype == torch.float32


def test_equal_content_in_other_memory_is_not_a_tie() -> None:
    same = torch.ones(3)
    assert [name for name, _ in named_tensors_of({"a": same, "b": same.clone(), "c": same, "d": same[:2]})] == [
        "a",
        "b",
        "d",
    ]


def test_fused_experts_split_into_checkpoint_tensors() -> None:
    expected = version(1)
    split = dict(split_fused_experts(fused(expected).items()))
    assert split.keys() == expected.keys()
    for name, tensor in split.items():
        assert bits(tensor) == bits(expected[name])


def _interleaved(num_experts: int, hidden: int, inner: int) -> dict[str, torch.Tensor]:
    """Return random fused tensors of a GPT-OSS layer."""
    shapes = {
        "gate_up_proj": (num_experts, hidden, 2 * inner),
        "gate_up_proj_bias": (num_experts, 2 * inner),
        "down_proj": (num_experts, inner, hidden),
        "down_proj_bias": (num_experts, hidden),
    }
    generator = torch.Generator().manual_seed(0)
    return {f"layers.0.mlp.experts.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("sizes", [(3, 4, 6), (2, 5, 5), (2, 6, 3)])
def test_fused_experts_with_biases_are_interleaved_and_transposed(sizes: tuple[int, int, int]) -> None:
    fused_tensors = _interleaved(*sizes)
    gate_up, gate_up_bias, down, down_bias = fused_tensors.values()
    x = torch.randn(sizes[1], generator=torch.Generator().manual_seed(1))
    split = dict(split_fused_experts(fused_tensors.items()))
    assert len(split) == 6 * sizes[0]
    for e in range(sizes[0]):
        name = f"layers.0.mlp.experts.{e}"
        both = x @ gate_up[e] + gate_up_bias[e]  # as transformers' GPT-OSS computes it
        torch.testing.assert_close(split[f"{name}.gate_proj.weight"] @ x + split[f"{name}.gate_proj.bias"], both[::2])
        torch.testing.assert_close(split[f"{name}.up_proj.weight"] @ x + split[f"{name}.up_proj.bias"], both[1::2])
        out = both[::2] @ down[e] + down_bias[e]
        torch.testing.assert_close(split[f"{name}.down_proj.weight"] @ both[::2] + split[f"{name}.down_proj.bias"], out)


def test_buckets_and_fingerprints_of_interleaved_tensors_are_of_their_content() -> None:
    sources = _interleaved(3, 4, 6)
    plan, expected = plan_tensors(sources, torch.bfloat16), dict(split_fused_experts(sources.items()))
    gathered = Gathered(plan)
    assert gathered.fingerprints() == {name: fingerprint(tensor.bfloat16()) for name, tensor in expected.items()}
    flat = torch.zeros(sum(meta.nbytes for meta in plan.metas), dtype=torch.uint8)
    pieces = gathered.gather(0, flat)
    assert torch.equal(torch.cat(pieces), pack([(name, tensor.bfloat16()) for name, tensor in expected.items()]))


def test_splitting_fused_experts_gives_views() -> None:
    gate_up = fused(version(1))[GATE_UP]
    addresses = {tensor.untyped_storage().data_ptr() for _, tensor in split_fused_experts([(GATE_UP, gate_up)])}
    assert addresses == {gate_up.untyped_storage().data_ptr()}


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4)])
def test_split_refuses_what_is_not_fused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightRequestError, match="not a fused expert tensor"):
        split_fused_experts([(GATE_UP, torch.zeros(shape))])


def test_dense_tensors_pass_the_split_unchanged() -> None:
    named = [("model.layers.0.mlp.down_proj.weight", torch.zeros(2, 2)), (LM_HEAD, torch.zeros(1)), (EMBED, None)]
    assert split_fused_experts(named) == named  # type: ignore[arg-type]
    assert split_fused_experts([(DOWN, torch.zeros(1, 2, 3))])[0][0].endswith("experts.0.down_proj.weight")


class NoEngine:
    """An engine that no call may reach."""


def test_refresh_refuses_before_anything_is_asked() -> None:
    sender = WeightSender(NoEngine())  # type: ignore[arg-type]
    with pytest.raises(TransactionStateError, match="not connected"):
        sender.refresh([("a", torch.zeros(1))])
    with pytest.raises(WeightRequestError, match="given twice"):
        sender.refresh([("a", torch.zeros(1)), ("a", torch.zeros(1))])
    sender.close()


class Asked:
    """An engine of `num_ranks` ranks that notes each group that it is asked to join, and refuses."""

    def __init__(self, num_ranks: int | None) -> None:
        self.joined: list[int] = []
        if num_ranks is not None:
            self.get_world_size = lambda: num_ranks

    def init_weights_update_group(self, *, world_size: int, **_: object) -> None:
        self.joined.append(world_size)
        raise ConnectionError("seen")


@pytest.mark.parametrize(("num_ranks", "given", "world_size"), [(2, None, 3), (2, 2, 3), (None, None, 2), (None, 4, 5)])
def test_an_engine_says_how_many_ranks_join_n23(num_ranks: int | None, given: int | None, world_size: int) -> None:
    """N23: an engine of two ranks could not be joined by `connect()` alone."""
    engines = {"small": Asked(1), "asked": Asked(num_ranks)}
    sender = WeightSender({"asked": engines["asked"]} if given else engines)  # type: ignore[dict-item]
    with pytest.raises(EngineError, match="engine asked: ConnectionError: seen"):
        sender.connect(engine_world_size=given)
    assert engines["asked"].joined == [world_size]
    assert engines["small"].joined == ([] if given else [2])


class Wrapped:
    """Passes all calls on."""

    def __init__(self, engine: Asked) -> None:
        self._engine = engine

    def __getattr__(self, verb: str) -> object:
        return lambda **arguments: getattr(self._engine, verb)(**arguments)


def test_a_wrapper_of_an_engine_that_does_not_say_has_one_rank() -> None:
    engine = Asked(None)
    with pytest.raises(EngineError, match="ConnectionError: seen"):
        WeightSender(Wrapped(engine)).connect()  # type: ignore[arg-type]
    assert engine.joined == [2]


def test_another_number_of_ranks_than_the_engine_has_is_refused_before_it_joins() -> None:
    engine = Asked(2)
    with pytest.raises(EngineError, match="engine_world_size is 1, but the engine has 2 ranks; leave it out"):
        WeightSender(engine).connect(engine_world_size=1)  # type: ignore[arg-type]
    assert engine.joined == []


def test_a_plan_names_what_is_sent_and_copies_nothing() -> None:
    sources = fused(version(1))
    plan = plan_tensors(sources, torch.float16)
    expected = version(1)
    assert {name: part.meta.shape for name, part in plan.parts.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert {meta.dtype for meta in plan.metas} == {torch.float16}
    for name, part in plan.parts.items():
        assert torch.equal(part.piece.of(plan.sources[part.source]).to(expected[name].dtype), expected[name])
        assert plan.sources[part.source].data_ptr() == sources[part.source].data_ptr()
    unsplit = plan_tensors(sources, split_experts=False)
    assert unsplit.parts.keys() == sources.keys()
    assert {name for name, part in unsplit.parts.items() if part.is_fused} == {GATE_UP, DOWN}
    assert Gathered(unsplit).fingerprints().keys() == {EMBED, NORM}


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_bucket_goes_from_where_it_lies_unless_it_is_cast(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused tensors go in pieces of one expert each; the sent content is the same either way."""
    expert = version(1)[expert_name(0, "up_proj")]
    for module in ("layout", "link"):
        monkeypatch.setattr(f"weight_sync.sender.{module}.PIECE_BYTES", 2 * expert.nbytes)
    sources = fused(version(1))
    plan = plan_tensors({GATE_UP: sources[GATE_UP]}, dtype)
    flat = torch.zeros(sum(meta.nbytes for meta in plan.metas), dtype=torch.uint8)
    pieces = Gathered(plan).gather(0, flat)
    assert [piece.numel() for piece in pieces] == [piece.numel() for piece in split_pieces(plan.metas, flat)]
    assert len(pieces) == len(sources[GATE_UP])
    expected = pack([(meta.name, version(1)[meta.name].to(meta.dtype)) for meta in plan.metas])
    assert torch.equal(torch.cat(pieces), expected)
    storages = {piece.untyped_storage().data_ptr() for piece in pieces}
    assert storages == {(sources[GATE_UP] if dtype is None else flat).untyped_storage().data_ptr()}
    assert bool(flat.any()) == (dtype is not None)


def test_a_piece_is_packed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one can be on its way while the next one is packed."""
    expert = version(1)[expert_name(0, "up_proj")]
    monkeypatch.setattr("weight_sync.sender.layout.PIECE_BYTES", 2 * expert.nbytes)
    plan = plan_tensors({GATE_UP: fused(version(1))[GATE_UP]}, torch.float64)
    flat = torch.zeros(sum(meta.nbytes for meta in plan.metas), dtype=torch.uint8)
    done = 0
    for piece in Gathered(plan).each_piece(0, flat):
        done += piece.numel()
        assert flat[:done].any() and not flat[done:].any()
    assert done == flat.numel() > piece.numel()


def test_a_plan_refuses_two_tensors_of_one_name() -> None:
    tensors = fused(version(1))
    with pytest.raises(WeightRequestError, match="given twice"):
        plan_tensors([*tensors.items(), (f"{DOWN.removesuffix('down_proj')}1.down_proj.weight", torch.zeros(4, 2))])


def _stated(tensors: dict[str, torch.Tensor], **options: object) -> RefreshStatement:
    sent_as = {name: tensor.dtype for name, tensor in tensors.items()}
    return RefreshStatement.of(list(tensors.items()), sent_as, options, SendingMeshes([0]))


def test_statements_of_equal_refreshes_are_equal_bytes() -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
    first, again = _stated(tensors, x=1, y={"q": [1], "p": None}), _stated(tensors, y={"p": None, "q": [1]}, x=1)
    assert first.encoded() == again.encoded() and digest_of(first.encoded()) == digest_of(again.encoded())
    assert RefreshStatement.decoded(first.encoded()) == first
    assert first.difference(3, again) == ""


@pytest.mark.parametrize(
    ("tensors", "options", "expected"),
    [
        ({"a": torch.ones(2)}, {}, "do not have the same tensors: rank 3 lacks b"),
        ({"b": torch.ones(1), "a": torch.ones(2)}, {}, "tensor 0 is a on rank 0 and b on rank 3"),
        ({"a": torch.ones(2), "b": torch.ones(1, 1)}, {}, "the shape of b is [1] on rank 0 and [1, 1] on rank 3"),
        ({"a": torch.ones(2), "b": torch.ones(1).half()}, {}, "the dtype of b is float32 on rank 0 and float16"),
        (
            {"a": torch.ones(2), "b": torch.ones(1)},
            {"x": 2},
            "request different refreshes: x is not given on rank 0 and 2 on",
        ),
    ],
)
def test_statements_that_differ_name_the_difference(
    tensors: dict[str, torch.Tensor], options: dict[str, int], expected: str
) -> None:
    first, other = _stated({"a": torch.ones(2), "b": torch.ones(1)}), _stated(tensors, **options)
    assert digest_of(first.encoded()) != digest_of(other.encoded())
    assert expected in other.difference(3, first)


def test_names_of_a_compiled_model_are_the_model_s() -> None:
    named = named_tensors_of({"_orig_mod.model.norm.weight": torch.ones(2)})
    assert [name for name, _ in named] == ["model.norm.weight"]


def test_an_engine_error_names_engines_and_what_they_said() -> None:
    error = EngineError({"b": ValueError("no"), "c": OSError("gone")}, ["a"])
    assert str(error) == "engine b: ValueError: no; engine c: OSError: gone; committed despite the failure: a"
    assert error.status_code == 502


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_only() -> None:
    silent, terminal = io.StringIO(), Terminal()
    for stream in (silent, terminal):
        bar = ProgressBar("refresh", stream)
        for done in range(1001):
            bar(done, 1000)
    assert silent.getvalue() == ""
    drawn = terminal.getvalue()
    assert drawn.endswith("\n") and "100%" in drawn and drawn.count("\r") < 20
    ProgressBar("empty", terminal)(0, 0)
    assert "empty" in terminal.getvalue()


@dataclass(frozen=True)
class Talkative(RefreshReport):
    """A report that prints all it has, as dataclasses do by themselves."""


def printed(kind: type[RefreshReport], engines: dict[str, EngineReport]) -> str:
    fingerprints = {f"model.layers.{number}.weight": "0123456789abcdef" for number in range(20_000)}
    return repr(kind("v7", 16_000_000, 1.5, 3, fingerprints, "fedcba9876543210", engines, {"plan": 0.25}))


def test_a_report_prints_counts_in_one_line() -> None:
    text = "<RefreshReport 'v7': 16,000,000 bytes in 3 buckets, 1.500 s, 20000 fingerprints, digest fedcba9876543210"
    assert printed(RefreshReport, {}) == f"{text}>", "a trainer rank that does not send"
    engines = {f"e{number}": EngineReport(committed=number < 2) for number in range(40)}
    some = printed(RefreshReport, engines)
    assert some.startswith(f"{text}, committed on 2 of 40 engines, left out: e2, ") and some.endswith(" more>")
    assert len(some) < 300 < 100_000 < len(printed(Talkative, engines)), "a wrong variant fills screens"
