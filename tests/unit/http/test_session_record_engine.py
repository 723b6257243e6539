"""The record of a session from a real engine: scored again, its tokens have the same log-probabilities and routes."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.http.conversations import Conversations
from tests.conversations import WORDS
from tests.engine_thread import EngineThread
from tests.http_harness import Live, live_server
from tests.model_zoo import tiny_checkpoint
from tests.tiny_tokenizer import write_tiny_tokenizer

CONTEXT = 2048
EOS = 264  # "<|im_end|>", with which the template ends a turn


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    made = [tiny_checkpoint(root / str(seed), seed=seed, context_length=CONTEXT) for seed in (1, 2)]
    write_tiny_tokenizer(made[0])
    for file in ("config.json", "generation_config.json"):
        path = made[0] / file
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": EOS}))
    return made


@pytest.fixture
def live(folders: list[Path]) -> Iterator[Live]:
    with live_server(
        folders[0],
        engine=EngineThread,
        max_total_tokens=20_000,
        dtype="float32",
        enable_return_routed_experts=True,
        chunked_prefill_size=64,
    ) as server:
        yield server


class Agent:
    """A client that keeps a conversation, and sometimes goes back to an earlier point of it."""

    def __init__(self, live: Live, session: str, seed: int) -> None:
        self._live = live
        self._session = session
        self._random = random.Random(seed)
        self._messages: list[dict[str, Any]] = []

    def play(self, num_turns: int) -> None:
        rng = self._random
        for _ in range(num_turns):
            if self._messages and rng.random() < 0.3:
                self._messages = self._messages[: 2 * rng.randrange(len(self._messages) // 2 + 1)]
            content = " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
            self._messages.append({"role": "user", "content": content})
            body = {
                "messages": self._messages,
                "max_tokens": rng.randint(1, 30),
                "temperature": rng.choice([0.0, 1.0]),
                "top_p": rng.choice([1.0, 0.9]),
                "seed": rng.randrange(1000),
                "session_id": self._session,
            }
            reply = self._live.client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            self._messages.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"]})

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = self._live.client.get(f"/sessions/{self._session}/record").json()
        return record


def array(routes: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(routes["data"]), dtype=routes["dtype"]).reshape(routes["shape"])


def is_what_the_engine_scores(live: Live, sequence: dict[str, Any], version: str) -> bool:
    """Return whether the tokens of a version have its log-probabilities and routes, bit for bit, scored anew."""
    meta = live.generate(
        input_ids=sequence["token_ids"],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        return_routed_experts=True,
        routed_experts_format="dict",
        extra_key="anew",
    )["meta_info"]
    scored = [entry[0] for entry in meta["input_token_logprobs"]]
    spans = [(span["start"], span["end"]) for span in sequence["weight_versions"] if span["version"] == version]
    places = [place for start, end in spans for place in range(start, end)]
    assert places and all(sequence["sampled"][place] for place in places)
    recorded, routes = array(sequence["routed_experts"]), array(meta["routed_experts"])
    own = [place - 1 for place in places]  # the row that chose a token is the one before it
    return all(sequence["logprobs"][place] == scored[place] for place in places) and np.array_equal(
        recorded[own], routes[own]
    )


def test_sequences_score_as_they_were_sampled(live: Live) -> None:
    branches = rewritten = 0
    for seed in range(12):
        agent = Agent(live, f"s{seed}", seed)
        agent.play(5)
        record = agent.record()
        branches += len(record["sequences"]) - 1
        rewritten += sum(turn["rewrites"] is not None for turn in record["turns"])
        for sequence in record["sequences"]:
            assert is_what_the_engine_scores(live, sequence, "default")
            assert sequence["routed_experts_missing"] == 0
            assert len(array(sequence["routed_experts"])) == len(sequence["token_ids"]) - 1
    assert branches > 5 and not rewritten


def test_a_refresh_between_two_turns_is_in_the_record(live: Live, folders: list[Path]) -> None:
    agent = Agent(live, "refreshed", 3)
    agent.play(1)
    body = {"model_path": str(folders[1]), "weight_version": "v2"}
    assert live.client.post("/update_weights_from_disk", json=body).json()["success"]
    agent.play(2)
    (*_, sequence) = agent.record()["sequences"]
    versions = [span["version"] for span in sequence["weight_versions"]]
    assert versions[-1] == "v2"
    assert is_what_the_engine_scores(live, sequence, "v2")


@pytest.mark.mutant
def test_prompts_that_are_tokenized_again_are_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random tokens are seldom the ones that their text is made of: scored in one row they are other sequences."""
    monkeypatch.setattr(Conversations, "_last_turn", lambda *_: None)
    agent = Agent(live, "again", 4)
    agent.play(3)
    record = agent.record()
    assert len(record["sequences"]) == 3
    first, last = record["sequences"][0]["token_ids"], record["sequences"][-1]["token_ids"]
    assert last[: len(first)] != first
