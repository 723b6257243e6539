"""Answers about the weights.

`get_weights_by_name`   a tensor's first rows, as they are in memory, or, while no step may run, as they were sent
`weight_parts`          which parts of which tensors each rank keeps
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rollout.control.weight_queue import Job
from rollout.core.errors import Conflict, NotFound, TooLarge
from rollout.core.messages.weight_parts import WeightPartsReply, WeightPartsReqInput
from rollout.core.messages.weight_replies import WeightsReply
from rollout.core.messages.weights import GetWeightsByNameReqInput
from rollout.scheduler.scheduler import Scheduler
from weight_sync.errors import UnknownTensorError
from weight_sync.rank_boxes import RankBoxes
from weight_sync.rank_parts import Exchange, first_rows
from weight_sync.tensor_meta import parse_metas, parts_of
from weight_sync.updater import WeightUpdater

_MAX_NUMBERS_SHOWN = 4_000_000


def reading_jobs(scheduler: Scheduler, updater: WeightUpdater) -> dict[type, Callable[[Any], Job]]:
    """Return the planners of both verbs, by message type."""
    return {
        GetWeightsByNameReqInput: lambda verb: shown_weights(verb, scheduler, updater),
        WeightPartsReqInput: lambda verb: shown_parts(verb, scheduler, updater),
    }


def shown_weights(verb: GetWeightsByNameReqInput, scheduler: Scheduler, updater: WeightUpdater) -> Job:
    """Return the verb's job.  Its I/O part raises `NotFound`, `Conflict`, `TooLarge`."""
    serving, state = scheduler.serving, scheduler.runner.state
    shows_staged = serving.is_paused or serving.is_writing

    def io() -> Any:
        weights = state.model.weights
        try:
            name = weights.canonical_name(verb.name)
        except UnknownTensorError as error:
            raise NotFound(str(error)) from None
        staged = updater.staged(name) if shows_staged else None
        is_staged = shows_staged and _came_whole(staged is not None, bool(weights.places(name)), updater.exchange)
        if not is_staged and serving.content_lost:
            raise Conflict("the weights' memory is released; there is nothing to read")
        meta = weights.metas()[name]
        count = min(max(0, verb.truncate_size), meta.shape[0])
        num_shown = count * math.prod(meta.shape[1:])
        if num_shown > _MAX_NUMBERS_SHOWN:
            raise TooLarge(
                f"{count} rows of {name} have {num_shown} numbers, at most {_MAX_NUMBERS_SHOWN} are shown: "
                "give a smaller truncate_size"
            )
        parts = staged if is_staged and staged is not None else parts_of(weights, name)
        rows = first_rows(meta, parts, count, updater.exchange)
        return rows.double().tolist(), is_staged

    def step(result: Any) -> tuple[str, WeightsReply]:
        parameter, is_staged = result
        return "", WeightsReply(parameter=parameter, staged=is_staged)

    return Job(verb, io, step)


def _came_whole(came: bool, keeps: bool, exchange: Exchange) -> bool:
    """Return whether a tensor came on all ranks that keep any of it: an update per rank may be on its way to some.

    `came`, `keeps`: on this rank.  One exchange.
    """
    found = exchange(b"came" if came else b"lacks" if keeps else b"keeps nothing")
    return b"came" in found and b"lacks" not in found


def shown_parts(verb: WeightPartsReqInput, scheduler: Scheduler, updater: WeightUpdater) -> Job:
    """Return the verb's job.  Its I/O part raises `WeightRequestError`.  No expert moves before it is over."""

    def io() -> RankBoxes:
        return updater.per_rank.boxes(parse_metas(*verb.lists()))

    def step(found: RankBoxes) -> tuple[str, WeightPartsReply]:
        epoch = scheduler.runner.state.placement.epoch
        return "", WeightPartsReply(placement_epoch=epoch, patterns=found.patterns, tensors=found.tensors)

    return Job(verb, io, step)
