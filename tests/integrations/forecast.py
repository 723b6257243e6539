"""A schema that ends soon also where a random model fills it: clients ask for it as an answer and as a tool."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ROOM = 2000
"""Tokens of an answer: a random model writes much white space between the tokens of JSON."""
SEED = 1


class Forecast(BaseModel):
    """Tell the weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Lima"]
    warm: bool


def tool() -> dict[str, Any]:
    """Describe the schema as a tool, in the form of chat completions."""
    function = {"name": "Forecast", "description": Forecast.__doc__, "parameters": Forecast.model_json_schema()}
    return {"type": "function", "function": function}
