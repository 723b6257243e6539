"""The request ids in use, and the samples that a name stands for.

A *leaf* is the id of one sample; a *group* is the name of a batch, or of a prompt with n > 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout.core.errors import BadRequest
from rollout.tokenizer_manager.request import ExpandedRequest


class RidRegistry:
    """Every name is in use from `reserve` until its last sample is released."""

    def __init__(self) -> None:
        self._groups_of: dict[str, tuple[str, ...]] = {}
        self._members: dict[str, set[str]] = {}
        self._aborted: set[str] = set()

    def reserve(self, expanded: ExpandedRequest) -> None:
        """Take the names of a request.  Raises `BadRequest`, taking none, if one is in use."""
        groups_of: dict[str, tuple[str, ...]] = {}
        for prompt in expanded.prompts:
            leaves = prompt.sample_rids()
            groups = [] if expanded.rid is None else [expanded.rid]
            groups += [] if leaves == [prompt.rid] else [prompt.rid]
            for leaf in leaves:
                if leaf in groups_of:
                    raise BadRequest(f"rid {leaf!r} stands for two samples of the request")
                groups_of[leaf] = tuple(groups)
        group_names = {group for groups in groups_of.values() for group in groups}
        for name in group_names & set(groups_of):
            raise BadRequest(f"rid {name!r} stands for a sample and for a group of samples")
        for name in group_names | set(groups_of):
            if name in self._groups_of or name in self._members:
                raise BadRequest(f"rid {name!r} is already in flight")
        self._groups_of |= groups_of
        for leaf, leaf_groups in groups_of.items():
            for group in leaf_groups:
                self._members.setdefault(group, set()).add(leaf)

    def release(self, leaves: Iterable[str]) -> None:
        """Free the names of finished samples; a group's name is free when its last sample is."""
        for leaf in leaves:
            self._aborted.discard(leaf)
            for group in self._groups_of.pop(leaf, ()):
                members = self._members[group]
                members.discard(leaf)
                if not members:
                    del self._members[group]

    def resolve(self, rid: str) -> list[str]:
        """Return the samples that `rid` stands for: exactly, never by prefix.  Empty for a name that is not in use."""
        if rid in self._members:
            return sorted(self._members[rid])
        return [rid] if rid in self._groups_of else []

    def leaves(self) -> list[str]:
        return list(self._groups_of)

    def mark_aborted(self, leaves: Iterable[str]) -> None:
        """Remember an abort that came before the sample was sent."""
        self._aborted.update(leaves)

    def is_aborted(self, leaf: str) -> bool:
        return leaf in self._aborted

    def clear(self) -> None:
        self._groups_of.clear()
        self._members.clear()
        self._aborted.clear()
