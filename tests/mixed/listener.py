"""Compares the KV events of an engine, read as a router reads them, with the prefix tree that they describe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from rollout.memory.kv_events import KVEvents
from rollout.memory.radix_cache import RadixCache
from rollout.memory.radix_node import RadixNode
from tests.kv_listener import Parent, PrefixTree
from tests.mixed.violation import Violation

_NO_EXTRA_KEY = "\x1f"  # the end of the namespace of a request with a salt alone


class Tap:
    """Stands in for the publisher's socket: each batch is read when it is sent."""

    def __init__(self) -> None:
        self.tree = PrefixTree()

    def send_multipart(self, frames: list[bytes], _: int) -> None:
        _topic, number, payload = frames
        self.tree.take(int.from_bytes(number, "big"), payload)

    def compare(self, cache: RadixCache, weight_epoch: int) -> None:
        """Raise `Violation` unless the events describe exactly what requests can find.

        With snapshots, requests find the tokens before a snapshot, on any path.
        """
        num_found = sum(self._find(cache, namespace) for namespace in cache._roots if namespace[1] == weight_epoch)
        if num_found != len(self.tree.blocks):
            raise Violation(f"KV events describe {len(self.tree.blocks)} tokens, {num_found} of them are cached")

    def _find(self, cache: RadixCache, namespace: tuple[str | None, int]) -> int:
        """Return how many tokens the tree of `namespace` has.  Raises `Violation` if no KV event named one."""
        salt = None if namespace[0] is None else namespace[0].removesuffix(_NO_EXTRA_KEY)
        found = 0
        below: list[tuple[RadixNode, Parent]] = [(cache._roots[namespace], ("root", salt))]
        while below:
            node, parent = below.pop()
            for token in node.tokens[: _num_findable(cache, node)].tolist():
                name = self.tree.below.get((parent, token))
                if name is None:
                    raise Violation(f"token {token} is cached under {namespace}, and no KV event says so")
                parent = name
                found += 1
            below += [(child, parent) for child in node.children.values() if _num_findable(cache, child)]
        return found


def _num_findable(cache: RadixCache, node: RadixNode) -> int:
    """Return how many tokens of the node can be continued from, or lie before one that can."""
    if cache._snapshots is None or any(_num_findable(cache, child) for child in node.children.values()):
        return len(node)
    return max(node.states, default=0)


@contextmanager
def tapped() -> Iterator[Tap]:
    """Replace the publisher's socket of engines that are built inside by the tap."""
    tap = Tap()

    def open_nothing(*_: Any) -> Tap:
        return tap

    with mock.patch.object(KVEvents, "_open", open_nothing):
        yield tap
