"""The record of a session's conversations: sequences that a trainer takes as they are.

Shapes: T tokens of a sequence, L MoE layers, K top-k.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from capture.codec import encode_dict
from capture.routed_experts import RoutedExperts, concat, id_dtype, missing_id
from rollout.core.errors import NotFound
from rollout.http.conversations import Turn
from rollout.tokenizer_manager.response import RouteShape, finish_reason_dict, routed_experts_of, sampling_mask_of

_TOKEN_BYTES = 128
"""Bytes of a sequence's token in a record and in its JSON, without its routes."""


def record_ends(turns: Sequence[Turn], turn_id: str | None) -> list[Turn]:
    """Return the turns that end a sequence: the one of that id, or all that no other one goes on from.

    Raises `NotFound`.
    """
    if turn_id is None:
        goes_on = {turn.parent for turn in turns}
        return [turn for turn in turns if turn not in goes_on]
    ends = [turn for turn in turns if turn.rid == turn_id]
    if not ends:
        raise NotFound(f"no turn {turn_id[:80]!r} of the session is kept")
    return ends


def record_bytes(ends: Sequence[Turn], shape: RouteShape) -> int:
    """Return about how many bytes the sequences take while they are sent: each has all tokens before it."""
    return sum(turn.end for turn in ends) * (_TOKEN_BYTES + 4 * shape.token_bytes)


def session_record(session_id: str, turns: Sequence[Turn], ends: Sequence[Turn], shape: RouteShape) -> dict[str, Any]:
    """Return the turns as a tree, and the sequence that each of `ends` is the end of.

    Sequences that part later share their first turns.
    """
    return {
        "session_id": session_id,
        "turns": [_turn(turn) for turn in turns],
        "sequences": [_sequence(turn, shape) for turn in ends],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    """Return a turn's place in its sequence, `start <= output_start < end`, and how it ended."""
    fields: dict[str, Any] = {
        "id": turn.rid,
        "parent": None if turn.parent is None else turn.parent.rid,
        "rewrites": None if turn.rewrites is None else turn.rewrites.rid,
        "start": 0 if turn.parent is None else turn.parent.end,
        "output_start": turn.output_start,
        "end": turn.end,
        "finish_reason": finish_reason_dict(turn.reason),
    }
    if turn.adapter is not None:
        fields["adapter"] = msgspec.structs.asdict(turn.adapter)
    if turn.output_mask is not None:
        ids, offsets = sampling_mask_of(turn.output_mask).encode_csr()
        fields["output_token_sampling_mask"] = {"token_ids": ids, "offsets": offsets}
    return fields


def _sequence(leaf: Turn, shape: RouteShape) -> dict[str, Any]:
    """Return all tokens up to the end of a turn.

    `sampled` [T] is true for a token that the policy sampled, and `logprobs` [T] has a number there, else null.
    `weight_versions` are spans of sampled tokens.  `routed_experts` have the rows of tokens 0 .. T - 2: the row of a
    turn's last token comes from the forward of the next turn.
    """
    chain = leaf.chain()
    logprobs = [[*[None] * len(turn.given_ids), *turn.output_logprobs] for turn in chain]
    fields: dict[str, Any] = {
        "turns": [turn.rid for turn in chain],
        "token_ids": leaf.token_ids(),
        "sampled": [position >= turn.output_start for turn in chain for position in _places(turn)],
        "logprobs": list(itertools.chain.from_iterable(logprobs)),
        "weight_versions": [
            {
                "version": span.version,
                "start": turn.output_start + span.start,
                "end": turn.output_start + span.end,
                "weight_epoch": span.weight_epoch,
            }
            for turn in chain
            for span in turn.versions
        ],
    }
    if any(turn.routes is not None for turn in chain):
        routes = concat(list(_rows(chain, shape)))
        fields["routed_experts"] = encode_dict(routes)
        fields["routed_experts_missing"] = len(routes.missing_rows())
    return fields


def _places(turn: Turn) -> range:
    return range(0 if turn.parent is None else turn.parent.end, turn.end)


def _rows(chain: Sequence[Turn], shape: RouteShape) -> Iterator[RoutedExperts]:
    """Yield the rows of each turn: from the last token of the turn before to the one before its own last.

    Rows that its request did not record are MISSING.
    """
    for turn in chain:
        first, end = max(_places(turn).start - 1, 0), turn.end - 1
        routed = None if turn.routes is None else routed_experts_of(turn.routes, shape)
        start, stop = end, end
        if routed is not None:
            start, stop = (min(max(place, first), end) for place in (routed.start, routed.start + len(routed)))
        if start > first:
            yield _missing(first, start, shape)
        if routed is not None and start < stop:
            yield routed.rows(start - routed.start, stop - routed.start)
        if stop < end:
            yield _missing(stop, end, shape)


def _missing(first: int, end: int, shape: RouteShape) -> RoutedExperts:
    sizes = (end - first, len(shape.moe_layer_ids), shape.top_k)
    return RoutedExperts(
        logical_ids_TLK=np.full(sizes, missing_id(shape.num_experts), id_dtype(shape.num_experts)),
        num_experts=shape.num_experts,
        moe_layer_ids=shape.moe_layer_ids,
        num_hidden_layers=shape.num_hidden_layers,
        start=first,
    )
