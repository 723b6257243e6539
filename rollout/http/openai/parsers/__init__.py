"""Answers of models as reasoning, content and tool calls."""
