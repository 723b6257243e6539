"""`LoadRecorder`: how many tokens each logical expert got, by pass, weight version and placement.

A pass is noted under the weight version and the placement epoch that it ran with.  Counts are logical; what a slot or
a rank got follows from the placement of that very pass, not from the one at the time of the dump.

Shapes: S passes, T tokens, L MoE layers, E logical experts, P physical experts (slots), K top-k, W windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, get_args

import torch

from eplb.expert_location import SplitTable
from eplb.load_dump import LoadDump
from eplb.load_history import PassCounter, expected_by_chance, total_variation
from eplb.load_windows import WINDOWS, LoadWindows
from eplb.placement import ExpertPlacement

RecorderMode = Literal["stat", "per_pass", "per_token"]
MODES: tuple[RecorderMode, ...] = get_args(RecorderMode)

PASSES_KEPT = max(WINDOWS)
TOKENS_KEPT = 1 << 16  # of mode per_token
SEGMENTS_KEPT = 64


class ServingFacts(Protocol):
    """Under what a pass ran; immutable."""

    @property
    def weight_version(self) -> str: ...
    @property
    def weight_epoch(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Noted:
    """The facts of a pass that is not counted yet.  `tokens`: ids and positions [T] in mode per_token."""

    facts: ServingFacts
    placement_epoch: int
    tokens: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class _Pass:
    """A counted pass.  `routes` [T, L, K] in mode per_token."""

    counts_LE: torch.Tensor  # int32
    num_tokens: int
    facts: ServingFacts
    placement_epoch: int
    number: int
    routes: torch.Tensor | None = None
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True)
class _Segment:
    """Counts [L, E] int64 of the passes in a row that ran under the same weights, label and placement."""

    weight_version: str
    weight_epoch: int
    placement_epoch: int
    counts_LE: torch.Tensor
    num_passes: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Placed:
    """A placement as it was: what slots hold [L, P], and how an expert's tokens are divided over its slots."""

    physical_to_logical: torch.Tensor
    split: SplitTable

    def slot_loads(self, counts_SLE: torch.Tensor) -> torch.Tensor:
        """Return the tokens of each slot [S, L, P] int64."""
        return self.split.slot_loads(counts_SLE, self.physical_to_logical.shape[1])


