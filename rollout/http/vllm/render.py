"""vLLM's renderer: chats and completions as token requests, and generated tokens as their answers.

    render      a body of /v1/chat/completions  ->  a body of /inference/v1/generate
    derender    its answer                      ->  the answer of /v1/chat/completions

Nothing is generated here.  A stream is derendered chunk by chunk.  Its state is the tokens so far, which the client
brings along, so that any server of the model can go on with it.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from rollout.core.errors import BadRequest, NotFound
from rollout.core.sampling_params import sampling_params_from_dict
from rollout.http.answers import Native, finish_fields
from rollout.http.direct import DirectRoute
from rollout.http.io import body_schema, json_body, json_response, validated
from rollout.http.openai.chats import Chats
from rollout.http.openai.format import chat_finish_fields
from rollout.http.openai.messages import ChatMessage
from rollout.http.openai.protocol import ChatCompletionRequest, CompletionRequest, OpenAIRequest
from rollout.http.protocol import Body, FreeObject, TokenIds
from rollout.text.detokenizer import IncrementalDetokenizer, final_text
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput
from rollout.tokenizer_manager.validation import check_token_ids

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_KEPT = ("model", "session_id", "lora_path", "extra_key", "cache_salt", "max_kv_version_lag")


class GeneratedChoice(Body):
    """A choice of /inference/v1/generate."""

    harmless = frozenset({"routed_experts", "sampling_mask", "weight_versions", "stop_reason"})

    index: int = 0
    token_ids: TokenIds
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    logprobs: FreeObject | None = None


class Generated(Body):
    """An answer, or a chunk, of /inference/v1/generate."""

    harmless = frozenset(
        {*("created", "model", "usage", "metadata", "version_info", "prompt_logprobs", "kv_transfer_params")}
    )

    request_id: str | None = None
    choices: list[GeneratedChoice]


class DerenderFields(Body):
    """The fields of both endpoints."""

    model: str | None = None
    stream: bool = False
    stream_state: FreeObject | None = None
    generate_chunk: Generated | None = None


class DerenderChatRequest(DerenderFields):
    """POST /v1/chat/completions/derender.  Without `chat_request` the text is neither split nor cut."""

    generate_response: Generated | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: FreeObject | None = None


class DerenderCompletionRequest(DerenderFields):
    """POST /v1/completions/derender: the answers of all prompts, in their order."""

    generate_responses: list[Generated] = []
    prompt_tokens: list[int] | None = None
    completion_request: FreeObject | None = None


ChatBody = Annotated[ChatCompletionRequest, Depends(json_body(ChatCompletionRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(json_body(CompletionRequest))]
DerenderChatBody = Annotated[DerenderChatRequest, Depends(json_body(DerenderChatRequest))]
DerenderCompletionBody = Annotated[DerenderCompletionRequest, Depends(json_body(DerenderCompletionRequest))]


class RenderRoutes:
    """Rendering and derendering."""

    def __init__(self, manager: TokenizerManager, chats: Chats) -> None:
        self._manager = manager
        self._chats = chats

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", route_class=DirectRoute, tags=["tokens"])
        for path, function, body in (
            ("/chat/completions/render", self.render_chat, ChatCompletionRequest),
            ("/completions/render", self.render_completion, CompletionRequest),
            ("/chat/completions/derender", self.derender_chat, DerenderChatRequest),
            ("/completions/derender", self.derender_completion, DerenderCompletionRequest),
        ):
            router.add_api_route(path, function, methods=["POST"], openapi_extra=body_schema(body))
        return router

    # --- render --------------------------------------------------------------------------------------------------

    async def render_chat(self, request: Request, body: ChatBody) -> Response:
        """Return the body of /inference/v1/generate for a chat."""
        token_ids = await self._chats.prompt_ids(body)
        wanted = self._chats.wanted(body, request.headers, token_ids)
        return json_response(self._rendered(body, wanted, token_ids, "chatcmpl"))

    async def render_completion(self, request: Request, body: CompletionBody) -> Response:
        """Return a body of /inference/v1/generate for each prompt."""
        wanted = body.to_request(request.headers)
        ids = wanted.input_ids or await self._manager.tokenizer.encode(wanted.texts)
        prompts: list[Any] = ids if isinstance(ids[0], list) else [ids]
        return json_response([self._rendered(body, wanted, token_ids, "cmpl") for token_ids in prompts])

    def _rendered(
        self, body: OpenAIRequest, wanted: GenerateReqInput, token_ids: list[int], prefix: str
    ) -> dict[str, Any]:
        params = wanted.sampling_params
        assert isinstance(params, dict)
        sampling = {_NAMES.get(name, name): value for name, value in params.items()}
        sampling.setdefault("max_tokens", min(self._manager.limits.room(len(token_ids)), body.default_new_tokens))
        if wanted.return_logprob:
            sampling["logprobs"] = wanted.top_logprobs_num
        kept = {name: value for name in _KEPT if (value := getattr(body, name)) is not None}
        if body.resumable:
            kept["resumable"] = True
        name = body.name or f"{prefix}-{uuid.uuid4().hex}"
        return {"request_id": name, "token_ids": token_ids, "sampling_params": sampling, "stream": body.stream} | kept

    # --- derender ------------------------------------------------------------------------------------------------

    async def derender_chat(self, body: DerenderChatBody) -> Response:
        """Return the answer of a chat from its generated tokens, or a chunk of it."""
        self._check_model(body.model)
        generated = _given(body, body.generate_response, "generate_response")
        prompt_ids = body.prompt_token_ids or [0]
        chat = ChatCompletionRequest(separate_reasoning=False)
        if body.chat_request is not None:
            chat = validated(ChatCompletionRequest, body.chat_request)
            prompt_ids = body.prompt_token_ids or await self._chats.prompt_ids(chat)
        new_message = self._chats.maker(chat, prompt_ids)
        text_of = GeneratedText(self._manager, self._chats.wanted(chat, {}, prompt_ids))
        choices = []
        for each in generated.choices:
            old, new, native = text_of.parts(each, _tokens_before(body, each.index))
            message = new_message()
            if old:
                message.delta(old, is_last=False)
            delta = message.delta(new, is_last=each.finish_reason is not None or not body.stream)
            choices.append(_chat_choice(each, delta, native, message, body.stream, is_first=not old))
        num_prompt = len(body.prompt_token_ids or ()) if body.prompt_tokens is None else body.prompt_tokens
        return self._answer(body, "chat.completion", [generated], choices, num_prompt)

    async def derender_completion(self, body: DerenderCompletionBody) -> Response:
        """Return the answer of a completion from the generated tokens of its prompts, or a chunk of it."""
        self._check_model(body.model)
        wanted = GenerateReqInput(input_ids=[0])
        if body.completion_request is not None:
            wanted = validated(CompletionRequest, body.completion_request).to_request({})
        given = body.generate_responses
        parts = [_given(body, None, "generate_responses")] if body.stream or not given else given
        text_of = GeneratedText(self._manager, wanted)
        choices: list[dict[str, Any]] = []
        for generated in parts:
            for each in generated.choices:
                _, new, native = text_of.parts(each, _tokens_before(body, each.index))
                choice = {"index": len(choices), "text": new, "logprobs": each.logprobs}
                choices.append(choice | finish_fields(native))
        return self._answer(body, "text_completion", parts, choices, sum(body.prompt_tokens or ()))

    def _check_model(self, name: str | None) -> None:
        limits = self._manager.limits
        if name is not None and name not in (*self._manager.server_args.names, *(limits.names.adapters or ())):
            raise NotFound(f"the model {name!r} does not exist")

    def _answer(
        self,
        body: DerenderFields,
        object_name: str,
        parts: list[Generated],
        choices: list[dict[str, Any]],
        num_prompt: int,
    ) -> Response:
        head = {
            "id": parts[0].request_id or uuid.uuid4().hex,
            "object": object_name,
            "created": int(time.time()),
            "model": body.model or self._manager.server_args.name,
            "choices": choices,
        }
        if body.stream:
            state = {
                str(each.index): _tokens_before(body, each.index) + each.token_ids
                for part in parts
                for each in part.choices
            }
            chunk = head | ({"object": f"{object_name}.chunk"} if object_name.startswith("chat") else {})
            tokens = (body.stream_state or {}).get("token_ids") or {}
            return json_response({"chunk": chunk, "stream_state": {"token_ids": tokens | state}})
        num_output = sum(len(each.token_ids) for part in parts for each in part.choices)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        return json_response(head | {"usage": usage})


class GeneratedText:
    """The text of generated tokens, cut and shown as the request of them asks."""

    def __init__(self, manager: TokenizerManager, wanted: GenerateReqInput) -> None:
        """Take the request of the tokens.  Raises `BadRequest` for stop strings that no request may have."""
        assert isinstance(wanted.sampling_params, dict)
        params, _ = sampling_params_from_dict(wanted.sampling_params)
        params.validate_lists(manager.limits.vocab_size)
        tokenizer = manager.tokenizer
        kept_ids = tokenizer.vocabulary.ids_of(wanted.kept_special_tokens)
        self._vocab_size = manager.limits.vocab_size
        self._trims = not params.no_stop_trim
        self._stops = params.stop if self._trims else ()
        self._decode = lambda ids: tokenizer.decode(
            ids, skip_special_tokens=params.skip_special_tokens, kept_ids=kept_ids
        )

    def parts(self, choice: GeneratedChoice, before: list[int]) -> tuple[str, str, Native]:
        """Return the text of the tokens `before`, the text that the choice adds, and the choice as a response.

        Raises `BadRequest` for no tokens, and for ids that do not exist.
        """
        if not choice.token_ids and choice.finish_reason is None:
            raise BadRequest("a choice has no token_ids")
        check_token_ids([*before, *choice.token_ids], self._vocab_size, "token_ids")
        detokenizer = IncrementalDetokenizer(self._decode, self._stops)
        detokenizer.feed(before)
        old = detokenizer.shown
        if choice.finish_reason is None:
            detokenizer.feed(choice.token_ids)
            text, reason = detokenizer.shown, None
        else:
            matched = choice.matched_stop if choice.finish_reason == "stop" else None
            text = final_text(detokenizer, choice.token_ids, matched, trim=self._trims)
            reason = {"type": choice.finish_reason, "matched": choice.matched_stop}
        return old, text[len(old) :], {"meta_info": {"finish_reason": reason}}


def _given(body: DerenderFields, whole: Generated | None, name: str) -> Generated:
    """Return the tokens that a request brings.  Raises `BadRequest` if there are none."""
    given = body.generate_chunk if body.stream else whole
    if given is None or not given.choices:
        raise BadRequest(f"{'generate_chunk' if body.stream else name} is missing, or has no choices")
    return given


def _tokens_before(body: DerenderFields, index: int) -> list[int]:
    """Return the tokens of a choice that came in earlier chunks.  Raises `BadRequest` for a state that is not ours."""
    if not body.stream:
        return []
    tokens = (body.stream_state or {}).get("token_ids", {})
    found = tokens.get(str(index), []) if isinstance(tokens, dict) else None
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise BadRequest("stream_state must be the one of the chunk before")
    return found


def _chat_choice(
    choice: GeneratedChoice,
    delta: dict[str, Any],
    native: Native,
    message: ChatMessage,
    stream: bool,
    *,
    is_first: bool,
) -> dict[str, Any]:
    role = {"role": "assistant"} if is_first or not stream else {}
    if not stream and "tool_calls" in delta:
        delta["content"] = delta["content"] or None
    spoken = {"delta" if stream else "message": role | delta}
    return {"index": choice.index, **spoken, "logprobs": choice.logprobs} | chat_finish_fields(message, native)
