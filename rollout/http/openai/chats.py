"""Chats on their way to the engine: prompts by the model's template, and a message for each sample.

Every door for chats translates its body into a `ChatCompletionRequest` and submits it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout.http.conversations import Conversations
from rollout.http.openai.messages import ChatMessage, ChatMessages
from rollout.http.openai.protocol import ChatCompletionRequest
from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput


class Chats:
    """Renders and submits chats."""

    def __init__(self, manager: TokenizerManager, conversations: Conversations) -> None:
        """Find the parsers that the settings name.  Raises `StartupError`."""
        self._manager = manager
        self._conversations = conversations
        self._messages = ChatMessages(manager)

    async def prompt_ids(self, body: ChatCompletionRequest) -> list[int]:
        """Return the ids of the prompt: `input_ids`, or the messages under the template.  Raises `BadRequest`."""
        if body.input_ids is not None:
            return body.input_ids
        return await self._manager.tokenizer.render_chat(
            body.template_messages(),
            tools=body.template_tools(),
            continue_final=body.continue_final_message,
            add_generation_prompt=body.add_generation_prompt,
            extra=body.template_variables(),
        )

    def wanted(
        self, body: ChatCompletionRequest, headers: Mapping[str, str], prompt_ids: list[int]
    ) -> GenerateReqInput:
        """Return the request of a chat with this prompt.  Raises `BadRequest`."""
        wanted = body.to_request(headers, prompt_ids, self._messages.kept_tokens(body), self._messages.end_ids())
        grammar = self._messages.grammar(body, prompt_ids)
        wanted.ignored_fields = [*wanted.ignored_fields, *self._messages.unbound(body)]
        if grammar is not None:
            assert isinstance(wanted.sampling_params, dict)
            wanted.sampling_params["structured_outputs"] = grammar.structured_outputs()
        return wanted

    def maker(self, body: ChatCompletionRequest, prompt_ids: list[int]) -> Callable[[], ChatMessage]:
        """Return a maker of the messages that answer `body`.  Raises `BadRequest`."""
        return self._messages.maker(body, prompt_ids)

    async def submit(
        self, body: ChatCompletionRequest, headers: Mapping[str, str], *, ends_with_context: bool = False
    ) -> tuple[GenerateHandle, list[ChatMessage]]:
        """Send the request; return its handle, and a message for each of its samples.  Raises what refuses it.

        `ends_with_context`: `max_tokens` that the context has no room for are cut, and not refused.
        """
        session_id = body.common_fields(headers)["session_id"]
        prompt = None
        if session_id is not None and self._conversations.takes(body):
            prompt = await self._conversations.prompt(session_id, body)
        prompt_ids = await self.prompt_ids(body) if prompt is None else prompt.token_ids
        room = self._manager.limits.room(len(prompt_ids))
        if ends_with_context and (body.max_tokens or 0) > room > 0:
            body = body.model_copy(update={"max_completion_tokens": room})
        wanted = self.wanted(body, headers, prompt_ids)
        make_message = self.maker(body, prompt_ids)
        if prompt is not None:
            self._conversations.prepare(wanted, prompt)
        handle = await self._manager.submit(wanted)
        if prompt is not None:
            self._conversations.follow(session_id, prompt, handle.records, make_message, handle.form.kept_ids)
        return handle, [make_message() for _ in handle.records]
