"""`in_thread`: a call that may hang, in a thread that nobody has to wait for.

Knows threads.  Does not know what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run in a daemon thread: a call that hangs can neither hold up the next one nor the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-call", daemon=True).start()
    return future
