"""Conversations of sessions, as the turns that the engine computed: prompts that go on from earlier tokens.

A turn is a chat and its answer.  The next request of its session holds its messages and its answer, so that its prompt
is the turn's own tokens and what the template puts behind them.  Nothing that was sampled is tokenized again.

    tokens of a turn:   its parent's | given by the template | sampled

A prompt begins anew where no turn has its messages, or where the template now renders them otherwise.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.core.errors import BadRequest
from rollout.core.messages.req_output import AdapterLabel, FinishReason, RoutedExpertsPayload, VersionSpan
from rollout.http.openai.messages import ChatMessage
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.http.turn_messages import (
    Message,
    answer_message,
    continued,
    digest,
    has_thoughts,
    keys_of,
    thoughts_of,
    with_thoughts,
)
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput
from rollout.tokenizer_manager.sample import MaskRecord, SampleRecord
from rollout.tokenizer_manager.sample_text import SampleText

_TOKEN_BYTES = 64
"""Bytes of Python's objects for one token and its log-probability."""
_TURN_BYTES = 2048
"""Bytes of Python's objects for a turn and its session besides tokens, text, routes and masks."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One finished chat.  Its tokens are its parent's, then `given_ids` and `output_ids`; `end` counts them all.

    `key` is the digest of its conversation with the answer.  `thoughts` are the ones of messages that the parent does
    not have, by the message's index.  `rewrites`: the turn whose messages this one has, too, where the template does
    not render them as its tokens any more.
    """

    rid: str
    key: bytes
    parent: Turn | None
    rewrites: Turn | None
    thoughts: dict[int, str]
    num_messages: int
    given_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    output_mask: MaskRecord | None
    routes: RoutedExpertsPayload | None
    versions: list[VersionSpan]
    reason: FinishReason
    adapter: AdapterLabel | None
    end: int
    num_bytes: int

    @property
    def output_start(self) -> int:
        """The position of the first sampled token."""
        return self.end - len(self.output_ids)

    def chain(self) -> list[Turn]:
        """Return the turns from the first one of the conversation to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def all_thoughts(self) -> dict[int, str]:
        """Return the thoughts of the whole conversation, by the index of their message."""
        return {index: thought for turn in self.chain() for index, thought in turn.thoughts.items()}

    def token_ids(self) -> list[int]:
        """Return all tokens up to the end of this turn."""
        return [token for turn in self.chain() for part in (turn.given_ids, turn.output_ids) for token in part]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a chat.  Its messages have the thoughts that the client left out.

    `continues`: its answer goes on with the last message.
    """

    token_ids: list[int]
    messages: list[Message]
    context: bytes = b""
    parent: Turn | None = None
    rewrites: Turn | None = None
    continues: bool = False


@dataclass(slots=True)
class _Session:
    turns: dict[Turn, None] = field(default_factory=dict)  # in the order of their ends
    by_key: dict[bytes, Turn] = field(default_factory=dict)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    session_id: str
    prompt: Prompt
    new_message: Callable[[], ChatMessage]
    kept_ids: frozenset[int]


