"""Chats as the text that a model was trained on, by the Jinja template of its tokenizer.

A template is a program from a checkpoint: it runs in Jinja's sandbox, over plain values.  What it finds there (names,
filters, blocks) and how messages are prepared is what transformers 5.24 does, whatever version is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.text.tokenizer_files import DEFAULT_TEMPLATE

TOOL_TEMPLATE = "tool_use"
_END_MARK = "END-OF-THE-TEXT-TO-CONTINUE "
"""Stands behind the text to continue, so that its end is found in the chat; a template that trims takes the space."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thought, by rank."""
_ASKS_FOR_NULL = re.compile(r"\bcontent\b['\"]?\]?\s+is\s+(?:not\s+)?none\b")
"""A template that tells a message without content from one whose content is empty, as DeepSeek-V3's does."""


class ChatTemplates:
    """The templates of a tokenizer, by name.  Safe to use from several threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}

    @property
    def source(self) -> str | None:
        """The template for chats without tools; None if there is none."""
        return self._sources.get(DEFAULT_TEMPLATE)

    def template(self, *, for_tools: bool) -> Template:
        """Return the template for chats with tools, or without.  Raises `UnsupportedFeature` if there is none."""
        name = self._name(for_tools=for_tools)
        if not self._sources:
            raise UnsupportedFeature(
                "this model's tokenizer has no chat template; send `input_ids` or use /v1/completions"
            )
        if name not in self._sources:
            names = ", ".join(sorted(self._sources))
            raise UnsupportedFeature(f"this model's tokenizer has no chat template {name!r}, only {names}")
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except TemplateSyntaxError as error:
                raise UnsupportedFeature(
                    f"this model's chat template is broken: line {error.lineno}: {error}"
                ) from None
        return self._compiled[name]

    def _asks_for_null(self, tools: list[Any] | None) -> bool:
        return _ASKS_FOR_NULL.search(self._sources[self._name(for_tools=tools is not None)]) is not None

    def _name(self, *, for_tools: bool) -> str:
        return TOOL_TEMPLATE if for_tools and TOOL_TEMPLATE in self._sources else DEFAULT_TEMPLATE

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        continue_final: bool,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the text of a chat.

        `continue_final` ends it where the last message goes on; else `add_generation_prompt` puts the head of the
        assistant's turn behind it.  Raises `UnsupportedFeature` without a usable template, `BadRequest` where the
        template refuses the messages.
        """
        template = self.template(for_tools=tools is not None)
        values = {"documents": None} | self._special_tokens | dict(variables)
        try:
            prepared = [_prepared(message, keeps_null=self._asks_for_null(tools)) for message in messages]
            if continue_final:
                prepared[-1] = _marked(prepared[-1])
            values |= {"messages": prepared, "tools": tools}
            values["add_generation_prompt"] = add_generation_prompt and not continue_final
            text = template.render(values)
            return _until_mark(text, messages[-1]) if continue_final else text
        except Exception as error:
            # Templates are programs: what they raise for odd messages is up to their author.
            raise BadRequest(f"messages: the chat template refused them: {error}") from None


# --- messages ------------------------------------------------------------------------------------------------------


def _prepared(message: Mapping[str, Any], *, keeps_null: bool) -> dict[str, Any]:
    """Return the message without fields that are null, its thought under each name that templates read.

    Content that is null is empty for templates that do not ask for null.
    """
    nothing = {"content": None if keeps_null else ""} if message.get("content", "") is None else {}
    message = {key: value for key, value in message.items() if value is not None} | nothing
    thought = next((message[name] for name in _REASONING if name in message), None)
    return message if thought is None else {"thinking": thought} | message | {"reasoning_content": thought}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a mark behind its text."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _END_MARK}
    parts = [dict(part) for part in content or ()]
    texts = [part for part in parts if "text" in part]
    if not texts:
        raise TemplateError("the last message has no text to continue; send it with content")
    texts[-1]["text"] += _END_MARK
    return message | {"content": parts}


def _until_mark(text: str, message: Mapping[str, Any]) -> str:
    """Return the chat up to the mark, without the mark."""
    end = text.rfind(_END_MARK.strip())
    content = message["content"]
    if end < 0 or (isinstance(content, str) and content.strip() not in text):
        raise TemplateError("the chat template does not render the text of the last message, so it cannot be continued")
    kept = text[:end]
    return kept if text.startswith(_END_MARK, end) else kept.rstrip()


# --- what templates find -------------------------------------------------------------------------------------------


class _GenerationBlocks(Extension):
    """Read `{% generation %}` ... `{% endgeneration %}`, which trainers use to find the assistant's tokens."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace of a template, without names that Python itself uses."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold {name!r}: names that begin with _ are reserved for Python")


class _Dict:
    """`dict` of a template: makes one, and has nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models are trained on it; Jinja's own filter escapes what HTML reserves."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment
