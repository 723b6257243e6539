"""`InFlight`: the samples that the scheduler has, and what each data-parallel rank has left to do."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.tokenizer_manager.handle import GenerateHandle
from rollout.tokenizer_manager.sample import SampleRecord


@dataclass(frozen=True, slots=True)
class InFlightSample:
    """A sample, and its place in the request that it belongs to."""

    record: SampleRecord
    handle: GenerateHandle
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
        """Take a sample in; the rank that is to run it: `wanted`, or else the one with the least left to do."""
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
