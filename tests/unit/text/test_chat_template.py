"""Chat templates: the text that transformers renders, in any of its versions; a sandbox for templates of checkpoints.

CI runs this file under the oldest and the newest transformers that pyproject.toml allows.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

from rollout.core.errors import BadRequest, StartupError, UnsupportedFeature
from rollout.http.chat_messages import plain_messages
from rollout.text.chat_template import ChatTemplates
from rollout.text.tokenizer import Tokenizer
from rollout.text.tokenizer_files import read_tokenizer
from tests.byte_level_files import write_tokenizer_json
from tests.conversations import conversation

HI = [{"role": "user", "content": "hi"}]
FORMS = [(False, True), (False, False), (True, False)]  # continue the last message, begin an answer
# Everything that templates use: blocks, loops that end early, namespaces, filters, tests, macros, trimmed text.
TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(calls=0, last='') %}
{%- macro shown(text) %}[{{ text | trim }}]{% endmacro %}
{%- if tools %}
    {{- '<tools>\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ tool.function | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and loop.previtem is defined %}
        {{- '<answer>' ~ message.content ~ message.tool_call_id }}
        {%- continue %}
    {%- endif %}
    {%- set ns.last = message.role %}
    {{- '<' + message['role'] + '>' }}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ shown(message.content) if message.tool_calls else message.content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- set ns.calls = ns.calls + 1 %}
            {{- call.function.arguments | tojson(sort_keys=true, separators=(',', ':')) }}
            {%- for name, value in call.function.arguments.items() if value is string %}{{ name ~ value }}{% endfor %}
        {%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{{ ns.calls }}{% if thinking is defined %}{{ thinking }}{% endif %}{% endif %}
"""


def rendered(source: str, messages: list[dict[str, Any]] = HI, **variables: Any) -> str:
    templates = ChatTemplates({"default": source}, {"eos_token": "</s>"})
    return templates.render(messages, tools=None, continue_final=False, add_generation_prompt=True, variables=variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_json(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(("continue_final", "begin_answer"), FORMS)
def test_a_hundred_conversations_with_tools_are_as_transformers_renders_them(
    folder: Path, continue_final: bool, begin_answer: bool
) -> None:
    files = read_tokenizer(folder)
    ours = ChatTemplates(files.chat_templates, files.special_tokens)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE, **files.special_tokens
    )
    for seed in range(100):
        messages, tools = conversation(seed)
        text = ours.render(
            messages,
            tools=tools,
            continue_final=continue_final,
            add_generation_prompt=begin_answer,
            variables={"thinking": "yes"},
        )
        assert text == theirs.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            continue_final_message=continue_final,
            add_generation_prompt=begin_answer,
            thinking="yes",
        )


def test_fields_that_are_null_are_none_and_a_thought_has_every_name() -> None:
    source = "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}"
    assert rendered(source, [{"role": "a", "content": "x", "tool_calls": None, "reasoning": None}]) == (
        '{"content": "x", "role": "a"}'
    )
    for name in ("reasoning", "thinking", "reasoning_content"):
        answer = json.loads(rendered(source, [{"role": "a", "content": "x", name: "hm"}]))
        assert answer == {"role": "a", "content": "x", name: "hm", "thinking": "hm", "reasoning_content": "hm"}
    both = json.loads(rendered(source, [{"role": "a", "content": "x", "thinking": "old", "reasoning_content": "new"}]))
    assert both["reasoning_content"] == "new" and both["thinking"] == "old"


def test_arguments_that_clients_send_as_text_are_an_object_and_can_be_joined_to_text() -> None:
    """DeepSeek's templates join them, and Qwen's templates read them."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{ "a": "é"}'}}
    messages = plain_messages([*HI, {"role": "assistant", "content": "", "tool_calls": [call]}])
    read = "{% set a = messages[1].tool_calls[0].function.arguments %}"
    assert rendered(read + "{{ '```json' + a + '```' }}{{ a + '!' }}", messages) == '```json{ "a": "é"}```{ "a": "é"}!'
    assert rendered(read + "{{ a | tojson }}{{ a.a }}{{ a is mapping }}{{ a | items | list }}", messages) == (
        "{\"a\": \"é\"}éTrue[('a', 'é')]"
    )


def test_a_call_without_content_is_null_for_templates_that_ask_for_it() -> None:
    """DeepSeek-V3's template shows the calls of such a message alone; others take the length of the content."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = plain_messages([*HI, {"role": "assistant", "content": None, "tool_calls": [call]}])
    for asks in ("message['content'] is none", 'message["content"] is not none', "message.content is none"):
        source = (
            "{% for message in messages %}{{ message.content is none }} {% if " + asks + " %}{% endif %}{% endfor %}"
        )
        assert rendered(source, messages) == "False True "
    other = "{% for m in messages %}{{ m.content | length }}{{ m.reasoning_content is not none }} {% endfor %}"
    assert rendered(other, messages) == "2True 0True "
    (empty,) = plain_messages([{"role": "assistant", "content": None}])
    assert empty["content"] == ""