class LoadRecorder(PassCounter[_Noted]):
    """The counts since it was made or `reset`.

    `stat` keeps counts by weight version and placement, and of the last passes together; `per_pass` also the counts of
    each of the last 1000 passes; `per_token` also the choices of the last 65,536 tokens, in the type they came in.
    """

    def __init__(
        self,
        num_moe_layers: int,
        num_logical_experts: int,
        placement: ExpertPlacement,
        mode: RecorderMode = "stat",
        num_ranks: int = 1,
    ) -> None:
        super().__init__(num_moe_layers, num_logical_experts)
        self.mode = mode
        self._num_ranks, self._placement = num_ranks, placement
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._noted, self._tokens_noted = [], 0
        self._placed: dict[int, _Placed] = {}
        self._total_LE = torch.zeros(self._shape, dtype=torch.int64)
        self._num_passes = self._num_tokens = 0
        self._segments: deque[_Segment] = deque(maxlen=SEGMENTS_KEPT)
        self._num_segments = 0
        self._windows = LoadWindows(self._shape[0], self._num_ranks)
        self._recent: deque[_Pass] = deque(maxlen=PASSES_KEPT)
        self._with_tokens: deque[_Pass] = deque()
        self._tokens_kept = 0

    # --- recording ------------------------------------------------------------------------------------------------

    def note(
        self,
        ids_TLK: torch.Tensor,
        facts: ServingFacts,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Note a pass of T tokens, `input_ids` and `positions` [T]: logical ids of any integer type, on any device."""
        placement_epoch = self._placement.epoch
        if placement_epoch not in self._placed:
            located = self._placement.metadata.physical_to_logical_map.clone()
            self._placed[placement_epoch] = _Placed(located, self._placement.split())
        tokens = (input_ids.to("cpu", copy=True), positions.to("cpu", copy=True)) if self.mode == "per_token" else None
        self._note(ids_TLK, _Noted(facts, placement_epoch, tokens))

    def _enter(self, passes: list[torch.Tensor], stamps: list[_Noted]) -> None:
        counts_SLE = self._counts(passes).to(torch.int32)
        for stamp, ids_TLK, counts_LE in zip(stamps, passes, counts_SLE, strict=True):
            self._enter_pass(stamp, ids_TLK, counts_LE)
        self._total_LE += counts_SLE.sum(dim=0)
        for start, end in _runs([stamp.placement_epoch for stamp in stamps]):
            placed = self._placed[stamps[start].placement_epoch]
            self._windows.add(placed.slot_loads(counts_SLE[start:end]))
        named = {segment.placement_epoch for segment in self._segments}
        self._placed = {epoch: placed for epoch, placed in self._placed.items() if epoch in named}

    def _enter_pass(self, item: _Noted, ids_TLK: torch.Tensor, counts_LE: torch.Tensor) -> None:
        num_tokens = ids_TLK.shape[0]
        segment = self._segment_of(item)
        segment.counts_LE += counts_LE
        segment.num_passes += 1
        segment.num_tokens += num_tokens
        facts = (counts_LE, num_tokens, item.facts, item.placement_epoch, self._num_passes)
        self._num_passes += 1
        self._num_tokens += num_tokens
        self._recent.append(_Pass(*facts))
        if item.tokens is not None:
            self._with_tokens.append(_Pass(*facts, ids_TLK, item.tokens))
            self._tokens_kept += num_tokens
            while self._tokens_kept > TOKENS_KEPT:
                self._tokens_kept -= self._with_tokens.popleft().num_tokens

    def _segment_of(self, item: _Noted) -> _Segment:
        stamp = (item.facts.weight_version, item.facts.weight_epoch, item.placement_epoch)
        if self._segments:
            last = self._segments[-1]
            if (last.weight_version, last.weight_epoch, last.placement_epoch) == stamp:
                return last
        self._segments.append(_Segment(*stamp, torch.zeros_like(self._total_LE)))
        self._num_segments += 1
        return self._segments[-1]

    # --- what was recorded ----------------------------------------------------------------------------------------

    @property
    def num_passes(self) -> int:
        """Passes since the last reset."""
        return self._num_passes + len(self._noted)

    def status(self) -> dict[str, Any]:
        """Return balancedness and drift by layer, for metrics: plain numbers, None where there is none."""
        self._count_noted()
        drift = self._drifts()
        return {
            "mode": self.mode,
            "num_passes": self._num_passes,
            "num_tokens": self._num_tokens,
            "windows": self._window_facts(),
            "drift": drift[-1] if drift else None,
        }

    def dump(self, model: dict[str, Any]) -> LoadDump:
        """Return everything recorded.  `model` names the model, see `eplb.init_location`."""
        self._count_noted()
        header = {
            "mode": self.mode,
            "model": model,
            "num_passes": self._num_passes,
            "num_tokens": self._num_tokens,
            "num_ranks": self._num_ranks,
            "segments": [_segment_facts(segment) for segment in self._segments],
            "num_segments_dropped": self._num_segments - len(self._segments),
            "windows": self._window_facts(),
            "drift": self._drifts(),
        }
        tensors = {"logical_count": self._total_LE.clone()} | self._segment_tensors() | self._window_tensors()
        if self.mode != "stat":
            header["num_passes_dropped"] = self._num_passes - len(self._recent)
            tensors |= self._pass_tensors()
        if self.mode == "per_token":
            header["num_tokens_dropped"] = self._num_tokens - self._tokens_kept
            tensors |= self._token_tensors()
        return LoadDump(header, {name: tensor.numpy() for name, tensor in tensors.items()})

    def expert_loads(self, window: int) -> tuple[int, torch.Tensor]:
        """Return the number of passes, at most `window` and the last ones, and the counts of their experts [L, E]."""
        self._count_noted()
        recent = [item.counts_LE for item in self._recent][-window:]
        return len(recent), sum(recent, torch.zeros_like(self._total_LE))

    def _window_facts(self) -> list[dict[str, Any]]:
        return [
            {
                "window": window,
                "num_passes": self._windows.num_passes(window),
                "rank_balancedness": _numbers(self._windows.rank_balancedness(window)),
                "slot_balancedness": _numbers(self._windows.slot_balancedness(window)),
                "rank_loads": self._windows.rank_loads(window).tolist(),
            }
            for window in WINDOWS
        ]

    def _drifts(self) -> list[dict[str, Any]]:
        """Return the drift between the counts of each two weight epochs in a row that were recorded."""
        by_epoch: dict[int, _Segment] = {}
        for segment in self._segments:
            if segment.weight_epoch not in by_epoch:
                by_epoch[segment.weight_epoch] = _Segment(
                    segment.weight_version, segment.weight_epoch, 0, torch.zeros_like(self._total_LE)
                )
            merged = by_epoch[segment.weight_epoch]
            merged.weight_version = segment.weight_version
            merged.counts_LE += segment.counts_LE
            merged.num_tokens += segment.num_tokens
        epochs = list(by_epoch.values())
        return [_drift_facts(before, after) for before, after in pairwise(epochs)]

    def _segment_tensors(self) -> dict[str, torch.Tensor]:
        """Return [S, L, E] logical counts; physical ones [S, L, P] and the maps [S, L, P] by segment where P is the
        same.
        """
        if not self._segments:
            return {}
        placed = [self._placed[segment.placement_epoch] for segment in self._segments]
        counts = [segment.counts_LE for segment in self._segments]
        tensors = {"segment_logical_count": torch.stack(counts)}
        physical = [p.slot_loads(counts_LE[None])[0] for p, counts_LE in zip(placed, counts, strict=True)]
        tensors["segment_physical_count"] = torch.stack(physical)
        tensors["segment_physical_to_logical_map"] = torch.stack([p.physical_to_logical for p in placed])
        return tensors

    def _window_tensors(self) -> dict[str, torch.Tensor]:
        recent = [item.counts_LE for item in self._recent]
        sums = [sum(recent[-window:], torch.zeros_like(self._total_LE)) for window in WINDOWS]
        return {"window_logical_count": torch.stack(sums)}

    def _pass_tensors(self) -> dict[str, torch.Tensor]:
        if not self._recent:
            return {}
        return {
            "pass_logical_count": torch.stack([item.counts_LE for item in self._recent]),
            "pass_number": torch.tensor([item.number for item in self._recent]),
            "pass_num_tokens": torch.tensor([item.num_tokens for item in self._recent]),
            "pass_weight_epoch": torch.tensor([item.facts.weight_epoch for item in self._recent]),
            "pass_placement_epoch": torch.tensor([item.placement_epoch for item in self._recent]),
        }

    def _token_tensors(self) -> dict[str, torch.Tensor]:
        passes = list(self._with_tokens)
        if not passes:
            return {}
        counts = torch.tensor([item.num_tokens for item in passes])
        by_pass = {
            "token_pass_number": [item.number for item in passes],
            "token_weight_epoch": [item.facts.weight_epoch for item in passes],
            "token_placement_epoch": [item.placement_epoch for item in passes],
        }
        tensors = {name: torch.tensor(values).repeat_interleave(counts) for name, values in by_pass.items()}
        tensors["token_experts"] = torch.cat([item.routes for item in passes if item.routes is not None])
        pairs = [item.tokens for item in passes if item.tokens is not None]
        return tensors | {
            "token_id": torch.cat([ids for ids, _ in pairs]),
            "token_position": torch.cat([positions for _, positions in pairs]),
        }


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open spans of equal values."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return list(zip(starts, [*starts[1:], len(values)]))


def _segment_facts(segment: _Segment) -> dict[str, Any]:
    return {
        "weight_version": segment.weight_version,
        "weight_epoch": segment.weight_epoch,
        "placement_epoch": segment.placement_epoch,
        "num_passes": segment.num_passes,
        "num_tokens": segment.num_tokens,
    }


def _drift_facts(before: _Segment, after: _Segment) -> dict[str, Any]:
    sides = before.counts_LE, after.counts_LE
    facts: dict[str, Any] = {
        "total_variation": _numbers(total_variation(*sides)),
        "expected_by_chance": _numbers(expected_by_chance(*sides)),
    }
    for side, segment in (("from", before), ("to", after)):
        facts[f"{side}_weight_version"] = segment.weight_version
        facts[f"{side}_weight_epoch"] = segment.weight_epoch
        facts[f"{side}_num_tokens"] = segment.num_tokens
    return facts


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Return the numbers, with None for NaN, which JSON does not have."""
    return [None if value != value else value for value in values.tolist()]
