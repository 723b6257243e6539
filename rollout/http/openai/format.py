"""Native responses as OpenAI's: choices, log-probabilities, usage, and SGLang's additions.

Pure functions over the dicts that `tokenizer_manager.response` builds.

A native log-probability entry is `[log-probability or None, token id, text or None]`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from rollout.http.answers import (
    Entry,
    Native,
    beside,
    finish_fields,
    finite,
    ignored_fields,
    prompt_logprobs,
    token_record,
    usage,
    version_info,
)
from rollout.http.openai.messages import ChatMessage
from rollout.http.openai.protocol import ChatCompletionRequest, CompletionRequest, OpenAIRequest
from rollout.text.token_vocabulary import TokenVocabulary


def response_head(object_name: str, model: str, created: int, first: Native) -> dict[str, Any]:
    """Return the fields that every response and chunk begins with."""
    return {"id": first["meta_info"]["id"], "object": object_name, "created": created, "model": model}


def response_tail(request: OpenAIRequest, natives: Sequence[Native]) -> dict[str, Any]:
    """Return `usage`, the weight versions and, where routes were asked for, `sglext` of the first choice."""
    label = natives[0]["meta_info"]["weight_version"]
    tail: dict[str, Any] = {"usage": usage(natives, request.n)} | versions(natives[0]) | ignored_fields(natives[0])
    if label.isdecimal():  # rllm's gateway reads a number there, and goes without one
        tail["weight_version"] = label
    if isinstance(request, ChatCompletionRequest):  # vLLM's place for fields of the one prompt
        if request.return_token_ids:
            tail["prompt_token_ids"] = natives[0]["prompt_token_ids"]
        if request.prompt_logprobs is not None:
            tail["prompt_logprobs"] = prompt_logprobs(natives[0]["meta_info"], request.prompt_logprobs)
    extension = sglext(request, natives[0])
    return tail | ({"sglext": extension} if extension else {})


def versions(native: Native) -> dict[str, Any]:
    """Return `version_info`, and its fields that are text as `metadata`: OpenAI's type holds nothing else there."""
    facts = version_info(native)
    return {
        "metadata": {name: value for name, value in facts.items() if isinstance(value, str)},
        "version_info": facts,
    }


def sglext(request: OpenAIRequest, native: Native) -> dict[str, Any]:
    """Return the routed experts of one choice.  There are none where each choice carries its own."""
    if request.has_record:
        return {}
    return {key: value for key, value in native["meta_info"].items() if key.startswith("routed_experts")}


# --- completions -------------------------------------------------------------------------------------------------


def completion_logprobs(
    request: CompletionRequest, meta: dict[str, Any], offsets: TextOffsets, first: int = 0, prompt_text: str = ""
) -> dict[str, Any]:
    """Return parallel lists over the output tokens from `first` on.

    With echo, where `first` is 0, the prompt's tokens come before them.  Their text is `prompt_text`.
    """
    entries: list[Entry] = meta["output_token_logprobs"][first:]
    tops = beside(meta, "output_top_logprobs", first, entries, request.logprobs)
    places = []
    if request.echo:
        prompt = meta["input_token_logprobs"]
        places = offsets.prompt([entry[1] for entry in prompt], prompt_text)
        entries = prompt + entries
        tops = beside(meta, "input_top_logprobs", 0, prompt, request.logprobs) + tops
    places += offsets.output([entry[1] for entry in entries[len(places) :]])
    return {
        "tokens": [_token_text(entry) for entry in entries],
        "token_logprobs": [None if entry[0] is None else finite(entry[0]) for entry in entries],
        "top_logprobs": [None if entry[0] is None else _top_dict(entry, top) for entry, top in zip(entries, tops)],
        "text_offset": places,
    }


def _top_dict(sampled: Entry, top: Sequence[Entry]) -> dict[str, float]:
    """Return the log-probability of each text, best first.  The best of several tokens with one text counts."""
    result: dict[str, float] = {}
    for entry in [*top, sampled]:
        result.setdefault(_token_text(entry), finite(entry[0]))
    return result


# --- chat --------------------------------------------------------------------------------------------------------


def chat_finish_fields(message: ChatMessage, native: Native) -> dict[str, Any]:
    """Return `finish_fields`; the reason is "tool_calls" if the answer calls tools and ended by itself."""
    fields = finish_fields(native)
    return (
        fields | {"finish_reason": "tool_calls"} if message.num_calls and fields["finish_reason"] == "stop" else fields
    )


def chat_logprobs(
    meta: dict[str, Any], first: int, num_top: int | None, vocabulary: TokenVocabulary | None
) -> dict[str, Any]:
    """Return one object per output token from `first` on, each with the `num_top` most probable tokens there."""
    entries = meta["output_token_logprobs"][first:]
    content = [
        _chat_entry(entry, vocabulary) | {"top_logprobs": [_chat_entry(item, vocabulary) for item in top]}
        for entry, top in zip(entries, beside(meta, "output_top_logprobs", first, entries, num_top))
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: Entry, vocabulary: TokenVocabulary | None) -> dict[str, Any]:
    """Return the entry of one token in the log-probabilities of a chat.

    `bytes` may be part of a character, whose text is U+FFFD.  They are null where the token's name is its id.
    """
    encoded = None if vocabulary is None or entry[2] is None else list(vocabulary.bytes_of(entry[1]))
    return {"token": _token_text(entry), "logprob": finite(entry[0]), "bytes": encoded}


