"""`SessionBook`: token counts of recent sessions, over their finished samples.  A `RequestObserver`."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from rollout.tokenizer_manager.sample import SampleRecord

logger = logging.getLogger(__name__)

MAX_SESSIONS = 4096
"""Sessions in the book; beyond that the least recently used one is dropped."""


@dataclass(slots=True)
class Session:
    """Sums over the finished samples of a session; `context_tokens` is the length of the last one."""

    num_finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    context_tokens: int = 0
    dp_rank: int = 0
    finished_at: float = 0.0


class SessionBook:
    """Sessions by id, the least recently used one first."""

    def __init__(self) -> None:
        self.sessions: OrderedDict[str, Session] = OrderedDict()

    def on_first_token(self, record: SampleRecord) -> None:
        pass

    def on_finished(self, record: SampleRecord) -> None:
        finished = record.finished
        assert finished is not None
        if record.session_id is None:
            return
        prompt, output = len(record.prompt_ids), len(record.output_ids)
        logger.debug(
            "session %r: %s ended with %s, %d prompt tokens (%d cached), %d output tokens",
            record.session_id, record.rid, finished.reason.type, prompt, finished.cached_tokens, output,
        )  # fmt: skip
        session = self.sessions.setdefault(record.session_id, Session())
        self.sessions.move_to_end(record.session_id)
        session.num_finished += 1
        session.prompt_tokens += prompt
        session.cached_tokens += finished.cached_tokens
        session.completion_tokens += output
        session.context_tokens = prompt + output
        session.dp_rank = record.dp_rank
        session.finished_at = time.monotonic()
        if len(self.sessions) > MAX_SESSIONS:
            self.sessions.popitem(last=False)
