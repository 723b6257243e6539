"""`RouteProbe`: how many routes a refresh flips, measured on one text.

The text is scored again under every weight version that serves.  A (token, layer) pair is flipped if the set of its
chosen experts is another than under the version before.  Nothing is scored until a text is given.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from dataclasses import dataclass

import numpy as np

from capture.codec import decode_compact
from capture.routed_experts import RoutedExperts
from rollout.core.errors import BadRequest, Conflict, LockstepError, Unavailable
from rollout.core.messages.scheduler_state import SchedulerState
from rollout.http.native.info import state_of
from rollout.tokenizer_manager.manager import TokenizerManager
from rollout.tokenizer_manager.request import GenerateReqInput

logger = logging.getLogger(__name__)

MAX_TOKENS = 4096
SCORE_S = 30.0


@dataclass(frozen=True)
class Flip:
    """The share of (token, layer) pairs that flipped between two versions: in all, and by MoE layer.

    `at`: seconds since 1970.
    """

    at: float
    from_version: str
    to_version: str
    to_epoch: int
    num_tokens: int
    share: float
    by_layer: list[float]


@dataclass(frozen=True)
class _Scored:
    weight_version: str
    weight_epoch: int
    routes: RoutedExperts


class RouteProbe:
    """Use from the manager's event loop."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._input_ids: list[int] | None = None
        self._last: _Scored | None = None

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens of the text; None without a text."""
        return None if self._input_ids is None else len(self._input_ids)

    def stop(self) -> None:
        """Score nothing any more."""
        self._input_ids = self._last = None

    async def start(self, input_ids: list[int]) -> None:
        """Score this text now, and again after each refresh.

        Raises `BadRequest` for fewer than 2 tokens or more than `MAX_TOKENS`, `Conflict` while paused, `Unavailable`
        without an answer within `SCORE_S`, and what `TokenizerManager.submit` raises; the probe stays as it was then.
        """
        if not 2 <= len(input_ids) <= MAX_TOKENS:
            raise BadRequest(f"a probe has 2 to {MAX_TOKENS} tokens, got {len(input_ids)}")
        if (await state_of(self._manager)).paused:
            raise Conflict("generation is paused: continue it first, the probe is scored at once")
        scored = await self._score(input_ids)
        self._input_ids, self._last = input_ids, scored

    async def follow(self, state: SchedulerState) -> Flip | None:
        """Score the text if other weights serve than when it was scored last, and return what has flipped.

        Never raises.  The text is not scored while generation is paused or withheld, as the request would wait in the
        trainer's way, nor while the weights are poisoned.
        """
        input_ids, before = self._input_ids, self._last
        if input_ids is None or before is None or before.weight_epoch == state.weight_epoch:
            return None
        if state.paused or state.withheld is not None or state.poisoned is not None:
            return None
        try:
            now = await self._score(input_ids)
        except Exception as error:  # a later sample tries again
            logger.warning("the route probe was not scored: %s", error)
            return None
        if self._last is not before or now.weight_epoch == before.weight_epoch:
            return None
        self._last = now
        flipped_TL = flips(before.routes.logical_ids_TLK, now.routes.logical_ids_TLK)
        return Flip(
            at=time.time(),
            from_version=before.weight_version,
            to_version=now.weight_version,
            to_epoch=now.weight_epoch,
            num_tokens=len(flipped_TL),
            share=float(flipped_TL.mean()),
            by_layer=[round(float(share), 4) for share in flipped_TL.mean(axis=0)],
        )

    async def _score(self, input_ids: list[int]) -> _Scored:
        """Score the text under the weights in force.  Raises `Conflict` where a refresh came in between."""
        before = await state_of(self._manager)
        handle = await self._manager.submit(
            GenerateReqInput(
                rid=f"ROUTE_PROBE_{uuid.uuid4().hex}",
                input_ids=input_ids,
                sampling_params={"max_new_tokens": 0, "temperature": 0.0},
                return_routed_experts=True,
                routed_experts_format="compact",
            )
        )
        try:
            result = await asyncio.wait_for(handle.result(), SCORE_S)
        except TimeoutError:
            raise Unavailable(f"the probe was not scored within {SCORE_S:g} s") from None
        assert isinstance(result, dict)
        facts = result["meta_info"]
        if facts["finish_reason"]["type"] == "abort":
            raise Unavailable(f"the probe was aborted: {facts['finish_reason'].get('message')}")
        after = await state_of(self._manager)
        if after.weight_epoch != before.weight_epoch:
            raise Conflict("other weights came into force while the probe was scored")
        routes = decode_compact(base64.b64decode(facts["routed_experts"]))
        if not routes.complete:
            raise LockstepError("not all routes of the probe were recorded")
        return _Scored(after.weight_version, after.weight_epoch, routes)


def flips(before_TLK: np.ndarray, after_TLK: np.ndarray) -> np.ndarray:
    """Return whether the sets of chosen experts differ, bool [T, L].  The order of experts is ignored."""
    differs_TL: np.ndarray = (np.sort(before_TLK, axis=2) != np.sort(after_TLK, axis=2)).any(axis=2)
    return differs_TL
