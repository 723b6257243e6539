"""The calls that are repeated, and the errors after which they are.

A call is repeated where that cannot do anything twice.  Where no connection came about, nothing was sent; where the
server answers 503 (starting, stopping, queue full, poisoned), it did nothing, as it reports: both are safe for a
generation, a pause and its end.  A call that only reads (a GET, a tokenization) is also repeated after a broken
connection.
A generation whose connection broke is not: its answer may have been computed and lost, a second draw would favour
short answers (long ones are lost more often), and if it was this request that brought the server down it would bring
it down again; so `ServerUnreachable` tells the caller, and a fleet, which knows that the engine is dead, asks another
one.  Verbs that change weights, memory or experts are sent once.
"""

from __future__ import annotations

import random
import time
from typing import TypeVar

from rollout.client.errors import ClientError, ServerError, ServerUnreachable
from rollout.client.wire import Call, Steps

T = TypeVar("T")
FIRST_WAIT_S = 0.1
MAX_WAIT_S = 2.0


def repeated(call: Call[T], within_s: float) -> Steps[T]:
    """Make `call`, and again while that is safe and ends within `within_s`; then its last error is raised.

    Waits for `Retry-After`, otherwise twice as long each time, less up to a half by chance.
    """
    deadline = time.monotonic() + within_s
    wait_s = FIRST_WAIT_S
    while True:
        try:
            result: T = yield call
            return result
        except ClientError as error:
            pause_s = getattr(error, "retry_after_s", None) or wait_s * random.uniform(0.5, 1.0)
            if not is_safe(call, error) or time.monotonic() + pause_s > deadline:
                raise
        yield pause_s
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def is_safe(call: Call[T], error: ClientError) -> bool:
    """Return whether `call` may be made again after `error`."""
    if call.retry == "never":
        return False
    if isinstance(error, ServerError):
        return error.status == 503
    return isinstance(error, ServerUnreachable) and (call.retry == "always" or not error.was_sent)
