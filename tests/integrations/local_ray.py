"""Ray's names for one process: actors are objects here, their methods run when they are called.

What frameworks import beyond that is stubbed.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any

from tests.integrations import stubs

SHIM = "Ray: actors in the test's process"
_ACTORS: dict[str, _Actor] = {}


def install() -> None:
    """Answer `import ray` for the rest of the process."""
    stubs.install("ray")
    os.environ.setdefault("RAY_ADDRESS", "local")
    import ray
    import ray.util

    ray.remote = _remote
    ray.get_actor = _ACTORS.__getitem__
    ray.util.get_node_ip_address = lambda: "127.0.0.1"


class _ActorClass:
    def __init__(self, kind: type, name: str | None = None) -> None:
        self._kind = kind
        self._name = name

    def options(self, name: str | None = None, **_: Any) -> _ActorClass:
        return _ActorClass(self._kind, name)

    def remote(self, *args: Any, **kwargs: Any) -> _Actor:
        actor = _Actor(self._kind, args, kwargs)
        if self._name is not None:
            _ACTORS[self._name] = actor
        return actor


class _Actor:
    """`actor.method.remote(...)`: something to await, as Ray's references are."""

    def __init__(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.local = kind.__new__(kind)
        self._started = kind.__init__(self.local, *args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            return _Method(self, lambda function: function(self.local))
        return _Method(self, getattr(self.local, name))

    async def started(self) -> None:
        """Await the actor's `__init__`, once, if it is a coroutine."""
        if self._started is not None:
            waiting, self._started = self._started, None
            await waiting


class _Method:
    def __init__(self, actor: _Actor, function: Callable[..., Any]) -> None:
        self._actor = actor
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._call(args, kwargs))

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        await self._actor.started()
        result = self._function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def _remote(*args: Any, **_: Any) -> Any:
    return _ActorClass(args[0]) if len(args) == 1 and isinstance(args[0], type) else _ActorClass
