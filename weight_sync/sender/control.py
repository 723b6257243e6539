"""`EngineControl`: the engine's control calls as a sender asks for them, and what their refusals say.

An HTTP client satisfies the protocol.  Knows no tensors and no groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol

Phase = Literal["verify", "commit"]


class EngineControl(Protocol):
    """The engine's control calls, named as its HTTP endpoints.  Each returns the reply and raises on a refusal."""

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str | None,
    ) -> Mapping[str, Any]: ...

    def destroy_weights_update_group(self, *, group_name: str) -> Mapping[str, Any]: ...

    def begin_weight_update(
        self, *, weight_version: str | None, coverage: str, manifest: list[dict[str, Any]] | None
    ) -> Mapping[str, Any]: ...

    def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None,
        weight_version: str | None,
    ) -> Mapping[str, Any]: ...

    def end_weight_update(self, *, phase: Phase | None = None) -> Mapping[str, Any]: ...

    def abort_weight_update(self) -> Mapping[str, Any]: ...


def refusal(call: Future[Any]) -> BaseException | None:
    """What a control call raised; None if it went well or still runs."""
    return call.exception() if call.done() else None


def says_nothing_is_open(error: BaseException) -> bool:
    """Whether a refusal is a 409: to an abort, that there is nothing to abort."""
    return 409 in (getattr(error, "status_code", None), getattr(error, "status", None))
