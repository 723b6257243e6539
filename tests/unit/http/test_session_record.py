"""The record of a session: prompts that go on from sampled tokens, and one sequence for each end of a conversation."""

from __future__ import annotations

import base64
import dataclasses
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.core.messages.io_struct import TokenizedGenerateReqInput
from rollout.http import conversations
from rollout.http.conversations import Conversations, Turn
from tests.http_harness import Live, live_server
from tests.stand_in_scheduler import NUM_EXPERTS, TOP_K, logprob_of
from tests.tiny_tokenizer import write_model_folder
from tests.troubleshooting import require_entry

# A template of which one kind of past changes: thoughts before the last message of the user are left out.
TEMPLATE = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'raw' %}{{ m.content }}{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content == 'odd' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or () %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% if not loop.last or not continue_final_message %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if messages[0].content == 'forbidden' and messages[-1].role == 'assistant' %}"
    "{{ raise_exception('no') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model_folder(Path(tmp_path_factory.mktemp("model")))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with live_server(
        folder,
        context_length=2048,
        enable_return_routed_experts=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    ) as server:
        yield server


class Agent:
    """A client that keeps a conversation as it got it, on the door that it was written for."""

    def __init__(self, live: Live, session: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self._live = live
        self._session = session

    def ask(self, content: str, *, role: str = "user", max_tokens: int = 400, **fields: Any) -> dict[str, Any]:
        """Send a message, keep the answer, and return the whole reply."""
        self.messages.append({"role": role, "content": content})
        body = {"messages": self.messages, "max_tokens": max_tokens, "session_id": self._session} | fields
        reply = self._live.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        message = answer["choices"][0]["message"]
        kept = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}
        self.messages.append(kept)  # without its thought, as agents keep it
        return answer

    def record(self) -> dict[str, Any]:
        reply = self._live.client.get(f"/sessions/{self._session}/record")
        assert reply.status_code == 200, reply.text
        record: dict[str, Any] = reply.json()
        return record


def sent(live: Live) -> list[TokenizedGenerateReqInput]:
    return live.sent(TokenizedGenerateReqInput)


def ids_of(live: Live, text: str) -> list[int]:
    tokens: list[int] = live.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def text_of(live: Live, ids: list[int]) -> str:
    text: str = live.client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": False}).json()["text"]
    return text


def output_of(live: Live, prompt: list[int], count: int) -> list[int]:
    """Return what the stand-in answers: its prompt, repeated up to the end of a turn."""
    (eos,) = ids_of(live, "<|im_end|>")
    made = [prompt[i % len(prompt)] for i in range(count)]
    return made[: made.index(eos) + 1] if eos in made else made


def test_a_prompt_goes_on_from_the_tokens_of_the_turn_before(live: Live) -> None:
    """Its first answer begins with a special token that no template would write there."""
    live.scheduler.received.clear()
    agent = Agent(live, "on")
    agent.ask("hello")
    agent.ask("END")
    first, second = sent(live)
    output = output_of(live, list(first.input_ids), 400)
    assert text_of(live, output) == "<|im_start|>user\nhello<|im_end|>"
    more = ids_of(live, "\n<|im_start|>user\nEND<|im_end|>\n<|im_start|>assistant\n")
    assert list(second.input_ids) == [*first.input_ids, *output, *more]
    (sequence,) = agent.record()["sequences"]
    assert sequence["token_ids"] == [*second.input_ids, *output_of(live, list(second.input_ids), 400)]


def test_a_cut_answer_goes_on_with_its_tokens(live: Live) -> None:
    """A rollout that was cut is resumed as one answer, and its next turn goes on from all of it."""
    live.scheduler.received.clear()
    agent = Agent(live, "resumed")
    agent.ask("hello<|im_end|>", role="raw", max_tokens=1)
    agent.messages.append({"role": "assistant", "content": agent.messages.pop()["content"]})
    body = {"messages": agent.messages, "continue_final_message": True, "session_id": "resumed"}
    reply = live.client.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()
    agent.messages[-1]["content"] += reply["choices"][0]["message"]["content"]
    agent.ask("END")
    first, second, third = sent(live)
    record = agent.record()
    (sequence,) = record["sequences"]
    assert list(second.input_ids) == sequence["token_ids"][: record["turns"][0]["end"]]
    assert list(third.input_ids)[: len(second.input_ids) + 1] == sequence["token_ids"][: len(second.input_ids) + 1]
    start = len(first.input_ids)
    assert sequence["sampled"][start : start + 3] == [True, True, False] and sequence["routed_experts_missing"] == 0


