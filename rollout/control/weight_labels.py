"""What weights are called whose sender left that open, or sent a part: no label names two contents.

Knows labels.  Does not know transactions.
"""

from __future__ import annotations

from collections.abc import Collection


class PartialLabel:
    """The label of content that comes by calls of their own, while some tensors are still of an older version.

    Remembers the names that came under one label, by calls right after each other.
    """

    def __init__(self) -> None:
        self._label = ""
        self._weight_epoch = -1  # of the last of them
        self._names: set[str] = set()

    def after(self, label: str, names: Collection[str], total: int, weight_epoch: int) -> str:
        """`label` where all `total` tensors came under it, else how many did.  `weight_epoch`: the one in force."""
        goes_on = self._label == label and self._weight_epoch == weight_epoch and self._names.isdisjoint(names)
        self._names = self._names.union(names) if goes_on else set(names)
        self._label, self._weight_epoch = label, weight_epoch + 1
        count = len(self._names)
        return label if count == total else f"{label}~{count}of{total}"


def successor(version: str) -> str:
    """A label for new content whose sender gave none: `v` -> `v+1` -> `v+2`, never the label of other content."""
    stem, plus, count = version.rpartition("+")
    if plus and count.isdigit():
        return f"{stem}+{int(count) + 1}"
    return f"{version}+1"
