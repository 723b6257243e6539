"""`Sampler` on CUDA whose rows have the same bits in every batch: `--enable-deterministic-inference`.

Every row goes through the Triton kernels of plain rows.  Edits change single numbers of a row's logits before.  **Not
run** on a device; tests interpret the kernels on a CPU.

Shapes: as in `base`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.core.host_copy import to_device
from rollout.kernels.gpu.token_logprobs import token_logprobs
from rollout.sampling.base import PlainRows, PlainTokens, SampledTokens, ScoredTokens
from rollout.sampling.batch_info import SamplingBatchInfo
from rollout.sampling.gpu_sampler import GpuSampler
from rollout.sampling.torch_sampler import apply_edits


class InvariantGpuSampler(GpuSampler):
    """Samples as `GpuSampler`, with bias, penalties, minimum lengths, best and chosen tokens as well.

    Of equal logits the lower id comes first among the best, too.
    """

    batch_invariant = True

    def sample(self, logits_NV: torch.Tensor, info: SamplingBatchInfo, positions_N: torch.Tensor) -> SampledTokens:
        device, vocab = logits_NV.device, logits_NV.shape[1]
        if info.rows_with_lists:
            logits_NV = apply_edits(logits_NV.float(), info, positions_N)
        rows = PlainRows(*(part.to(device) for part in info.rows_alone))
        out = PlainTokens.empty(len(logits_NV), min(self.mask_limit, vocab) if info.masked_rows else 0, device)
        self.sample_plain(logits_NV, rows, to_device(positions_N, device), out)
        _widen_masks(logits_NV, info, out)
        tokens = SampledTokens.plain(out, info)
        if info.top_n:
            ids, logprobs = _best(logits_NV, rows.temperatures, info.top_n)
            unwanted = torch.arange(info.top_n, device=device) >= info.top_logprobs[:, None]
            missing = (0, info.top_n - ids.shape[1])
            tokens.top_ids = F.pad(ids, missing, value=-1).masked_fill_(unwanted, -1)
            tokens.top_logprobs = F.pad(logprobs, missing, value=torch.nan).masked_fill_(unwanted, torch.nan)
        tokens.chosen_logprobs = token_logprobs(logits_NV, rows.temperatures, *info.chosen)
        return tokens

    def score(
        self, logits_NV: torch.Tensor, target_ids_N: torch.Tensor, temperature: float, chosen_ids: list[int], top_n: int
    ) -> ScoredTokens:
        num_rows, device = len(logits_NV), logits_NV.device
        temperatures_N = torch.full((num_rows,), temperature, dtype=torch.float32, device=device)
        chosen_C = to_device(torch.tensor(chosen_ids, dtype=torch.int64), device)
        ids_NC = torch.cat((target_ids_N.to(device)[:, None], chosen_C.expand(num_rows, -1)), 1)
        logprobs_NC = _of_rows(logits_NV, temperatures_N, ids_NC)
        return ScoredTokens(logprobs_NC[:, 0], *_best(logits_NV, temperatures_N, top_n), logprobs_NC[:, 1:])


def _widen_masks(logits_NV: torch.Tensor, info: SamplingBatchInfo, out: PlainTokens) -> None:
    """Write the masks of greedy rows with a restriction: all tokens that it leaves, and not only the best one."""
    for i in info.masked_rows:
        row, largest = info.rows[i], logits_NV[i].float().max()
        if not (row.is_restricted and row.params.is_greedy and bool(largest.isfinite())):
            continue
        values_V = logits_NV[i].float() / row.params.effective_temperature
        ids = torch.softmax(values_V, dim=-1).nonzero().squeeze(1)
        logprobs, width = torch.log_softmax(values_V[ids], dim=-1), out.kept_ids.shape[1]
        out.kept_counts[i] = len(ids)
        out.kept_ids[i, : len(ids)] = ids[:width]
        out.kept_logprobs[i, : len(ids)] = logprobs[:width]


def _of_rows(logits_NV: torch.Tensor, temperatures_N: torch.Tensor, ids_NC: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities [N, C] of C tokens of each row."""
    rows_NC = torch.arange(len(ids_NC), device=ids_NC.device)[:, None].expand_as(ids_NC)
    flat = token_logprobs(logits_NV, temperatures_N, rows_NC.flatten(), ids_NC.flatten())
    return flat.view(ids_NC.shape)


def _best(logits_NV: torch.Tensor, temperatures_N: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities [N, n] of the best tokens; n is `count`, or V if this is less.

    They are found by keys of which no two are equal: torch may take any of equal numbers, by the size of the batch.
    """
    vocab = logits_NV.shape[1]
    count = min(count, vocab)
    if not count:
        empty = torch.empty((len(logits_NV), 0), dtype=torch.int64, device=logits_NV.device)
        return empty, empty.float()
    numbers = logits_NV.float()
    bits = torch.where(numbers == 0.0, 0.0, numbers).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    first = torch.arange(vocab, device=logits_NV.device)
    keys = (order << 32) | (vocab - 1 - first)
    ids = vocab - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
    is_distribution = numbers.isfinite().any(-1) & ~(numbers.isnan() | (numbers == torch.inf)).any(-1)
    ids = torch.where(is_distribution[:, None], ids, first[:count])
    return ids, _of_rows(logits_NV, temperatures_N, ids)
