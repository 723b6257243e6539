"""`Sampler` by the compiled CPU operators (`rollout.kernels`): bfloat16 and float32 logits.

Each part of a row takes one pass over it, and no tensor of the size of [N, V] is made.  A row's token and
log-probabilities depend on that row only: not on other rows, their number, the number of threads, or on whether its
logits come as bfloat16 or as the same numbers in float32.  Of equal logits the lower id comes first, in every filter
and among the best.

Shapes: as in `base`.
"""

from __future__ import annotations

from importlib import import_module

import torch

from rollout.kernels.ops import GPU_DTYPES
from rollout.sampling.base import SampledTokens, Sampler, ScoredTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.torch_sampler import TorchSampler

DTYPES = (torch.bfloat16, torch.float32)


class NativeSampler(Sampler):
    """Sampling by the compiled operators.  `torch.ops.lockstep` must be loaded.  The logits stay as they are."""

    batch_invariant = True

    def __init__(self) -> None:
        self._sample_rows = torch.ops.lockstep.sample_rows.default
        self._score_rows = torch.ops.lockstep.score_rows.default

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        info.update_histories()
        return SampledTokens(*self._sample_rows(logits_NV, positions_N, *info.operands))

    def score(
        self, logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: list[int], top_n: int
    ) -> ScoredTokens:
        chosen = torch.tensor(chosen_ids, dtype=torch.int64)
        width = min(top_n, logits_NV.shape[1])
        return ScoredTokens(*self._score_rows(logits_NV, target_ids_N, temperature, chosen, width))


def select_sampler(
    dtype: torch.dtype,
    device: torch.device | str,
    kernels_available: bool,
    mask_limit: int = 1 << 31,
    deterministic: bool = False,
) -> Sampler:
    """Select the sampler with the device's kernels, or plain torch where they are missing or do not take this dtype.

    `mask_limit`: the most ids that the caller reads of a mask, for which some samplers need room beforehand.
    `deterministic`: on CUDA, take the sampler whose rows have the same bits in every batch.
    """
    if kernels_available and dtype in DTYPES and torch.device(device).type == "cpu":
        return NativeSampler()
    if kernels_available and dtype in GPU_DTYPES and torch.device(device).type == "cuda":
        kind = "invariant" if deterministic else "gpu"
        module = import_module(f"rollout.sampling.{kind}_sampler")  # which loads triton
        sampler: Sampler = (module.InvariantGpuSampler if deterministic else module.GpuSampler)(mask_limit)
        return sampler
    return TorchSampler()
