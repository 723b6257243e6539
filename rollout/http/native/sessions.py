"""Sessions of agents: whose request it is, what KV each session keeps, and when one is over."""

from __future__ import annotations

from starlette.datastructures import Headers

from rollout.core.errors import BadRequest
from rollout.tokenizer_manager.request import GenerateReqInput

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
RANK_HEADER = "x-data-parallel-rank"


def addressed(wanted: GenerateReqInput, headers: Headers) -> GenerateReqInput:
    """`wanted` with the session and the data-parallel rank that the headers name, where its body names none.

    Raises `BadRequest`.
    """
    if wanted.session_id is None:
        wanted.session_id = next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)
    rank = headers.get(RANK_HEADER)
    if wanted.routed_dp_rank is None and rank:
        if not rank.isdecimal() or len(rank) > 9:
            raise BadRequest(f"{RANK_HEADER} must be a number, got {rank[:80]!r}")
        wanted.routed_dp_rank = int(rank)
    return wanted
