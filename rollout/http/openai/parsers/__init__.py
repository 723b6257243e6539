"""Reasoning and tool calls, read from the text of an answer."""
