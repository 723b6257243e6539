"""Embeddings, classes, scores and hidden states of servers of several ranks, door by door: the numbers of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.family_zoo import family_model
from tests.head_zoo import headed_checkpoint
from tests.server_process import ServerProcess
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.full

PROMPTS = [[5, 9, 2, 6], [7], [30, 31, 32, 33, 34, 35, 36], list(range(40, 75))]
IDS, TEXTS = {"input": PROMPTS}, {"input": ["hello", "END", "a b"]}
PAIRS = {"text_1": "hello", "text_2": ["END", "hello hello"]}
RANKED = {"query": "hello", "documents": ["END", "hello hello", "a"]}
OF_ALL: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", IDS),
    ("/v1/embeddings", TEXTS | {"pooling": "mean", "dimensions": 16}),
    ("/encode", {"input_ids": PROMPTS}),
    ("/pooling", IDS | {"task": "token_embed", "normalize": False}),
]
OF_PAIRS: list[tuple[str, dict[str, Any]]] = [("/score", PAIRS), ("/v1/rerank", RANKED | {"top_n": 2})]
OF_CLASSIFIERS: list[tuple[str, dict[str, Any]]] = [
    ("/classify", IDS),
    ("/classify", {"text": ["hello", "END"]}),
    ("/pooling", IDS | {"use_activation": False}),
]
OF_CAUSAL: list[tuple[str, dict[str, Any]]] = [
    ("/v1/score", {"query": "hello", "items": ["END", "a"], "label_token_ids": [5, 6], "apply_softmax": True}),
    (
        "/generate",
        {
            "input_ids": PROMPTS,
            "sampling_params": {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True},
            "return_hidden_states": True,
            "hidden_state_layers": [0, 1, -1],
        },
    ),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "two replicas": {"dp_size": 2},
    "dp2 of tp2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2},
}
HEADS: dict[str, dict[str, Any]] = {"reward": {"id2label": {0: "good"}}, "classes": {}, "causal": {}}
DOORS = {
    "reward": [*OF_ALL, *OF_PAIRS, *OF_CLASSIFIERS],
    "classes": [*OF_ALL, *OF_CLASSIFIERS],
    "causal": [*OF_ALL, *OF_PAIRS, *OF_CAUSAL],
}
VARYING = frozenset({"id", "created", "e2e_latency", "dp_rank", "cached_tokens", "rid", "queue_time"})


def checkpoint(folder: Path, head: str, seed: int) -> Path:
    if head == "causal":
        family_model("qwen3_moe", seed).save_pretrained(folder)
    else:
        headed_checkpoint(folder, "qwen3_moe", "ForSequenceClassification", seed=seed, **HEADS[head])
    write_tiny_tokenizer(folder)
    return folder


def serve(folder: Path, **settings: Any) -> ServerProcess:
    return ServerProcess(folder, dtype="float64", max_total_tokens=2048, num_threads=1, **settings)


def answers(server: ServerProcess, head: str) -> list[Any]:
    found = []
    for path, body in DOORS[head]:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        found.append((path, plain(answer.json())))
    return found


def plain(content: Any) -> Any:
    """Return an answer without what differs between any two calls."""
    if isinstance(content, Mapping):
        return {name: plain(value) for name, value in content.items() if name not in VARYING}
    return [plain(each) for each in content] if isinstance(content, list) else content


def same(got: Any, want: Any, place: str) -> None:
    """Compare the forms exactly, and numbers up to the rounding of float64 and of float32 in the answer."""
    assert type(got) is type(want), place
    if isinstance(want, Mapping):
        assert got.keys() == want.keys(), place
        for name in want:
            same(got[name], want[name], f"{place}.{name}")
    elif isinstance(want, list):
        assert len(got) == len(want), place
        for index, (one, two) in enumerate(zip(got, want, strict=True)):
            same(one, two, f"{place}[{index}]")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=3e-7, abs=1e-9), place
    else:
        assert got == want, place


@pytest.mark.parametrize("head", HEADS)
def test_every_door_answers_as_one_rank_before_and_after_a_refresh(head: str, tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / str(seed), head, seed) for seed in (3, 8)]
    body = {"model_path": str(folders[1]), "weight_version": "v1"}

    def both(**settings: Any) -> list[list[Any]]:
        with serve(folders[0], **settings) as server:
            before = answers(server, head)
            assert server.http.post("/update_weights_from_disk", json=body).status_code == 200
            return [before, answers(server, head)]

    expected = both()
    with pytest.raises(AssertionError):
        same(*expected, "refresh")  # it changes answers
    for name, settings in LAYOUTS.items():
        for got, want in zip(both(**settings), expected, strict=True):
            for (path, ours), (_, theirs) in zip(got, want, strict=True):
                same(ours, theirs, f"{name} {path}")
