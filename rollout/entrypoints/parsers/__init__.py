"""Answers of models as reasoning, content and tool calls.  Knows text only: no HTTP, no tokens."""
