"""The public face of Lockstep: clients, the trainer's side of a refresh, replay, engine numerics, the engine.

    from lockstep_rl import Client, WeightSender

    client = Client("http://127.0.0.1:30000")
    sender = WeightSender(client)

Names are loaded when they are first used.  `import lockstep_rl` therefore needs neither torch nor the engine, and a
name that needs a missing package raises `MissingPackage`, which names the package and the command that installs it.
The first use also raises `PackageClash` where another project's package stands in the place of one of this project's.
docs/stability.md describes what stays the same from version to version.

| needs | names |
|---|---|
| nothing more | clients, their options, outputs and errors |
| torch | `WeightSender`, `force_routes`, `masked_logprobs`, `pad_routes`, `record_routes` |
| `lockstep-rl[engine]` | `use_engine_numerics`, `engine_logprobs`, `Engine` |

It imports `capture`, `weight_sync`, `rollout.client`, `rollout.cli`, `rollout.core`, `rollout.numerics` and
`rollout.server`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lockstep_rl._origin import MissingPackage, PackageClash, check_origin, missing_package

if TYPE_CHECKING:
    from capture.errors import CaptureError as CaptureError
    from capture.hidden_states import HiddenStates as HiddenStates
    from capture.replay import force_routes as force_routes
    from capture.replay import masked_logprobs as masked_logprobs
    from capture.replay import pad_routes as pad_routes
    from capture.replay import record_routes as record_routes
    from capture.routed_experts import RoutedExperts as RoutedExperts
    from capture.sampling_mask import SamplingMask as SamplingMask
    from capture.token_logprobs import TokenLogprobs as TokenLogprobs
    from rollout.client import AsyncRolloutClient as AsyncClient
    from rollout.client import AsyncRolloutFleet as AsyncFleet
    from rollout.client import Classes as Classes
    from rollout.client import ClientError as ClientError
    from rollout.client import FinishReason as FinishReason
    from rollout.client import FleetError as FleetError
    from rollout.client import FleetPolicy as FleetPolicy
    from rollout.client import GenerateOptions as GenerateOptions
    from rollout.client import GenerationOutput as GenerationOutput
    from rollout.client import JoinError as JoinError
    from rollout.client import ResponseFormatError as ResponseFormatError
    from rollout.client import RolloutClient as Client
    from rollout.client import RolloutFleet as Fleet
    from rollout.client import RouteLayout as RouteLayout
    from rollout.client import ScoredSequence as ScoredSequence
    from rollout.client import ServerError as ServerError
    from rollout.client import ServerTimeout as ServerTimeout
    from rollout.client import ServerUnreachable as ServerUnreachable
    from rollout.client import Timeouts as Timeouts
    from rollout.client import TokenLogprob as TokenLogprob
    from rollout.client import VersionSpan as VersionSpan
    from rollout.core.errors import BadRequest as BadRequest
    from rollout.core.errors import LockstepError as LockstepError
    from rollout.core.errors import StartupError as StartupError
    from rollout.core.version import VERSION as __version__
    from rollout.numerics import EngineNumerics as EngineNumerics
    from rollout.numerics import engine_logprobs as engine_logprobs
    from rollout.numerics import use_engine_numerics as use_engine_numerics
    from rollout.server.engine import Engine as Engine
    from weight_sync.errors import WeightSyncError as WeightSyncError
    from weight_sync.sender import EngineReport as EngineReport
    from weight_sync.sender import RefreshReport as RefreshReport
    from weight_sync.sender import WeightSender as WeightSender
    from weight_sync.sender import WeightUpdate as WeightUpdate
    from weight_sync.sender import split_fused_experts as split_fused_experts

# The module of each name.  A name that differs there follows the colon.
_PLACES = {
    # clients
    "Client": "rollout.client:RolloutClient",
    "AsyncClient": "rollout.client:AsyncRolloutClient",
    "Fleet": "rollout.client:RolloutFleet",
    "AsyncFleet": "rollout.client:AsyncRolloutFleet",
    "FleetPolicy": "rollout.client",
    "GenerateOptions": "rollout.client",
    "Timeouts": "rollout.client",
    # outputs
    "Classes": "rollout.client",
    "FinishReason": "rollout.client",
    "GenerationOutput": "rollout.client",
    "RouteLayout": "rollout.client",
    "ScoredSequence": "rollout.client",
    "TokenLogprob": "rollout.client",
    "VersionSpan": "rollout.client",
    "HiddenStates": "capture.hidden_states",
    "RoutedExperts": "capture.routed_experts",
    "SamplingMask": "capture.sampling_mask",
    "TokenLogprobs": "capture.token_logprobs",
    # errors
    "LockstepError": "rollout.core.errors",
    "BadRequest": "rollout.core.errors",
    "StartupError": "rollout.core.errors",
    "ClientError": "rollout.client",
    "FleetError": "rollout.client",
    "JoinError": "rollout.client",
    "ResponseFormatError": "rollout.client",
    "ServerError": "rollout.client",
    "ServerTimeout": "rollout.client",
    "ServerUnreachable": "rollout.client",
    "CaptureError": "capture.errors",
    "WeightSyncError": "weight_sync.errors",
    # a trainer's side
    "WeightSender": "weight_sync.sender",
    "WeightUpdate": "weight_sync.sender",
    "RefreshReport": "weight_sync.sender",
    "EngineReport": "weight_sync.sender",
    "split_fused_experts": "weight_sync.sender",
    "force_routes": "capture.replay",
    "masked_logprobs": "capture.replay",
    "pad_routes": "capture.replay",
    "record_routes": "capture.replay",
    # engine numerics, and the engine in this process
    "EngineNumerics": "rollout.numerics",
    "engine_logprobs": "rollout.numerics",
    "use_engine_numerics": "rollout.numerics",
    "Engine": "rollout.server.engine",
    "__version__": "rollout.core.version:VERSION",
}
_ENGINE = ("rollout.numerics", "rollout.server.engine")

__all__ = [
    "AsyncClient",
    "AsyncFleet",
    "BadRequest",
    "CaptureError",
    "Classes",
    "Client",
    "ClientError",
    "Engine",
    "EngineNumerics",
    "EngineReport",
    "FinishReason",
    "Fleet",
    "FleetError",
    "FleetPolicy",
    "GenerateOptions",
    "GenerationOutput",
    "HiddenStates",
    "JoinError",
    "LockstepError",
    "MissingPackage",
    "PackageClash",
    "RefreshReport",
    "ResponseFormatError",
    "RouteLayout",
    "RoutedExperts",
    "SamplingMask",
    "ScoredSequence",
    "ServerError",
    "ServerTimeout",
    "ServerUnreachable",
    "StartupError",
    "Timeouts",
    "TokenLogprob",
    "TokenLogprobs",
    "VersionSpan",
    "WeightSender",
    "WeightSyncError",
    "WeightUpdate",
    "__version__",
    "engine_logprobs",
    "force_routes",
    "masked_logprobs",
    "pad_routes",
    "record_routes",
    "split_fused_experts",
    "use_engine_numerics",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use.

    Raises `PackageClash`, and `MissingPackage` where the name needs a package that is not installed.
    """
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_origin()  # not at the import, of which the command could not catch the error
    module, _, attribute = place.partition(":")
    try:
        found: object = getattr(import_module(module), attribute or name)
    except ModuleNotFoundError as error:
        raise missing_package(f"lockstep_rl.{name}", error, needs_engine=module in _ENGINE) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
