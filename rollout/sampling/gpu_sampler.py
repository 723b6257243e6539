"""`Sampler` on CUDA: Triton kernels for batches of plain rows, plain torch for the others.

A plain row (`PlainRows`) may have filters and may want its mask.  It gets the token, the log-probability and the mask
that the CPU samplers would give it, up to rounding.  Of equal logits the lower id comes first, in every filter.  Its
bits are the same in every batch of plain rows.  `TorchSampler` samples all rows of a batch with a row that is not
plain.  There the host waits for the device where a row

    has top-p or min-p, and top-k none or above 1024   whether a partial sort is enough
    has bias, penalties, a minimum length, a restriction or chosen ids   they are copied to the device
    wants its mask                                      the number of kept tokens

Rows without filters and masks were run on an H100 by `tests/gpu`.  The others were **not run** on a device; tests
interpret them on a CPU.

Shapes: as in `base`.
"""

from __future__ import annotations

import torch

from rollout.core.host_copy import to_device
from rollout.kernels.gpu.sample import sample_rows
from rollout.sampling.base import PlainRows, PlainTokens, SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.torch_sampler import TorchSampler


class GpuSampler(TorchSampler):
    """Samples from bfloat16, float16 and float32 logits.  Masks of plain rows have at most `mask_limit` ids.

    It is not batch invariant: plain torch samples all rows of a batch that are not all plain.
    """

    def __init__(self, mask_limit: int) -> None:
        self.mask_limit = mask_limit

    def plain_rows(self, info: SamplingBatchInfo, device: torch.device | str) -> PlainRows | None:
        rows = info.plain_rows
        return None if rows is None else PlainRows(*(part.to(device) for part in rows))

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        device = logits_NV.device
        rows = self.plain_rows(info, device)
        if rows is None:
            return super().sample(logits_NV, info, positions_N)
        mask_width = min(self.mask_limit, logits_NV.shape[1]) if info.masked_rows else 0
        out = PlainTokens.empty(len(logits_NV), mask_width, device)
        self.sample_plain(logits_NV, rows, to_device(positions_N, device), out)
        return SampledTokens.plain(out, info)

    def sample_plain(
        self, logits_NV: torch.Tensor, rows: PlainRows, positions_N: torch.Tensor, out: PlainTokens
    ) -> None:
        sample_rows(logits_NV, *rows, positions_N, out)