# --- choices -----------------------------------------------------------------------------------------------------


class ChoiceCursor:
    """The part of one choice that was sent: native responses are cumulative, OpenAI's chunks are not.

    Without a stream the whole choice is its only chunk.  `vocabulary` None: the server has no tokenizer.
    """

    def __init__(self, request: OpenAIRequest, vocabulary: TokenVocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._offsets = TextOffsets(vocabulary, skips_special=request.skip_special_tokens is not False)
        self._is_first = True
        self._num_chars = 0
        self._num_tokens = 0
        self._num_logprobs = 0

    def completion(self, request: CompletionRequest, index: int, native: Native, prompt_text: str) -> dict[str, Any]:
        """Return the new part as a choice of a completion; `prompt_text` is empty unless echoed."""
        is_first, self._is_first = self._is_first, False
        text = (prompt_text if is_first else "") + self._new_text(native)
        logprobs = None
        # The prompt's log-probabilities come first but are known last: with echo all go into the last chunk.
        if request.logprobs is not None and (not request.echo or _is_finished(native)):
            meta = native["meta_info"]
            logprobs = completion_logprobs(request, meta, self._offsets, self._num_logprobs, prompt_text)
            self._num_logprobs += len(logprobs["tokens"])
        choice = {"index": index, "text": text, "logprobs": logprobs}
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(native["meta_info"], request.prompt_logprobs)
        if request.wants_prompt_token_ids and is_first:
            choice["prompt_token_ids"] = native["prompt_token_ids"]
        return choice | self._ids(request, native) | finish_fields(native) | self._extras(request, native)

    def chat(self, request: ChatCompletionRequest, message: ChatMessage, index: int, native: Native) -> dict[str, Any]:
        """Return the new part as a choice of a chat."""
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(native["meta_info"], self._num_tokens, request.top_logprobs, self._vocabulary)
        delta = message.delta(self._new_text(native), is_last=_is_finished(native))
        if not request.stream and "tool_calls" in delta:
            delta["content"] = delta["content"] or None
        spoken = {"delta": delta} if request.stream else {"message": {"role": "assistant"} | delta}
        choice = {"index": index, **spoken, "logprobs": logprobs}
        if request.wants_prompt_token_ids and _is_finished(native):
            choice["prompt_token_ids"] = native["prompt_token_ids"]
        finish = chat_finish_fields(message, native)
        return choice | self._ids(request, native) | finish | self._extras(request, native)

    def _new_text(self, native: Native) -> str:
        text: str = native.get("text", "")
        new = text[self._num_chars :]
        self._num_chars = len(text)
        return new

    def _ids(self, request: OpenAIRequest, native: Native) -> dict[str, Any]:
        new = native["output_ids"][self._num_tokens :]
        self._num_tokens += len(new)
        return {"token_ids": new} if request.return_token_ids else {}

    @staticmethod
    def _extras(request: OpenAIRequest, native: Native) -> dict[str, Any]:
        """Return the fields that RL clients ask for on every choice that has ended."""
        extras: dict[str, Any] = {}
        if request.return_meta_info and _is_finished(native):
            extras["meta_info"] = native["meta_info"]
        if request.return_token_record and _is_finished(native):
            extras["token_record"] = token_record(native)
        return extras


def _is_finished(native: Native) -> bool:
    return native["meta_info"]["finish_reason"] is not None


def _token_text(entry: Entry) -> str:
    """Return the token's text, or its id on a server without a tokenizer and where the request prefers that."""
    return f"token_id:{entry[1]}" if entry[2] is None else entry[2]


# --- places ------------------------------------------------------------------------------------------------------


class TextOffsets:
    """Counts the characters of tokens as they come, whatever names the tokens have in the reply.

    The tokens of one character have its place.  A token that the text does not show has the place of what follows it.
    Without a `vocabulary` there is no text, and every place is 0.
    """

    def __init__(self, vocabulary: TokenVocabulary | None, *, skips_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skips_special = skips_special
        self._position = 0
        self._is_first = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the places of a prompt's tokens; the special ones that tokenizing added are not in its `text`."""
        hidden = set()
        if self._vocabulary is not None:
            named = {token_id: self._vocabulary.bytes_of(token_id).decode() for token_id in self._specials(token_ids)}
            hidden = {token_id for token_id, name in named.items() if name not in text}
        offsets = self._count(token_ids, hidden)
        self._position = len(text)
        self._decoder.reset()
        self._is_first = True
        return offsets

    def output(self, token_ids: Sequence[int]) -> list[int]:
        """Return the places of the next output tokens."""
        return self._count(token_ids, set(self._specials(token_ids)) if self._skips_special else set())

    def _specials(self, token_ids: Sequence[int]) -> set[int]:
        return set() if self._vocabulary is None else {*token_ids} & self._vocabulary.special_ids

    def _count(self, token_ids: Sequence[int], hidden: set[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            if self._vocabulary is None or token_id in hidden:
                continue
            piece = self._decoder.decode(self._vocabulary.bytes_of(token_id))
            if self._is_first and self._vocabulary.strips_first_space:
                piece = piece.removeprefix(" ")
            self._is_first = False
            self._position += len(piece)
        return offsets
