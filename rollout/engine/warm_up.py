"""Run the largest step once to measure activation memory before the KV pool is sized.

The step is one chunk of prompts behind the longest context, a token of every running request, and logits and samples
for each of them.  Its KV is written to a small pool of its own.  All positions before the chunk share one slot, as the
results do not matter.  Before it a draft computes the same tokens, on a small pool of its own.

Shapes: T tokens of the step, N rows that are sampled, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.attention.registry import create_attention_backend
from rollout.core.forward_batch import ForwardBatch, StateOperands
from rollout.core.sampling_params import SamplingParams
from rollout.distributed.parallel import Parallel
from rollout.engine.build_drafts import LoadedDraft
from rollout.executor.input_builder import DecodeInput, ExtendInput, build_forward_batch
from rollout.executor.model_runner import ModelRunner
from rollout.layers.context import ForwardContext
from rollout.memory.kv_pool import KVPool, ReqToTokenPool
from rollout.memory.state_pool import StatePool
from rollout.model.model_state import ModelState
from rollout.sampling.base import Sampler
from rollout.sampling.batch_info import SamplingBatchInfo, SamplingRow


@dataclass(frozen=True)
class StepSize:
    """`num_tokens`: tokens of a chunk and of all requests that decode; `num_rows`: rows of logits, of these requests
    and of their drafts."""

    num_tokens: int
    num_rows: int
    context_length: int


@torch.inference_mode()
def activation_bytes(
    state: ModelState,
    sampler: Sampler,
    size: StepSize,
    device: torch.device,
    parallel: Parallel,
    *,
    attention: str,
    kv_dtype: torch.dtype | None = None,
    kernels_available: bool,
    wants_routes: bool,
    draft: LoadedDraft | None = None,
) -> int:
    """Return the peak memory of the largest step on a CUDA device, in addition to weights and KV.

    `kv_dtype` is the dtype in which KV is held, by default the model's.
    Attention's own memory is included.  All ranks call this together.  On other devices the result is 0, as their
    memory is the system's.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    pool_bytes = run_largest_step(
        state,
        sampler,
        size,
        device,
        parallel,
        attention=attention,
        kv_dtype=kv_dtype,
        kernels_available=kernels_available,
        wants_routes=wants_routes,
        draft=draft,
    )
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return max(0, peak - before - pool_bytes)


def run_largest_step(
    state: ModelState,
    sampler: Sampler,
    size: StepSize,
    device: torch.device,
    parallel: Parallel,
    *,
    attention: str,
    kv_dtype: torch.dtype | None = None,
    kernels_available: bool,
    wants_routes: bool,
    draft: LoadedDraft | None = None,
) -> int:
    """Run the largest step, and the largest forward of `draft` before it.

    Returns the bytes of the pools that were made for them.
    """
    model = state.model
    kv_pool = KVPool(size.num_tokens, model.kv_layers, model.dtype, device, stored=kv_dtype)
    batch = _largest_batch(size, device, parallel)
    if state.adapters.max_rank is not None:  # rows of a step with adapters take memory, whatever their slots are
        batch.adapters = torch.full((size.num_tokens,), -1, device=device)
    state_pool = None
    if any(model.state_layers):
        num_sequences = len(batch.extend_lens)
        state_pool = StatePool(num_sequences, model.state_layers, model.dtype, device)
        batch.states = _states(batch)
    backend = create_attention_backend(attention, kv_pool, kernels_available, parallel.tp)
    runner = ModelRunner(state, kv_pool, backend, None, None, state_pool)
    if wants_routes:
        runner.route_observers.append(lambda *_: None)
    beside = None if draft is None else _Beside(draft, size, attention, kernels_available)
    if beside is not None:
        beside.run(batch, sampler)
    hidden_TD, _ = runner.forward(batch)
    if model.lm_head is not None:
        _sample(sampler, runner.logits(hidden_TD[: size.num_rows]), device)
    tensors = [*kv_pool.tensors, *(state_pool.tensors if state_pool is not None else ()), batch.req_to_token]
    tensors += [] if beside is None else beside.kv_pool.tensors
    return sum(tensor.nbytes for tensor in tensors)


class _Beside:
    """A draft's memory during the largest step: its attention's own, and the hidden states that it keeps.

    A layer of the checkpoint keeps the final hidden states of the step before, of all its tokens.
    """

    def __init__(self, draft: LoadedDraft, size: StepSize, attention: str, kernels_available: bool) -> None:
        self._draft, self._num_rows = draft, size.num_rows
        self.kv_pool = KVPool(size.num_tokens, draft.model.kv_layers, draft.dtype, draft.device)
        self._attention = create_attention_backend(attention, self.kv_pool, kernels_available, draft.parallel.tp)
        self._hidden_TD: torch.Tensor | None = None
        if draft.model.needs_hidden:
            shape = size.num_tokens, draft.hidden_size
            self._hidden_TD = torch.zeros(shape, dtype=draft.dtype, device=draft.device)

    def run(self, batch: ForwardBatch, sampler: Sampler) -> None:
        """Run the draft on the step's tokens, and sample as many rows as the step does."""
        self._attention.plan(batch)
        model = self._draft.model
        hidden_TD = model(batch, ForwardContext(batch, self._attention), self._hidden_TD)
        _sample(sampler, model.compute_logits(hidden_TD[: self._num_rows]), self._draft.device)


def _sample(sampler: Sampler, logits_NV: torch.Tensor, device: torch.device) -> None:
    # Filters in plain torch need the most memory of all ways to sample; rows with best tokens always go there.
    row = SamplingRow(SamplingParams(top_p=0.9, top_k=50), 0, (), (), [], top_logprobs=1)
    info = SamplingBatchInfo([row] * len(logits_NV), logits_NV.shape[1], device)
    sampler.sample(logits_NV, info, torch.zeros(len(logits_NV), dtype=torch.int64))


def _largest_batch(size: StepSize, device: torch.device, parallel: Parallel) -> ForwardBatch:
    """Return a batch of `size.num_tokens` prompt tokens, in sequences that end at the longest context."""
    counts: list[int] = []
    while sum(counts) < size.num_tokens:
        counts.append(min(size.num_tokens - sum(counts), size.context_length))
    pool = ReqToTokenPool(len(counts), size.context_length, size.num_tokens, device)
    pool.table.zero_()
    extends, slot = [], 0
    for row, count in enumerate(counts):
        prefix_len = size.context_length - count
        pool.enter_span(row, prefix_len, torch.arange(slot, slot + count))
        extends.append(ExtendInput([0] * count, row, prefix_len, num_logits=1))
        slot += count
    nothing = torch.empty(0, dtype=torch.int64)
    decode = DecodeInput(nothing, nothing, nothing, nothing)
    batch = build_forward_batch(extends, decode, nothing, pool)
    if parallel.attn_dp.size > 1:
        batch.global_num_tokens = [size.num_tokens] * parallel.attn_dp.size
    return batch


def _states(batch: ForwardBatch) -> StateOperands:
    """Return the state operands, on the host, of a step whose sequences all start without a state."""
    count = len(batch.extend_lens)
    return StateOperands(
        query_lens=torch.tensor(batch.extend_lens, dtype=torch.int64),
        rows=torch.arange(count),
        sources=torch.full((count,), -1, dtype=torch.int64),
        snapshots=torch.empty((0, 3), dtype=torch.int64),
    )
