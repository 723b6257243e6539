"""A server whose model answers with the last message, so that a test decides the answers that an agent gets.

The HTTP server, its tokenizer and its parsers are the real ones; the engine is the tests' stand-in, which repeats its
prompt.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.http_harness import Live, live_server
from tests.tiny_tokenizer import write_model_folder

LAST_MESSAGE = "{{ messages[-1].content }}<|im_end|>"


@contextlib.contextmanager
def repeating_server(folder: Path, **args: Any) -> Iterator[Live]:
    """Serve a model that repeats the last message."""
    write_model_folder(folder)
    (folder / "chat_template.jinja").write_text(LAST_MESSAGE)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    with live_server(folder, context_length=2048, **args) as live:
        yield live


def call(name: str, arguments: str) -> str:
    """Write a tool call as the parser `hermes` reads it."""
    return f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'
