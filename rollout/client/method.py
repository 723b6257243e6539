"""Methods that are written once for all clients.

A method makes a `Call`, or a generator of calls and pauses; the client that it belongs to makes the exchange and waits
for it.  So `RolloutClient.pause(...)` returns a result, and `AsyncRolloutClient.pause(...)` something to await.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from rollout.client.errors import ClientError
from rollout.client.retries import repeated
from rollout.client.wire import Call, Steps

P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """Marks the client whose methods return results."""


class Awaiting:
    """Marks the client whose methods are to be awaited."""


class Method(Generic[P, T]):
    """The type of a method of `Calls` on each client, for type checkers."""

    @overload
    def __get__(self, client: Blocking, owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaiting, owner: Any = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, owner: Any = None) -> Callable[..., Any]: ...
    def __get__(self, client: Any, owner: Any = None) -> Any:
        raise NotImplementedError


def method(build: Callable[Concatenate[Any, P], Call[T] | Steps[T]]) -> Method[P, T]:
    """Make a method whose steps `build` describes, and its client's `_do` carries out.

    A single call is repeated where that is safe; steps choose themselves which of their calls are.
    """

    def steps(self: Any, *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
        work = build(self, *args, **kwargs)
        return (yield from repeated(work, self._retry_s) if isinstance(work, Call) else work)

    @functools.wraps(build)
    def do(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self._do(steps(self, *args, **kwargs))

    return cast(Method[P, T], do)


def do_blocking(steps: Steps[T], exchange: Callable[[Call[Any]], Any]) -> T:
    """Run `steps`, make each of their calls by `exchange`, and return their result."""
    advance: Callable[[], Any] = functools.partial(next, steps)
    while True:
        try:
            step = advance()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        result = None
        try:
            if isinstance(step, Call):
                result = exchange(step)
            else:
                time.sleep(step)
        except ClientError as error:
            advance = functools.partial(steps.throw, error)
        else:
            advance = functools.partial(steps.send, result)


async def do_awaiting(steps: Steps[T], exchange: Callable[[Call[Any]], Awaitable[Any]]) -> T:
    """Do as `do_blocking` does, for one event loop."""
    advance: Callable[[], Any] = functools.partial(next, steps)
    while True:
        try:
            step = advance()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        try:
            result = await (exchange(step) if isinstance(step, Call) else asyncio.sleep(step))
        except ClientError as error:
            advance = functools.partial(steps.throw, error)
        else:
            advance = functools.partial(steps.send, result)
