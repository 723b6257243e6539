"""`RadixNode`: an edge of the prefix tree, and walks over its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

Namespace = tuple[str | None, int]
NO_SLOTS = torch.empty(0, dtype=torch.int64)
NO_IDS = np.empty(0, dtype=np.int64)


class RadixNode:
    """`tokens` [n] and `slots` [n] of one edge.

    `states` maps a number of its tokens to the row of the state pool that holds the recurrent state after them.

    `lock_count` counts the users of this node or of one below it, `pin_count` the pins among them.  `block_hashes` are
    the published names of its first tokens; `num_named` counts its children that have published names, too.
    """

    __slots__ = (
        "block_hashes",
        "children",
        "last_access",
        "lock_count",
        "num_named",
        "parent",
        "pin_count",
        "slots",
        "states",
        "tokens",
    )

    def __init__(self, parent: RadixNode | None, tokens: np.ndarray, slots: torch.Tensor) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.block_hashes = NO_IDS
        self.num_named = 0
        self.children: dict[int, RadixNode] = {}
        self.states: dict[int, int] = {}
        self.lock_count = 0
        self.pin_count = 0
        self.last_access = 0

    def __len__(self) -> int:
        return len(self.tokens)


class Root(RadixNode):
    """Top of a namespace's tree; there is one while it has children or a user."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, NO_IDS, NO_SLOTS)
        self.namespace = namespace


def root_of(node: RadixNode) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def postorder(root: RadixNode) -> Iterator[RadixNode]:
    """Yield all nodes, children before parents, without recursion (chains can be long)."""
    stack = [root]
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
    yield from reversed(order)
