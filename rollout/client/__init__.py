"""Clients of a rollout server, synchronous and asynchronous.  Needs httpx, msgspec and numpy, not torch."""

from rollout.client.async_client import AsyncRolloutClient
from rollout.client.client import RolloutClient
from rollout.client.errors import ClientError, ResponseFormatError, ServerError, ServerTimeout, ServerUnreachable
from rollout.client.scoring import ScoredSequence
from rollout.client.types import (
    FinishReason,
    GenerateOptions,
    GenerationOutput,
    RouteLayout,
    Timeouts,
    TokenLogprob,
    VersionSpan,
)

__all__ = [
    "AsyncRolloutClient",
    "ClientError",
    "FinishReason",
    "GenerateOptions",
    "GenerationOutput",
    "ResponseFormatError",
    "RolloutClient",
    "RouteLayout",
    "ScoredSequence",
    "ServerError",
    "ServerTimeout",
    "ServerUnreachable",
    "Timeouts",
    "TokenLogprob",
    "VersionSpan",
]
