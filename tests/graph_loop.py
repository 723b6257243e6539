"""Engines on the CPU whose decode steps are captured: the real `GraphRunner` over `StandInGraphPool`.

The sampler is the compiled one, with its plain rows as one kernel, so that log-probabilities, tokens and masks come out
of the recording too.  The sizes are few, and end at 24: larger steps run as they would without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rollout.attention.native_cpu import _CapturedCpuBackend
from rollout.core.sampling_params import SamplingParams
from rollout.engine import build, build_graphs
from rollout.sampling.base import PlainTokens, SampledTokens, Sampler
from rollout.sampling.batch_info import ROW_SETTINGS, PlainRows, SamplingBatchInfo, SamplingRow
from rollout.sampling.native_sampler import NativeSampler
from tests.graph_stand_in import StandInGraphPool, forbid_in_capture, launch

SIZES = [1, 2, 4, 8, 24]


class PlainNativeSampler(NativeSampler):
    """`plain_rows` and `sample_plain` by the operator that `sample` calls."""

    def __init__(self, mask_limit: int) -> None:
        super().__init__()
        self.mask_limit = mask_limit
        row = SamplingRow(SamplingParams(), 0, (), (), [])
        self._table_1S = torch.frombuffer(bytearray(row.settings), dtype=torch.int64)[None]
        none = torch.empty(0, dtype=torch.int64)
        self._lists = (none, none, torch.empty(0), none, none)

    def plain_rows(self, info: SamplingBatchInfo, device: torch.device | str) -> PlainRows | None:
        return info.plain_rows

    def sample_plain(
        self, logits_NV: torch.Tensor, rows: PlainRows, positions_N: torch.Tensor, out: PlainTokens
    ) -> None:
        launch(lambda: self._kernel(logits_NV, rows, positions_N, out), "sampler")

    def _kernel(self, logits_NV: torch.Tensor, rows: PlainRows, positions_N: torch.Tensor, out: PlainTokens) -> None:
        table_NS = self._table_1S.expand(len(logits_NV), -1).clone()
        columns = {
            "seed": rows.seeds,
            "temperature": rows.temperatures.double().view(torch.int64),
            "is_greedy": rows.greedy.long(),
            "top_k": rows.top_k,
            "top_p": rows.top_p.view(torch.int64),
            "min_p": rows.min_p.double().view(torch.int64),
            "wants_mask": rows.wants_mask.long(),
        }
        for name, values in columns.items():
            table_NS[:, ROW_SETTINGS.names.index(name)] = values
        allowed_GW = torch.empty(0, -(-logits_NV.shape[1] // 32), dtype=torch.int32)
        results = self._sample_rows(logits_NV, positions_N, table_NS, *self._lists, allowed_GW, 0)
        tokens = SampledTokens(*results)
        for held, given in zip(out[:3], (tokens.token_ids, tokens.logprobs, tokens.kept_counts), strict=True):
            held.copy_(given)
        counts = tokens.kept_counts.tolist()
        for given, held_NW in ((tokens.kept_ids, out.kept_ids), (tokens.kept_logprobs, out.kept_logprobs)):
            for of_row, held_W in zip(given.split(counts), held_NW, strict=True):
                held_W[: len(of_row)] = of_row[: len(held_W)]


def _select_sampler(
    dtype: torch.dtype, device: torch.device | str, kernels_available: bool, mask_limit: int, deterministic: bool
) -> Sampler:
    usual = _usual_sampler(dtype, device, kernels_available, mask_limit, deterministic)
    return PlainNativeSampler(mask_limit) if type(usual) is NativeSampler else usual


_usual_sampler = build.select_sampler


def _up_to(sizes: list[int], most: int) -> list[int]:
    return [size for size in sizes if size < most] + [most]


@contextmanager
def captured_engines(sizes: list[int] | None = None, pieces: list[int] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Let engines built inside replay their decode steps, where their parts can be captured.

    `pieces`: the numbers of tokens of steps that are captured in pieces; None: no step is.
    """
    chosen = sizes or SIZES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_graphs, "graph_pools", lambda device: StandInGraphPool)
        patch.setattr(build_graphs, "graph_batch_sizes", lambda most: _up_to(chosen, most))
        patch.setattr(build_graphs, "graph_token_counts", lambda most: [] if pieces is None else _up_to(pieces, most))
        patch.setattr(build_graphs, "DEFAULT_MAX_BS", chosen[-1])
        patch.setattr(build, "select_sampler", _select_sampler)
        patch.setattr(_CapturedCpuBackend, "plan", forbid_in_capture(_CapturedCpuBackend.plan))
        yield patch