def test_a_stop_token_of_space_is_not_taken_for_the_templates_own(live: Live) -> None:
    """The template ends a turn with an end token and a new line; a turn that stopped at a new line has no end."""
    live.scheduler.received.clear()
    agent = Agent(live, "line")
    (line,) = ids_of(live, "\n")
    agent.ask("hello", stop_token_ids=[line])
    agent.ask("END")
    (_, second), (one, two) = sent(live), agent.record()["turns"]
    assert one["finish_reason"]["matched"] == line
    assert (two["parent"], two["rewrites"]) == (None, one["id"])
    assert "<|im_end|>\n<|im_start|>user\nEND" in text_of(live, list(second.input_ids))


def test_a_turn_that_was_cut_is_closed(live: Live) -> None:
    live.scheduler.received.clear()
    agent = Agent(live, "cut")
    agent.ask("hello", max_tokens=2)
    agent.ask("END")
    first, second = sent(live)
    more = ids_of(live, "<|im_end|>\n<|im_start|>user\nEND<|im_end|>\n<|im_start|>assistant\n")
    assert list(second.input_ids) == [*first.input_ids, *first.input_ids[:2], *more]


def routes_of(sequence: dict[str, Any]) -> np.ndarray:
    """Return the routes of the only MoE layer: [T - 1, K]."""
    routes = sequence["routed_experts"]
    content = np.frombuffer(base64.b64decode(routes["data"]), dtype=routes["dtype"]).reshape(routes["shape"])
    assert routes["start"] == 0 and sequence["routed_experts_missing"] == 0
    return content[:, -1]


def test_a_sequence_has_all_that_a_trainer_needs(live: Live) -> None:
    """The row of the last token of a turn comes from the forward of the next one."""
    live.scheduler.received.clear()
    agent = Agent(live, "all")
    for content in ("hello", "END", "hell"):
        agent.ask(content)
    record = agent.record()
    (sequence,) = record["sequences"]
    ids, sampled = sequence["token_ids"], sequence["sampled"]
    assert len(ids) == len(sampled) == len(sequence["logprobs"]) == record["turns"][-1]["end"]
    assert sequence["logprobs"] == [logprob_of(token) if is_own else None for token, is_own in zip(ids, sampled)]
    for turn, message in zip(record["turns"], sent(live), strict=True):
        assert ids[: turn["output_start"]] == list(message.input_ids) and not any(
            sampled[turn["start"] : turn["output_start"]]
        )
        assert all(sampled[turn["output_start"] : turn["end"]])
    spans = [(span["start"], span["end"]) for span in sequence["weight_versions"]]
    assert spans == [(turn["output_start"], turn["end"]) for turn in record["turns"]]
    places = np.arange(len(ids) - 1)[:, None] + np.arange(TOP_K)
    assert np.array_equal(routes_of(sequence), places % NUM_EXPERTS)
    starts = [message.routed_experts_start_len for message in sent(live)]
    assert starts == [0, *(turn["end"] - 1 for turn in record["turns"][:-1])]  # no row is sent twice


def test_answers_show_no_more_than_they_were_asked_for(live: Live) -> None:
    agent = Agent(live, "hidden")
    agent.ask("hello")
    answer = agent.ask("END")
    assert "sglext" not in answer and answer["choices"][0]["logprobs"] is None
    shown = agent.ask("hell", return_meta_info=True, return_routed_experts=True)["choices"][0]["meta_info"]
    assert "routed_experts" in shown and shown["output_token_logprobs"]
    assert agent.record()["sequences"][0]["routed_experts_missing"] == 0


def test_retries_and_edits_are_branches(live: Live) -> None:
    agent = Agent(live, "tree")
    agent.ask("hello")
    before = list(agent.messages)
    agent.ask("END")
    agent.messages = list(before)
    agent.ask("hell")  # another message after the same turn
    agent.messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "edited"}]
    agent.ask("END")
    record = agent.record()
    root, end, hell, edited = record["turns"]
    assert [turn["parent"] for turn in record["turns"]] == [None, root["id"], root["id"], None]
    assert [sequence["turns"] for sequence in record["sequences"]] == [
        [root["id"], end["id"]], [root["id"], hell["id"]], [edited["id"]],
    ]  # fmt: skip


