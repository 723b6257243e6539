"""The requests in flight: `RidRegistry`, the ids in use, and `InFlight`, the samples that the scheduler has.

A *leaf* is the id of one sample; a *group* is the name of a batch, or of a prompt with n > 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout.core.errors import BadRequest
from rollout.tokenizer_manager.handle import SampleWaiter
from rollout.tokenizer_manager.request import ExpandedRequest, sample_rids
from rollout.tokenizer_manager.sample import SampleRecord


@dataclass(frozen=True, slots=True)
class InFlightSample:
    """A sample, and its place in the request that it belongs to."""

    record: SampleRecord
    handle: SampleWaiter
    index: int


class InFlight:
    """Samples by rid, from the moment that they get a rank until they end."""

    def __init__(self, dp_size: int) -> None:
        self._samples: dict[str, InFlightSample] = {}
        self._loads = [0] * dp_size  # tokens that each rank may still have to compute

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, rid: str) -> bool:
        return rid in self._samples

    def get(self, rid: str) -> InFlightSample | None:
        return self._samples.get(rid)

    def all(self) -> list[InFlightSample]:
        return list(self._samples.values())

    def rids(self) -> list[str]:
        return list(self._samples)

    def add(self, sample: InFlightSample, wanted: int | None) -> int:
        """Take a sample in, and return the rank that is to run it: `wanted`, or the one with the least left to do."""
        record = sample.record
        record.source.dp_rank = self._loads.index(min(self._loads)) if wanted is None else wanted
        self._loads[record.dp_rank] += record.max_len
        self._samples[record.rid] = sample
        return record.dp_rank

    def remove(self, rid: str) -> None:
        record = self._samples.pop(rid).record
        self._loads[record.dp_rank] -= record.max_len

    def clear(self) -> None:
        self._samples.clear()
        self._loads = [0] * len(self._loads)


class RidRegistry:
    """Every name is in use from `reserve` until its last sample is released."""

    def __init__(self) -> None:
        self._groups_of: dict[str, tuple[str, ...]] = {}
        self._members: dict[str, set[str]] = {}
        self._aborted: set[str] = set()

    def reserve(self, expanded: ExpandedRequest) -> None:
        """Take the names of a request.  Raises `BadRequest`, taking none, if one is in use."""
        groups_of: dict[str, tuple[str, ...]] = {}
        for name, message in zip(expanded.names, expanded.messages, strict=True):
            leaves = sample_rids(message)
            groups = [] if expanded.rid is None else [expanded.rid]
            groups += [] if leaves == [name] else [name]
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

    def reserve_one(self, rid: str) -> None:
        """Take the name of a request of one sample.  Raises `BadRequest` if it is in use."""
        if rid in self._groups_of or rid in self._members:
            raise BadRequest(f"rid {rid!r} is already in flight")
        self._groups_of[rid] = ()

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
