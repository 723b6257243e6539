"""Sessions as the scheduler sees them: the KV that each keeps, and the end of its pin.

Which engine a session goes to, and when, is the router's decision.
"""

from __future__ import annotations

from rollout.core.messages.message import ControlReqOutput
from rollout.core.messages.sessions import (
    FinishSessionReply,
    FinishSessionReqInput,
    GetSessionsReqInput,
    SessionReport,
    SessionsReply,
)
from rollout.memory.radix_node import RadixNode
from rollout.scheduler.scheduler import Scheduler, VerbHandler


class SessionControl:
    """Handlers of the session verbs; lets pins expire."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        scheduler.cache.pins.on_first = lambda: scheduler.agenda.call(self.expire)

    @property
    def verbs(self) -> dict[type, VerbHandler]:
        return {GetSessionsReqInput: self._get, FinishSessionReqInput: self._finish}

    def expire(self) -> None:
        """Drop the pins that have expired."""
        self._scheduler.agenda.call_at(self.expire, self._scheduler.cache.pins.expire())

    def _get(self, verb: GetSessionsReqInput) -> ControlReqOutput[SessionsReply]:
        """Report each session with KV: `kv_tokens` by its requests and its pin, `pinned_tokens`, `expires_in_s`."""
        cache = self._scheduler.cache
        nodes: dict[str, set[RadixNode]] = {}
        private: dict[str, int] = {}
        for session_id, ends in cache.pins.nodes().items():
            nodes[session_id] = {node for end in ends for node in cache.prefix_cache.path(end)}
        pinned = {session_id: sum(map(len, path)) for session_id, path in nodes.items()}
        for req in self._scheduler.queues.holding_kv():
            owner = req.source.session_id
            if owner is not None and req.prefix_node is not None:
                nodes.setdefault(owner, set()).update(cache.prefix_cache.path(req.prefix_node))
                private[owner] = private.get(owner, 0) + req.device_len - req.cached_len
        sessions = {
            session_id: SessionReport(
                kv_tokens=sum(map(len, path)) + private.get(session_id, 0),
                pinned_tokens=pinned.get(session_id, 0),
                expires_in_s=cache.pins.expires_in(session_id),
            )
            for session_id, path in nodes.items()
        }
        return verb.answer(SessionsReply(sessions=sessions, num_pinned_tokens=cache.prefix_cache.num_pinned))

    def _finish(self, verb: FinishSessionReqInput) -> ControlReqOutput[FinishSessionReply]:
        cache = self._scheduler.cache
        pinned = cache.prefix_cache.num_pinned
        cache.pins.drop(verb.session_id)
        for req in self._scheduler.queues.all():
            if req.source.session_id == verb.session_id:
                req.may_pin = False
        return verb.answer(FinishSessionReply(num_released_tokens=pinned - cache.prefix_cache.num_pinned))
