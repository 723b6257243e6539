"""Routes as input: scores and samples under given routes, the forms in which they come, and refusals.

Shapes: T tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe

from capture.codec import encode_compatible, encode_dict, encode_npy, encode_packed
from capture.replay import force_routes
from capture.routed_experts import RoutedExperts
from rollout.client.generation import generate_body, parse_answer
from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.families.registry import load_model_config
from rollout.layers.moe.router import TopKRouter
from rollout.server.engine import Engine
from rollout.tokenizer_manager.replay import read_replay
from rollout.tokenizer_manager.response import RouteShape
from tests.family_zoo import FAMILIES, also_for, family_checkpoint, with_experts
from tests.model_zoo import tiny_checkpoint

PROMPT = list(range(3, 40))
LAYERS, TOP_K, EXPERTS = (1, 2), 3, 8
SHAPE = RouteShape(EXPERTS, TOP_K, LAYERS, 3)
QWEN3 = "moe_dense_first"
WITH_FAMILIES = also_for(with_experts(), QWEN3)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", QWEN3)


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "model"
    return family_checkpoint(path, model, 5) if model in FAMILIES else tiny_checkpoint(path, QWEN3, 5)


@pytest.fixture(scope="module")
def shape(folder: Path) -> RouteShape:
    return RouteShape.of(load_model_config(folder))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Callable[..., Engine]]:
    made: dict[str, Engine] = {}

    def engine(dtype: str = "float32", **settings: Any) -> Engine:
        key = json.dumps([dtype, settings])
        if key not in made:
            made[key] = Engine(
                model_path=str(folder), dtype=dtype, skip_tokenizer_init=True, max_total_tokens=4096,
                enable_return_routed_experts=True, **settings,
            )  # fmt: skip
        return made[key]

    yield engine
    for each in made.values():
        each.close()


def ask(engine: Engine, ids: list[int], new: int = 0, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    reply = engine.generate(
        input_ids=ids, sampling_params=params, return_logprob=True, logprob_start_len=0, return_routed_experts=True,
        routed_experts_format="compact", **fields,
    )  # fmt: skip
    assert isinstance(reply, dict)
    return reply


def routes_of(reply: dict[str, Any]) -> RoutedExperts:
    output = parse_answer(reply, {"input_ids": [1], "return_routed_experts": True}, None)
    assert not isinstance(output, list) and output.routed_experts is not None
    return output.routed_experts


def scores(reply: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]


def random_routes(rows: int, seed: int = 0, start: int = 0, shape: RouteShape = SHAPE) -> RoutedExperts:
    experts, top_k, layers = shape.num_experts, shape.top_k, shape.moe_layer_ids
    generator = np.random.default_rng(seed)
    ids = np.array([[generator.permutation(experts)[:top_k] for _ in layers] for _ in range(rows)], dtype=np.uint8)
    return RoutedExperts(ids.reshape(rows, len(layers), top_k), experts, layers, shape.num_hidden_layers, start)


def compact(routed: RoutedExperts) -> Any:
    return generate_body(None, {"input_ids": [1], "replay_routed_experts": routed})["replay_routed_experts"]


class _Double:
    """The module `torch`, with float64 under the name of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers compute norms, routers and angles in float64.

    It computes them in float32 whatever the model's dtype is, which is off by 1e-6.
    """
    monkeypatch.setattr(modeling_qwen3_moe, "torch", _Double())
    theta, size = model.config.rope_parameters["rope_theta"], model.config.head_dim
    frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = (position_ids[..., None].double() * frequencies).repeat(1, 1, 2)
        return both.cos(), both.sin()

    model.model.rotary_emb.forward = angles


def test_scores_in_float64_are_those_of_transformers_with_these_routes(
    engines: Callable[..., Engine], folder: Path, shape: RouteShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = in_transformers(folder, torch.float64)
    compute_in_float64(theirs, monkeypatch)
    check_scores(engines("float64"), theirs, shape, 1e-6)


@WITH_FAMILIES
def test_scores_are_those_of_transformers_with_these_routes(
    engines: Callable[..., Engine], folder: Path, shape: RouteShape
) -> None:
    check_scores(engines(), in_transformers(folder, torch.float32), shape, 1e-4)


def in_transformers(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    )


def check_scores(engine: Engine, model: Any, shape: RouteShape, tolerance: float) -> None:
    for seed in range(3):
        routed = random_routes(len(PROMPT), seed, shape=shape)
        reply = ask(engine, PROMPT, replay_routed_experts=compact(routed))
        assert np.array_equal(
            routes_of(reply).logical_ids_TLK, routed.logical_ids_TLK[:-1]
        )  # the last predicts nothing
        with torch.no_grad(), force_routes(model, routed):
            logits = model(torch.tensor([PROMPT])).logits[0, :-1].double()
        want = logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
        assert np.abs(np.array(scores(reply)) - want.numpy()).max() < tolerance
        free = scores(ask(engine, PROMPT))
        assert np.abs(np.array(scores(reply)) - np.array(free)).max() > 1e-2, "routes that change nothing show nothing"


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 7}, {"disable_radix_cache": True}], ids=str)
@WITH_FAMILIES
def test_its_own_routes_change_no_bit(engines: Callable[..., Engine], settings: dict[str, Any]) -> None:
    engine = engines(**settings)
    first = ask(engine, PROMPT, 12)
    again = ask(engine, PROMPT, 12, replay_routed_experts=compact(routes_of(first)))
    assert again["output_ids"] == first["output_ids"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert again["meta_info"][name] == first["meta_info"][name]
    assert np.array_equal(routes_of(again).logical_ids_TLK, routes_of(first).logical_ids_TLK)


@WITH_FAMILIES
def test_a_prompt_under_given_routes_then_free(engines: Callable[..., Engine], shape: RouteShape) -> None:
    """Tokens with a given row have it in the record; the router chooses the rows of the others."""
    routed = random_routes(10, 3, start=5, shape=shape)
    for settings in ({}, {"chunked_prefill_size": 4}):
        reply = ask(
            engines(**settings), PROMPT, 6, replay_routed_experts=compact(routed), replay_routed_experts_start_len=5
        )
        rows = routes_of(reply).logical_ids_TLK
        assert rows.shape[0] == len(PROMPT) + 5
        assert np.array_equal(rows[5:15], routed.logical_ids_TLK)
        free = routes_of(ask(engines(**settings), PROMPT, 6)).logical_ids_TLK
        assert np.array_equal(rows[:5], free[:5]) and not np.array_equal(rows[15:], free[15 : rows.shape[0]])


def test_kv_under_given_routes_is_no_other_request_s(engines: Callable[..., Engine]) -> None:
    engine = engines()
    free = ask(engine, PROMPT)
    one, two = (compact(random_routes(len(PROMPT), seed)) for seed in (11, 12))
    for replay in (one, two, one):
        ask(engine, PROMPT, replay_routed_experts=replay)
    body: dict[str, Any] = {"input_ids": [*PROMPT, 50], "sampling_params": {"max_new_tokens": 1}}
    cached = {
        name: engine.generate(**body | extra)["meta_info"]["cached_tokens"]  # type: ignore[call-overload]
        for name, extra in (
            ("free", {}),
            ("one", {"replay_routed_experts": one}),
            ("fewer", {"replay_routed_experts": compact(random_routes(9, 11))}),
        )
    }
    assert cached == {"free": len(PROMPT), "one": len(PROMPT), "fewer": 0}
    assert scores(ask(engine, PROMPT)) == scores(free)


def test_every_form_that_is_returned_is_read() -> None:
    routed = random_routes(6, 4)
    want = read_replay(compact(routed), 0, SHAPE)
    for encode in (encode_compatible, encode_npy, encode_dict, encode_packed):
        assert read_replay(encode(routed), 0, SHAPE) == want
    assert read_replay(encode_dict(random_routes(6, 4, start=9)), 9, SHAPE).start == 9


def _damaged(change: Callable[[np.ndarray], None]) -> str:
    wide = np.zeros((4, 3, TOP_K), dtype="<i4")
    wide[:, 1:] = np.arange(TOP_K)
    change(wide)
    return base64.b64encode(wide.tobytes()).decode()


def _set(index: Any, value: int) -> Callable[[np.ndarray], None]:
    def change(wide: np.ndarray) -> None:
        wide[index] = value

    return change


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_damaged(_set((2, 1, 0), EXPERTS)), "outside 0..7"),
        (_damaged(_set((2, 1, 0), -1)), "outside 0..7"),
        (_damaged(_set((2, 1, 0), 2)), "same expert twice"),
        (_damaged(_set((2, 0, 0), 1)), "dense layer"),
        ("AAAA", "3 bytes are not a multiple of a row of 3 layers"),
        ("!!!!", "base64|Only base64"),
        (5, "text or an object"),
        ({"data": "", "shape": [1, 3, 3], "dtype": "uint8"}, "not of the shape"),
        ({"data": "", "shape": [0, 2, 3], "dtype": "uint8"}, "not of integers"),
        ({"data": "", "shape": [0, 3, 3], "dtype": "object"}, "dtype"),
        ({"shape": [0, 3, 3], "dtype": "uint8"}, "data"),
        (compact(RoutedExperts(np.zeros((1, 1, 1), np.uint8), 8, (1,), 3)), "the model has"),
        (compact(RoutedExperts(np.full((1, 2, 3), 255, np.uint8), 8, LAYERS, 3)), "row 0 is missing"),
    ],
)
def test_what_no_router_can_have_chosen_is_refused(value: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_replay(value, 0, SHAPE)


def test_rows_of_tokens_that_are_not_computed_are_refused(engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engines()
    for rows, new in ((len(PROMPT) + 1, 0), (len(PROMPT) + 1, 1), (len(PROMPT) + 4, 4)):
        with pytest.raises(BadRequest, match="the request computes"):
            ask(engine, PROMPT, new, replay_routed_experts=compact(random_routes(rows)))
    with pytest.raises(BadRequest, match="rows begin at token 0"):
        ask(engine, PROMPT, replay_routed_experts=compact(random_routes(2)), replay_routed_experts_start_len=3)
    with pytest.raises(BadRequest, match="character 0"):
        ask(engine, PROMPT, extra_key="a\x00b")
    dense = Engine(model_path=str(tiny_checkpoint(tmp_path / "dense", "dense")), skip_tokenizer_init=True)
    with pytest.raises(UnsupportedFeature, match="dense"):
        dense.generate(input_ids=[1, 2], replay_routed_experts="")
    dense.close()


def test_a_batch_brings_routes_prompt_by_prompt(engines: Callable[..., Engine]) -> None:
    engine, routed = engines(), random_routes(len(PROMPT), 21)
    fields: dict[str, Any] = {"return_routed_experts": True, "routed_experts_format": "compact"}
    replies = engine.generate(
        input_ids=[PROMPT, PROMPT], sampling_params={"max_new_tokens": 0},
        replay_routed_experts=[compact(routed), None], **fields,
    )  # fmt: skip
    assert isinstance(replies, list)
    rows = [routes_of(reply).logical_ids_TLK for reply in replies]
    assert np.array_equal(rows[0], routed.logical_ids_TLK[:-1]) and not np.array_equal(rows[1], rows[0])


@pytest.mark.mutant
@pytest.mark.parametrize("wrong", ["ignored", "one layer late"])
def test_routes_that_are_not_followed_are_noticed(
    engines: Callable[..., Engine], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = TopKRouter._forced

    def forced(self: TopKRouter, batch: Any, *rest: Any) -> torch.Tensor | None:
        rows = inner(self, batch, *rest)
        if wrong == "ignored" or rows is None:
            return None
        return torch.full_like(rows, -1) if self.moe_layer else rows

    monkeypatch.setattr(TopKRouter, "_forced", forced)
    routed = random_routes(len(PROMPT), 31)
    reply = ask(engines("float64"), PROMPT, replay_routed_experts=compact(routed))
    assert not np.array_equal(routes_of(reply).logical_ids_TLK, routed.logical_ids_TLK[:-1])
