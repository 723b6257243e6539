"""Stands in for `vllm.inputs`."""

from typing import Any

TokensPrompt = dict[str, Any]
