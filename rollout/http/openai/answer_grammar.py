"""The grammar of a chat's answer: of its thought, its tool calls, and the text that the request describes.

    answer = [thought] (calls | text)
           | [thought] (free text, call)* free text

A request that describes a text and has tools gets either.  A choice of tools that forces a call leaves out the text.
Where nothing is forced, and a tool is strict, the text is free up to the marker that begins a call.  Nothing binds the
thought.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rollout.core.errors import BadRequest, UnsupportedFeature
from rollout.core.grammar import Grammar
from rollout.core.known_fields import shown
from rollout.http.openai.parsers import harmony, reasoning
from rollout.http.openai.parsers.lark import Lark, json_value, literal, one_of, regex
from rollout.http.openai.parsers.tool_calls import CallFormat

_NAME = re.compile(r"[\w.:/-]{1,256}")
_SPACE = r"/[ \n]{0,4}/"
_BARE_CALL = r"/[\s\x1c-\x1f;]*\{(?s:.*)/"
"""A text that is read as a call by its first brace, where a format has calls without a marker."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """The beginning of an answer: within a thought, with one if the model likes, or (both False) without one."""

    is_open: bool = False
    is_possible: bool = False


def forced_tools(choice: Any, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools of which a `tool_choice` forces a call; None if it forces none.

    Raises `BadRequest` for a choice of another form and of a tool that is not there, `UnsupportedFeature` for a mode
    that is not known here.
    """
    if choice is None or choice in ("auto", "none"):
        return None
    given = {function["name"]: tool for tool in tools or () if (function := _function(tool))}
    if choice == "required":
        names = list(given)
    else:
        names = _names_in(choice)
        for name in names:
            if name not in given:
                raise BadRequest(f"tool_choice names the tool {shown(name)}, which is not among the tools")
    if not names:
        raise BadRequest("tool_choice forces a call, and there are no tools")
    return [given[name] for name in names]


def _names_in(choice: Any) -> list[str]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return [_name_in(choice)]
    if kind != "allowed_tools":
        raise BadRequest("tool_choice must be none, auto, required, a function by name, or allowed_tools")
    inner = choice.get("allowed_tools", choice)
    if not isinstance(inner, dict) or not isinstance(inner.get("tools"), list):
        raise BadRequest("tool_choice: allowed_tools must have tools")
    if inner.get("mode") != "required":
        raise UnsupportedFeature("tool_choice: allowed_tools of a mode other than required is not supported")
    return [_name_in(tool) for tool in inner["tools"]]


def _name_in(value: Any) -> str:
    """Return the name in `{"function": {"name": ...}}`, or in the flat form of the Responses API."""
    holder = value.get("function", value) if isinstance(value, dict) else None
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(name, str):
        raise BadRequest("tool_choice must have the name of a function")
    return name


def _function(tool: dict[str, Any]) -> dict[str, Any] | None:
    function = tool.get("function")
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def strict_tools(tools: list[dict[str, Any]], names: Collection[str], format_: CallFormat) -> list[dict[str, Any]]:
    """Return the tools of which only those among `names` bind their arguments; the others' may be any object.

    In a format without quotes a call has tags for the names of its arguments.  These are then the only ones, and hold
    any text.
    """
    return [tool if (_function(tool) or {}).get("name") in names else _loose(tool, format_) for tool in tools]