def test_a_template_may_write_the_last_message_otherwise(live: Live) -> None:
    """Qwen3's writes an empty thought into an answer, until another message follows."""
    live.scheduler.received.clear()
    agent = Agent(live, "last")
    agent.ask("odd<|im_end|>", role="raw")
    agent.ask("END")
    first, second = sent(live)
    output = ids_of(live, "odd<|im_end|>")
    assert agent.messages[1]["content"] == "odd"
    assert list(second.input_ids)[: len(first.input_ids) + len(output)] == [*first.input_ids, *output]
    assert "<think>" not in text_of(live, list(second.input_ids))


def test_one_sequence_can_be_asked_for_where_all_are_too_much(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(live, "wide")
    agent.ask("hello")
    before = list(agent.messages)
    for content in ("END", "hell", "o"):
        agent.messages = list(before)
        agent.ask(content)
    record = agent.record()
    budget = dataclasses.replace(live.manager.limits.budget, max_request_bytes=20_000)
    monkeypatch.setattr(live.manager, "_limits", dataclasses.replace(live.manager.limits, budget=budget))
    status, message = refused(live, "wide")
    assert status == 413 and "?turn=" in message
    require_entry(message)
    for sequence in record["sequences"]:
        reply = live.client.get(f"/sessions/wide/record?turn={sequence['turns'][-1]}").json()
        assert reply["sequences"] == [sequence] and reply["turns"] == record["turns"]
    status, message = refused(live, "wide", "?turn=other")
    assert status == 404
    require_entry(message)


def test_thoughts_stay_until_the_template_leaves_them_out(live: Live) -> None:
    """An agent sends no thoughts back.  They are in the prompt as they were, unless the template changes the past."""
    live.scheduler.received.clear()
    agent = Agent(live, "thoughts")
    agent.ask("<think>hm</think>hello<|im_end|>", role="raw")
    assert agent.messages[-1] == {"role": "assistant", "content": "hello"}
    agent.ask("END", role="tool")
    agent.ask("hell")
    first, second, third = sent(live)
    output = ids_of(live, "<think>hm</think>hello<|im_end|>")
    assert list(second.input_ids)[: len(first.input_ids) + len(output)] == [*first.input_ids, *output]
    assert "<|im_start|>assistant\nhello<|im_end|>" in text_of(live, list(third.input_ids))
    one, two, three = agent.record()["turns"]
    assert (two["parent"], two["rewrites"]) == (one["id"], None)
    assert (three["parent"], three["rewrites"]) == (None, two["id"])


def test_an_edited_thought_is_another_conversation(live: Live) -> None:
    """Else the model would read a thought that its request does not have."""
    live.scheduler.received.clear()
    agent = Agent(live, "edited")
    agent.ask("<think>hm</think>hello<|im_end|>", role="raw")
    answer = dict(agent.messages[-1])
    agent.messages[-1] = answer | {"reasoning_content": "oh"}
    agent.ask("END", role="tool")
    agent.messages = [agent.messages[0], answer | {"reasoning": "hm", "reasoning_content": ""}]
    agent.ask("END", role="tool")
    first, edited, same = agent.record()["turns"]
    assert (edited["parent"], edited["rewrites"], same["parent"]) == (None, None, first["id"])
    texts = [text_of(live, list(message.input_ids)) for message in sent(live)]
    assert "<think>oh</think>" in texts[1] and "<think>hm</think>" in texts[2]


@pytest.mark.parametrize("calls", [3, "f", [3], [{"function": 3}]])
def test_calls_of_any_form_are_read_by_the_template_alone(live: Live, calls: Any) -> None:
    """A session changes nothing about that: the template refuses them, or reads no call."""
    messages = [{"role": "user", "content": "hello", "tool_calls": calls}, {"role": "assistant", "tool_calls": calls}]
    bodies = [{"messages": messages, "max_tokens": 1} | more for more in ({}, {"session_id": "odd"})]
    plain, in_session = (live.client.post("/v1/chat/completions", json=body).status_code for body in bodies)
    assert plain == in_session < 500


def test_another_model_begins_a_conversation_of_its_own(live: Live) -> None:
    agent = Agent(live, "models")
    agent.ask("hello")
    agent.ask("END", model="tiny")
    assert [turn["parent"] for turn in agent.record()["turns"]] == [None, None]


def test_a_template_that_refuses_an_answer_at_the_end_renders_anew(live: Live) -> None:
    agent = Agent(live, "refusing")
    agent.ask("forbidden")
    agent.ask("END")
    first, second = agent.record()["turns"]
    assert (second["parent"], second["rewrites"]) == (None, first["id"])


def test_calls_are_compared_by_their_content(live: Live) -> None:
    agent = Agent(live, "calls")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, {"y": null}]}'}}
    agent.messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    agent.ask("END", role="tool")
    agent.ask("hell")
    first, second = agent.record()["turns"]
    assert second["parent"] == first["id"]


def test_a_request_that_takes_the_name_of_a_lost_one_is_no_turn(live: Live) -> None:
    body = {"session_id": "lost", "rid": "lost", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    live.scheduler.misreport = True
    assert live.client.post("/v1/chat/completions", json=body).status_code == 500
    live.scheduler.misreport = False
    live.generate(text="hello", rid="lost", return_logprob=True)
    assert refused(live, "lost")[0] == 404


def test_text_that_is_not_unicode_is_refused_as_without_a_session(live: Live) -> None:
    body = '{"session_id": "s", "messages": [{"role": "user", "content": "\\ud800"}]}'
    reply = live.client.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400, reply.text


def test_sessions_that_have_no_room_are_dropped_whole(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = next(each for each in live.manager._observers if isinstance(each, Conversations))
    monkeypatch.setattr(kept, "_max_bytes", kept._num_bytes + conversations._TURN_BYTES)
    oldest = next(iter(kept._sessions))
    Agent(live, "new").ask("hello")
    assert kept.turns("new") and not kept.turns(oldest)
    status, message = refused(live, oldest)
    assert status == 404 and "no turn of the session" in message


def test_a_long_session_takes_no_more_than_its_new_messages(live: Live) -> None:
    """A turn does not hold the messages of all turns before it."""
    kept = next(each for each in live.manager._observers if isinstance(each, Conversations))
    agent = Agent(live, "long")
    for _ in range(8):
        agent.ask("x" * 64, max_tokens=1)
    *_, last = kept.turns("long")
    # the objects themselves: an id alone may be another object's once the first is gone
    messages = [each for each in gc.get_objects() if type(each) is dict and each.get("content") == "x" * 64]
    assert last.num_messages == 16 and not _held_by(last).intersection(map(id, messages))


def _held_by(turn: Turn) -> set[int]:
    """Return the ids of the objects that a turn refers to, at once or by another object."""
    near = gc.get_referents(turn)
    return {id(each) for each in [*near, *gc.get_referents(*near)]}


def test_a_turn_of_a_dropped_session_goes_with_it(live: Live) -> None:
    """It would hold the tokens of the turns before it, which nothing counts any more."""
    kept = next(each for each in live.manager._observers if isinstance(each, Conversations))
    agent = Agent(live, "gone")
    agent.ask("hello")
    live.scheduler.paused = True
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agent.ask, "END")
        live.wait_until(lambda: any(each.session_id == "gone" for each in kept._pending.values()))
        live.call_in_loop(lambda: kept._sessions.pop("gone"))
        live.scheduler.paused = False
        asked.result()
    assert refused(live, "gone")[0] == 404


def refused(live: Live, session: str, query: str = "") -> tuple[int, str]:
    reply = live.client.get(f"/sessions/{session}/record{query}")
    return reply.status_code, reply.json()["error"]["message"]


@pytest.mark.parametrize("door", ["/v1/messages", "/v1/responses"])
def test_every_door_has_the_record(live: Live, door: str) -> None:
    live.scheduler.received.clear()
    session = door.replace("/", "_")
    history: list[dict[str, Any]] = []
    for content in ("hello", "END"):
        history.append({"role": "user", "content": content})
        body: dict[str, Any] = {"session_id": session}
        body |= {"messages": history, "max_tokens": 99} if door == "/v1/messages" else {"input": history}
        reply = live.client.post(door, json=body).json()
        if door == "/v1/messages":
            history.append({"role": "assistant", "content": reply["content"]})
        else:
            history += reply["output"]
    first, second = sent(live)
    output = output_of(live, list(first.input_ids), 99)
    assert list(second.input_ids)[: len(first.input_ids) + len(output)] == [*first.input_ids, *output]
    record = live.client.get(f"/sessions/{session}/record").json()
    assert [turn["parent"] for turn in record["turns"]] == [None, record["turns"][0]["id"]]


@pytest.mark.mutant
def test_prompts_that_are_tokenized_again_are_noticed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversations, "_last_turn", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_prompt_goes_on_from_the_tokens_of_the_turn_before(live)
