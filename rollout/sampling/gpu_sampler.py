"""`Sampler` on CUDA: Triton kernels for batches of plain rows, plain torch for the others.

A plain row (`PlainRows`) gets the token and the log-probability that the CPU samplers would give it, up to rounding.
Its bits are the same in every batch of plain rows.  `TorchSampler` samples all rows of a batch with a row that is not
plain.  There the host waits for the device where a row

    has top-p or min-p, and top-k none or above 1024   whether a partial sort is enough
    has bias, penalties, a minimum length or chosen ids   they are copied to the device
    wants its mask                                      the number of kept tokens

Run on an H100 by `tests/gpu`; interpreted on a CPU by the other tests.

Shapes: as in `base`.
"""

from __future__ import annotations

import torch

from rollout.core.host_copy import to_device
from rollout.kernels.gpu.sample import sample_rows
from rollout.sampling.base import PlainRows, SampledTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.torch_sampler import TorchSampler


class GpuSampler(TorchSampler):
    """Samples from bfloat16, float16 and float32 logits.

    It is not batch invariant: plain torch samples all rows of a batch that are not all plain.
    """

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        rows = self.plain_rows(info, logits_NV.device)
        if rows is None:
            return super().sample(logits_NV, info, positions_N)
        token_ids, logprobs = self.sample_plain(logits_NV, rows, to_device(positions_N, logits_NV.device))
        return SampledTokens.plain(token_ids, logprobs.masked_fill_(~info.wants_logprob, torch.nan))

    def sample_plain(
        self, logits_NV: torch.Tensor, rows: PlainRows, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample_rows(logits_NV, *rows, positions_N)
