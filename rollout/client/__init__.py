"""Clients of one rollout server or of several, synchronous and asynchronous, without torch.

It imports `capture`, `weight_sync` and `rollout.core`.
"""

from rollout.client.async_client import AsyncRolloutClient
from rollout.client.blocking_fleet import RolloutFleet
from rollout.client.client import RolloutClient
from rollout.client.errors import (
    ClientError,
    FleetError,
    JoinError,
    ResponseFormatError,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
)
from rollout.client.fleet import AsyncRolloutFleet
from rollout.client.pooling import Classes
from rollout.client.scoring import ScoredSequence
from rollout.client.types import (
    FinishReason,
    FleetPolicy,
    GenerateOptions,
    GenerationOutput,
    RouteLayout,
    Timeouts,
    TokenLogprob,
    VersionSpan,
)

__all__ = [
    "AsyncRolloutClient",
    "AsyncRolloutFleet",
    "Classes",
    "ClientError",
    "FinishReason",
    "FleetError",
    "FleetPolicy",
    "GenerateOptions",
    "GenerationOutput",
    "JoinError",
    "ResponseFormatError",
    "RolloutClient",
    "RolloutFleet",
    "RouteLayout",
    "ScoredSequence",
    "ServerError",
    "ServerTimeout",
    "ServerUnreachable",
    "Timeouts",
    "TokenLogprob",
    "VersionSpan",
]