def _loose(tool: dict[str, Any], format_: CallFormat) -> dict[str, Any]:
    function = _function(tool)
    if function is None:
        return tool  # refused later
    parameters = function.get("parameters")
    known = parameters.get("properties") if isinstance(parameters, dict) else None
    schema: dict[str, Any] = {"type": "object"}
    if isinstance(known, dict) and not format_.has_quotes:
        schema["properties"] = dict.fromkeys(known)
    return {"type": "function", "function": {"name": function["name"], "parameters": schema}}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The tools that may be called.

    `has_many`: an answer may call more than once.  `is_free`: it is a text in which calls may stand.
    """

    format: CallFormat
    tools: list[dict[str, Any]]
    has_many: bool
    is_free: bool = False


def answer_grammar(
    lark: Lark, text: Grammar | None, calls: CallGrammar | None, thinking: Thinking, *, is_harmony: bool
) -> Grammar | None:
    """Return the grammar of an answer whose text follows `text`, None if nothing binds it.

    Raises `BadRequest` for schemas of tools that are none, `UnsupportedFeature` for a `text` that cannot stand next to
    thoughts.
    """
    if text is None and calls is None:
        return None
    if text is None and calls is not None and calls.is_free:
        if is_harmony:  # a thought is one of the messages
            return Grammar("ebnf", lark.written(_free_messages(lark, calls)))
        return Grammar("ebnf", lark.written(f"{_thought(lark, thinking)} {_free_text(lark, calls)}"))
    if text is not None and text.kind == "structural_tag":
        return text  # it leaves all text free up to its triggers
    if calls is None and not is_harmony and not (thinking.is_open or thinking.is_possible):
        return text
    if text is not None and text.kind == "ebnf":
        if thinking.is_open:
            raise UnsupportedFeature(
                "a grammar in EBNF does not go with a thought; turn thinking off in chat_template_kwargs"
            )
        return text
    answers = []
    if calls is not None:
        answers.append(_calls(lark, calls))
    if text is not None:
        begin = _harmony_final(lark) if is_harmony else ""
        answers.append(f"{begin} {_text(lark, text)}")
    thought = _harmony_thought(lark, thinking) if is_harmony else _thought(lark, thinking)
    return Grammar("ebnf", lark.written(f"{thought} {one_of(answers)}"))


def _text(lark: Lark, grammar: Grammar) -> str:
    if grammar.kind == "json_object":
        return json_value({"type": "object"})
    if grammar.kind == "json_schema":
        return json_value(_parsed(grammar.text))
    if grammar.kind == "choice":
        return one_of(map(literal, msgspec.json.decode(grammar.text)))
    return lark.terminal(regex(grammar.text))


def _parsed(schema: str) -> Any:
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("a JSON schema must be JSON") from None


# --- thoughts ----------------------------------------------------------------------------------------------------


def _thought(lark: Lark, thinking: Thinking) -> str:
    if thinking.is_open:
        return f"{lark.until(reasoning.CLOSE)} {lark.terminal(_SPACE)}"
    if not thinking.is_possible:
        return ""
    opened = f"{lark.token(reasoning.OPEN)} {lark.until(reasoning.CLOSE)} {lark.terminal(_SPACE)}"
    return f"({opened})?"


def _harmony_thought(lark: Lark, thinking: Thinking) -> str:
    message = f"{lark.until(harmony.END)} {lark.token(harmony.START)} {literal('assistant')}"
    if thinking.is_open:
        return message
    head = f"{lark.token(harmony.CHANNEL)} {literal('analysis')} {lark.token(harmony.MESSAGE)}"
    return f"({head} {message})?" if thinking.is_possible else ""


def _harmony_final(lark: Lark) -> str:
    return f"{lark.token(harmony.CHANNEL)} {literal('final')} {lark.token(harmony.MESSAGE)}"


# --- calls -------------------------------------------------------------------------------------------------------


def _calls(lark: Lark, calls: CallGrammar) -> str:
    """Return the calls of an answer, with the markers around them."""
    format_ = calls.format
    call = lark.rule(one_of(_call(lark, format_, tool) for tool in calls.tools))
    more = ""
    if calls.has_many and format_.separator is not None:
        between = literal(format_.separator) if format_.separator else ""
        more = f"({between} {call})*"
    before, after = (lark.token(each) if each else "" for each in (format_.before, format_.after))
    return f"{before} {call} {more} {after}"


def _free_text(lark: Lark, calls: CallGrammar) -> str:
    """Return any text in which calls follow their tools from the marker on that begins them."""
    format_ = calls.format
    begin = format_.before or format_.opener
    others = [format_.opener] if format_.before else []
    also = [f"~{_BARE_CALL}"] if format_.bare else []
    opened = lark.opened(begin, others, *also)
    rest = lark.without([begin, *others], *also)
    if format_.before or format_.bare:
        called = _calls(lark, replace(calls, format=replace(format_, before="")))
    else:
        called = lark.rule(one_of(_call(lark, replace(format_, opener=""), tool) for tool in calls.tools))
    group = f"({opened} {called})"
    first = f"({called} | {group})" if format_.bare else group
    return f"({first} {group}*)? {rest}" if calls.has_many else f"{first}? {rest}"


def _free_messages(lark: Lark, calls: CallGrammar) -> str:
    """Return messages of the harmony format, of which those to a function follow its tool.

    The answer may begin within a message that the prompt has begun.
    """
    channel, constrain, message, end, start = map(
        lark.token, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, harmony.END, harmony.START)
    )
    body = lark.without(harmony.MARKERS)
    head = lark.without(harmony.MARKERS, "~/(?s:.*)to=(?s:.*)/")
    to_none = lark.rule(f"{channel} {head} ({constrain} {head})? {message} {body}")
    following = lark.rule(f"{end} {start} {literal('assistant')}")
    call = lark.rule(one_of(_call(lark, calls.format, tool) for tool in calls.tools))
    return f"({body} {following})? ({to_none} {following})* ({to_none} | {call}) | {body}"


def _call(lark: Lark, format_: CallFormat, tool: dict[str, Any]) -> str:
    function = _function(tool)
    if function is None or not _NAME.fullmatch(function["name"]):
        raise BadRequest("a tool that a grammar can call has a name of letters, digits and any of _.:/-")
    opener = lark.token(format_.opener) if format_.opener and not format_.bare else ""
    return f"{opener} {format_.write(lark, function['name'], _arguments(function))}"


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object."""
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadRequest(f"the parameters of the tool {shown(function['name'])} must be a schema of the type object")
    return {"type": "object"} | schema
