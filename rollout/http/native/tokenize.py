"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from rollout.core.errors import BadRequest, TooLarge
from rollout.core.known_fields import MEDIA_FIELDS
from rollout.http.chat_messages import plain_messages, template_variables
from rollout.http.io import NamingRoute, body_schema, json_body, json_response
from rollout.http.protocol import Body, FreeObject, Messages, TokenIds, Tools
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import MAX_BATCH
from rollout.tokenizer_manager.validation import check_token_ids

MAX_DECODED_IDS = 1 << 20


class TokenizeRequest(Body):
    """POST /tokenize.  The fields from `tools` to `add_generation_prompt` are for messages."""

    unsupported = frozenset({"chat_template", "return_token_strs", "documents", "mm_processor_kwargs"})
    harmless = MEDIA_FIELDS

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: FreeObject = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[TokenIds | list[TokenIds], Field(union_mode="left_to_right")]
    skip_special_tokens: bool | None = None


TokenizeBody = Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))]


class TokenizeRoutes:
    """Token ids of texts and texts of token ids, under SGLang's and vLLM's names."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def router(self) -> APIRouter:
        router = APIRouter(route_class=NamingRoute, tags=["native"])
        add = router.add_api_route
        for prefix in ("", "/v1"):
            add(f"{prefix}/tokenize", self.tokenize, methods=["POST"], openapi_extra=body_schema(TokenizeRequest))
            add(f"{prefix}/detokenize", self.detokenize, methods=["POST"], openapi_extra=body_schema(DetokenizeRequest))
        return router

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Return the token ids of a prompt, of each prompt in a list, or of a chat under the model's template."""
        tokenizer, limits = self._manager.tokenizer, self._manager.limits
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages")
        if isinstance(body.prompt, list) and len(body.prompt) > MAX_BATCH:
            raise TooLarge(f"a request holds at most {MAX_BATCH} prompts, got {len(body.prompt)}")
        if body.messages is not None:
            tokens: Any = await tokenizer.render_chat(
                plain_messages(body.messages),
                tools=body.tools,
                continue_final=body.continue_final_message,
                add_generation_prompt=body.add_generation_prompt,
                extra=template_variables(body.chat_template_kwargs),
            )
        elif isinstance(body.prompt, str):
            (tokens,) = await tokenizer.encode([body.prompt], add_special_tokens=body.add_special_tokens)
        else:
            tokens = await tokenizer.encode(body.prompt or [], add_special_tokens=body.add_special_tokens)
        count: Any = [len(ids) for ids in tokens] if isinstance(body.prompt, list) else len(tokens)
        content = {"tokens": tokens, "count": count, "max_model_len": limits.context_length}
        return await asyncio.to_thread(json_response, content)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Return the text of a list of token ids, or of each list in a batch."""
        tokenizer, vocab_size = self._manager.tokenizer, self._manager.limits.vocab_size
        is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
        batch: list[Any] = list(body.tokens) if is_batch else [body.tokens]  # of lists of ids
        if len(batch) > MAX_BATCH:
            raise TooLarge(f"a request holds at most {MAX_BATCH} lists of token ids, got {len(batch)}")
        size = sum(map(len, batch))
        if size > MAX_DECODED_IDS:
            raise TooLarge(f"a request holds at most {MAX_DECODED_IDS} token ids to decode, got {size}")
        for token_ids in batch:
            check_token_ids(token_ids, vocab_size, "tokens")
        skips = body.skip_special_tokens
        content = {}
        for name, default in (("text", True), ("prompt", False)):  # SGLang's name and default, and vLLM's
            texts = await tokenizer.decode_each(batch, skip_special_tokens=default if skips is None else skips)
            content[name] = texts if is_batch else texts[0]
        return json_response(content)