class Conversations:
    """The turns of sessions; an observer of the manager.  Use from its event loop.

    All of them take at most `max_bytes`.  The session that was used least recently goes first, and goes whole: a turn
    that would go on from one of its turns is not kept.
    """

    def __init__(self, manager: TokenizerManager, max_bytes: int) -> None:
        self._manager = manager
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._pending: weakref.WeakKeyDictionary[SampleRecord, _Pending] = weakref.WeakKeyDictionary()

    # --- prompts -------------------------------------------------------------------------------------------------

    def takes(self, body: ChatCompletionRequest) -> bool:
        """Return whether a chat of a session is a turn: it has messages, and turns are kept."""
        return body.input_ids is None and self._max_bytes > 0

    async def prompt(self, session_id: str, body: ChatCompletionRequest) -> Prompt:
        """Return the prompt of a chat.  Raises `BadRequest` as its rendering does."""
        messages = body.template_messages()
        settings = [body.template_tools(), body.template_variables(), body.model, body.lora_path]
        context = digest(b"", settings)  # another adapter begins a conversation of its own
        found = self._last_turn(session_id, context, messages)
        if found is not None:
            turn, count = found
            known = with_thoughts(messages, turn.all_thoughts())
            if body.continue_final_message and count == len(messages) and _is_cut(turn, known[-1]):
                return Prompt(turn.token_ids(), known, context, parent=turn, continues=True)
            token_ids: list[int] | None = None
            with contextlib.suppress(BadRequest):  # a template may refuse messages that end with an answer
                token_ids = await self._extended(turn, body, known, count)
            if token_ids is not None:
                return Prompt(token_ids, known, context, parent=turn, continues=body.continue_final_message)
        rewrites = None if found is None else found[0]
        rendered = await self._render(body, messages, add_head=body.add_generation_prompt)
        (anew,) = await self._manager.tokenizer.encode([rendered], add_special_tokens=False)
        return Prompt(anew, messages, context, rewrites=rewrites, continues=body.continue_final_message)

    def _last_turn(self, session_id: str, context: bytes, messages: list[Message]) -> tuple[Turn, int] | None:
        """Return the turn that has the most of these messages, and their number."""
        session = self._sessions.get(session_id)
        if session is None:
            return None
        self._sessions.move_to_end(session_id)
        keys = list(keys_of(context, messages))
        for count in range(len(messages), 0, -1):
            turn = session.by_key.get(keys[count - 1]) if messages[count - 1]["role"] == "assistant" else None
            if turn is not None and has_thoughts(messages[:count], turn.all_thoughts()):
                return turn, count
        return None

    async def _extended(
        self, turn: Turn, body: ChatCompletionRequest, messages: list[Message], count: int
    ) -> list[int] | None:
        """Return the tokens of `turn` and of what follows; None where the template does not keep its messages."""
        before = await self._render(body, messages[:count], add_head=False, continues=False)
        whole = await self._render(body, messages, add_head=body.add_generation_prompt)
        if whole.startswith(before):
            added = self._after_answer(turn, before, whole[len(before) :])
        else:  # some templates write the last message otherwise than earlier ones
            added = await self._after_tokens(turn, whole)
        if added is None:
            return None
        return turn.token_ids() + await self._encode_after(turn.output_ids[-1], added)

    async def _encode_after(self, token_id: int, text: str) -> list[int]:
        """Return the tokens of a text behind a token: at the beginning, some tokenizers put a space before a text."""
        tokenizer = self._manager.tokenizer
        if token_id in tokenizer.vocabulary.special_ids:
            (ids,) = await tokenizer.encode([tokenizer.token_text(token_id) + text], add_special_tokens=False)
            if ids[:1] == [token_id]:
                return ids[1:]
        (ids,) = await tokenizer.encode([text], add_special_tokens=False)
        return ids

    async def _after_tokens(self, turn: Turn, whole: str) -> str | None:
        """Return the text behind the tokens of a turn; None unless `whole` begins with their very text."""
        tokenizer = self._manager.tokenizer
        (text,) = await tokenizer.decode_each([turn.token_ids()], skip_special_tokens=False)
        end = "" if tokenizer.eos_token_id is None else tokenizer.token_text(tokenizer.eos_token_id)
        if not whole.startswith(text) or not end:
            return None
        is_closed = turn.reason.matched == turn.output_ids[-1] or whole.startswith(end, len(text))
        return whole[len(text) :] if is_closed else None

    def _after_answer(self, turn: Turn, before: str, after: str) -> str | None:
        """Return the text behind the last token of a turn; None if the place of that token is not known.

        `before` is the text of the turn's messages, and `after` what the template puts behind them.  A template closes
        the last message itself, or where another one follows.
        """
        tokenizer = self._manager.tokenizer
        matched = turn.reason.matched
        is_sampled = isinstance(matched, int) and turn.output_ids[-1] == matched
        end_id = turn.output_ids[-1] if is_sampled else tokenizer.eos_token_id
        end = "" if end_id is None else tokenizer.token_text(end_id)
        skipped = len(end) if is_sampled else 0
        place = before.rfind(end)
        if not end.strip():  # space that the template writes anywhere is not the end of a turn
            return None
        if place >= 0 and not before[place + len(end) :].strip():
            return before[place + skipped :] + after
        return after[skipped:] if after.startswith(end) else None

    async def _render(
        self, body: ChatCompletionRequest, messages: list[Message], *, add_head: bool, continues: bool | None = None
    ) -> str:
        return await self._manager.tokenizer.render_text(
            messages,
            tools=body.template_tools(),
            continue_final=body.continue_final_message if continues is None else continues,
            add_generation_prompt=add_head,
            extra=body.template_variables(),
        )

    # --- turns ---------------------------------------------------------------------------------------------------

    def prepare(self, wanted: GenerateReqInput, prompt: Prompt) -> None:
        """Have the engine record what a turn keeps.  The answer shows no more than its request asked for."""
        limits = self._manager.limits
        shows_routes = (
            limits.routes_by_default if wanted.return_routed_experts is None else wanted.return_routed_experts
        )
        wanted.hidden = frozenset(
            name for name, is_shown in (("logprobs", wanted.return_logprob), ("routes", shows_routes)) if not is_shown
        )
        wanted.return_logprob = True
        wanted.return_routed_experts = limits.captures_routes or shows_routes
        if not shows_routes and prompt.parent is not None:
            wanted.routed_experts_start_len = prompt.parent.end - 1  # the row of its last token comes now

    def follow(
        self,
        session_id: str,
        prompt: Prompt,
        records: list[SampleRecord],
        new_message: Callable[[], ChatMessage],
        kept_ids: frozenset[int],
    ) -> None:
        """Make each sample a turn once it has ended.  One that is lost is forgotten with its record."""
        for record in records:
            self._pending[record] = _Pending(session_id, prompt, new_message, kept_ids)

    def on_first_token(self, record: SampleRecord) -> None:
        """Do nothing: a turn is kept once it has ended."""

    def on_finished(self, record: SampleRecord) -> None:
        """Keep a sample that is followed, unless it has no tokens."""
        pending = self._pending.pop(record, None)
        if pending is None or not record.output_ids:
            return
        session = self._sessions.get(pending.session_id, _Session())
        if pending.prompt.parent is not None and pending.prompt.parent not in session.turns:
            return
        turn = self._turn(record, pending)
        self._sessions[pending.session_id] = session
        self._sessions.move_to_end(pending.session_id)
        session.turns[turn] = None
        session.by_key[turn.key] = turn
        session.num_bytes += turn.num_bytes
        self._num_bytes += turn.num_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._sessions.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def _turn(self, record: SampleRecord, pending: _Pending) -> Turn:
        finished, prompt = record.finished, pending.prompt
        assert finished is not None
        text = SampleText(record, self._manager.tokenizer, pending.kept_ids).update()
        answer = answer_message(pending.new_message().delta(text, is_last=True))
        messages = continued(prompt.messages, answer) if prompt.continues else [*prompt.messages, answer]
        num_known = 0 if prompt.parent is None else prompt.parent.num_messages
        thoughts = thoughts_of(messages, num_known)
        given = prompt.token_ids[0 if prompt.parent is None else prompt.parent.end :]
        mask = record.output_mask if record.source.return_sampling_mask else None
        num_bytes = _TURN_BYTES + _TOKEN_BYTES * (len(given) + 2 * len(record.output_ids))
        num_bytes += sum(map(sys.getsizeof, thoughts.values()))
        num_bytes += 0 if finished.routed_experts is None else len(finished.routed_experts.data)
        num_bytes += 0 if mask is None else len(mask.token_ids) + len(mask.kept_logprobs)
        *_, key = keys_of(prompt.context, messages)
        return Turn(
            rid=record.rid,
            key=key,
            parent=prompt.parent,
            rewrites=prompt.rewrites,
            thoughts=thoughts,
            num_messages=len(messages),
            given_ids=given,
            output_ids=record.output_ids,
            output_logprobs=record.output_logprobs,
            output_mask=mask,
            routes=finished.routed_experts,
            versions=finished.weight_versions,
            reason=finished.reason,
            adapter=record.adapter,
            end=len(prompt.token_ids) + len(record.output_ids),
            num_bytes=num_bytes,
        )

    def turns(self, session_id: str) -> list[Turn]:
        """Return the turns of a session in the order of their ends; none for one that is not known."""
        session = self._sessions.get(session_id)
        return [] if session is None else list(session.turns)


def _is_cut(turn: Turn, answer: Message) -> bool:
    """Return whether a turn ended within the text of its answer, so that its tokens are what goes on."""
    is_text = bool(answer.get("content")) or "reasoning_content" not in answer
    return turn.reason.type in ("length", "abort") and is_text and not answer.get("tool_calls")