def test_names_that_templates_use() -> None:
    assert rendered("{{ '<é&\"' | tojson }}{{ strftime_now('%Y') }}{{ eos_token }}{{ documents }}") == (
        f'"<é&\\""{datetime.now().year}</s>None'
    )
    assert rendered("{{ dict(a=1) | tojson }}{{ dict.fromkeys([1], 2) | tojson }}") == '{"a": 1}{"1": 2}'
    assert rendered("{{ x }}{{ eos_token }}", x=1, eos_token="mine") == "1mine"
    with pytest.raises(BadRequest, match="no such role"):
        rendered("{{ raise_exception('no such role') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ tojson.__globals__ }}{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__.__builtins__ }}",
        "{{ dict.__init__.__globals__ }}{{ dict.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'x' %}",
    ],
)
def test_a_template_does_not_leave_the_sandbox(source: str) -> None:
    with pytest.raises(BadRequest, match="the chat template refused them"):
        rendered(source)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "hi", "name": None, "reasoning": "r"}]
    templates = ChatTemplates({"default": "{{ messages[0].content }}"}, {})
    templates.render(messages, tools=None, continue_final=True, add_generation_prompt=True, variables={})
    assert messages == [{"role": "user", "content": "hi", "name": None, "reasoning": "r"}]


# --- continuing a message --------------------------------------------------------------------------------------------


def continued(source: str, content: Any) -> str:
    templates = ChatTemplates({"default": source}, {})
    messages = [*HI, {"role": "assistant", "content": content}]
    return templates.render(messages, tools=None, continue_final=True, add_generation_prompt=True, variables={})


@pytest.mark.parametrize("content", ["so far", "so far ", " so\n", "", "so far</s>so far"])
def test_a_chat_ends_where_its_last_message_goes_on(content: str) -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}{{ '<end>' }}"
    assert continued(plain, content) == f"<user>hi</s>\n<assistant>{content}"
    assert continued(plain.replace("m.content", "m.content | trim"), content) == (
        f"<user>hi</s>\n<assistant>{content.strip()}"
    )


def test_the_last_part_of_a_message_goes_on() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text or p }}{% endfor %}|{% endfor %}"
    assert continued(source, [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]) == "hi|ab "


@pytest.mark.parametrize(
    ("source", "content", "reason"),
    [
        ("{{ messages | length }}", "a", "does not render the text of the last message, so it cannot be continued"),
        ("{{ messages[1].content }}", [], "the last message has no text to continue"),
    ],
)
def test_a_message_that_the_template_does_not_show_cannot_go_on(source: str, content: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        continued(source, content)


# --- where templates are found ---------------------------------------------------------------------------------------


def render(folder: Path, tools: list[Any] | None = None) -> str:
    tokenizer = Tokenizer.load(folder)
    chat = tokenizer.render_chat(HI, tools=tools, continue_final=False, add_generation_prompt=True, extra={})
    return tokenizer.decode(asyncio.run(chat), skip_special_tokens=False)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_file_wins_over_the_configuration_and_that_over_the_file_of_processors(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    configure(tmp_path, chat_template=None)
    with pytest.raises(UnsupportedFeature, match="no chat template"):
        render(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert render(tmp_path) == "json"
    configure(tmp_path, chat_template="config")
    assert render(tmp_path) == "config"
    (tmp_path / "chat_template.jinja").write_text("file é\n")
    assert render(tmp_path) == "file é"


@pytest.mark.parametrize("as_list", [True, False])
def test_the_named_template_for_tools_is_used_for_tools(tmp_path: Path, as_list: bool) -> None:
    write_tokenizer_json(tmp_path)
    named = {"default": "plain", "tool_use": "tools", "rag": "rag"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    configure(tmp_path, chat_template=listed if as_list else named)
    assert (render(tmp_path), render(tmp_path, [{}]), render(tmp_path, [])) == ("plain", "tools", "tools")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    assert (render(tmp_path), render(tmp_path, [{}])) == ("plain", "file")


def test_templates_without_the_usual_one_name_those_that_there_are(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    configure(tmp_path, chat_template=[{"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "x"}])
    assert render(tmp_path, [{}]) == "tools"
    with pytest.raises(UnsupportedFeature, match="'default', only rag, tool_use"):
        render(tmp_path)


def test_a_template_that_is_no_program_leaves_the_rest_of_the_server_alone(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    configure(tmp_path, chat_template="a\n{% for %}")
    assert Tokenizer.load(tmp_path)._encode(["hi"], False)
    with pytest.raises(UnsupportedFeature, match="chat template is broken: line 2"):
        render(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"chat_template\.jinja cannot be read"):
        render(tmp_path)
