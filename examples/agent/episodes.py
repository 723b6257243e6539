"""Episodes at a live server: turns over /v1/chat/completions, tool calls between them, one session an episode.

messages --> server: prompt_token_ids, token_ids, a message with tool_calls
the record's ids + ids of the tool's answer --> server: token_ids, a message ...        until it answers
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tokenizers import Tokenizer

from capture.codec import decode_compact
from examples.agent.record import Record, Turn
from examples.agent.task import TOOLS, Problem, use_tool
from rollout.client import VersionSpan
from rollout.core.errors import LockstepError

MAX_TURNS = 4
MAX_TOKENS = 24  # of one turn
TIMEOUT_S = 120.0
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Episode:
    """`answer`: the text of the last turn, None if the agent never gave one."""

    problem: Problem
    record: Record
    answer: str | None
    num_calls: int

    @property
    def reward(self) -> float:
        return self.problem.reward(self.answer)


class Agent:
    """Plays episodes through the server at `url`; `tokenizer` makes the ids of the tool's turns alone.

    An asynchronous context.
    """

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        # A server closes connections that were idle through a step of the trainer: each request gets its own.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def play(self, problems: Sequence[Problem], group_size: int) -> list[Episode]:
        """Play `group_size` episodes of each problem, all at once; return them by problem.

        Raises `LockstepError` for a refusal of the server, `RecordError` for a turn that does not continue its record.
        """
        playing = [self._episode(problem) for problem in problems for _ in range(group_size)]
        return list(await asyncio.gather(*playing))

    async def _episode(self, problem: Problem) -> Episode:
        session, record, num_calls = f"episode-{next(self._numbers)}", Record(), 0
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": problem.question}]}
        answer: str | None = None
        for _ in range(MAX_TURNS):
            choice = await self._turn(prompt, session, record)
            if choice["finish_reason"] != "tool_calls":
                answer = choice["message"]["content"] if choice["finish_reason"] == "stop" else None
                break
            calls = [call["function"] for call in choice["message"]["tool_calls"]]
            num_calls += len(calls)
            results = [use_tool(call["name"], call["arguments"]) for call in calls]
            prompt = {"messages": [], "input_ids": record.ids + self._tool_turn(results)}
        reply = await self._http.post("/finish_session", params={"session_id": session})
        if reply.status_code != 200:  # else its prefix would stay pinned, and hold memory of the cache
            raise LockstepError(f"the server did not end session {session}: {reply.text}")
        return Episode(problem, record, answer, num_calls)

    async def _turn(self, prompt: dict[str, Any], session: str, record: Record) -> dict[str, Any]:
        """Ask for a turn, append it to the record, and return the choice of the answer."""
        body = prompt | {
            "tools": TOOLS,
            "temperature": 1.0,
            "max_tokens": MAX_TOKENS,
            "logprobs": True,
            "return_token_ids": True,
            "return_meta_info": True,
            "return_routed_experts": True,
            "routed_experts_format": "compact",
            "routed_experts_start_len": record.num_routed,
        }
        reply = await self._http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session})
        if reply.status_code != 200:
            raise LockstepError(f"the server refused a turn: {reply.text}")
        (choice,) = reply.json()["choices"]
        record.add(turn_of(choice))
        return dict(choice)

    def _tool_turn(self, results: Sequence[str]) -> list[int]:
        """Return the ids between the model's turn and its next one: the tool's answers, and the start of a turn."""
        turns = "".join(f"{TURN_START}tool\n{result}{TURN_END}\n" for result in results)
        return ids_of(self._tokenizer, f"\n{turns}{TURN_START}assistant\n")


def turn_of(choice: dict[str, Any]) -> Turn:
    """Return the turn in a choice of an answer that was asked for ids and `meta_info`."""
    meta = choice["meta_info"]
    return Turn(
        prompt_ids=choice["prompt_token_ids"],
        output_ids=choice["token_ids"],
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        versions=[VersionSpan(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]],
        routes=decode_compact(base64.b64decode(meta["routed_experts"])),
        cached_tokens=meta["cached_tokens"],
    )


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
