"""Captures the steps that decode or verify, and a draft's forwards, if that is possible and wanted.

It logs the result or the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch

from capture.capturer import RoutedExpertsCapturer
from rollout.attention.base import AttentionBackend
from rollout.core.args.server_args import ServerArgs
from rollout.core.console import say
from rollout.core.errors import StartupError
from rollout.engine.build_drafts import max_logits_rows
from rollout.executor.captures import GraphPool
from rollout.executor.cuda_graph import graph_pools
from rollout.executor.draft_graphs import DraftGraphs, Forward
from rollout.executor.draft_runner import DraftRunner, StandaloneDraft
from rollout.executor.graph_buffers import GraphBuffers
from rollout.executor.graph_runner import GraphRunner, graph_batch_sizes
from rollout.executor.model_runner import ModelRunner
from rollout.executor.piece_runner import PieceRunner, graph_token_counts
from rollout.executor.token_buffers import TokenBuffers
from rollout.kernels.ops import Ops
from rollout.layers.layer import Layer
from rollout.memory.available import available_memory_bytes
from rollout.memory.cache_manager import CacheManager
from rollout.memory.kv_pool import KVPool, ReqToTokenPool
from rollout.memory.window_pages import WindowPages
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.mtp import MtpHead
from rollout.model.weight_loading import weight_tensors
from rollout.sampling.base import Sampler
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.model_drafting import ModelDrafting

DEFAULT_MAX_BS = 256


def capture_all(
    args: ServerArgs,
    runner: ModelRunner,
    cache: CacheManager,
    sampler: Sampler,
    ops: Ops,
    drafting: Drafting | None,
) -> None:
    """Capture all graphs and give them to `runner`, and to the runner of a draft.

    Called once weights, KV and observers of routes are there.  A model that only pools has none, as it never decodes.
    Raises `StartupError` if a capture fails.
    """
    device = torch.device(args.device)
    is_off = args.disable_cuda_graph or runner.state.model.lm_head is None
    new_pool = None if is_off else graph_pools(device)
    if new_pool is None:
        return
    model = runner.state.model
    reason = obstacle(model, runner.attention, ops)
    sizes, why_no_larger = captured_sizes(args, model)
    agreed = min(count for (count,) in model.parallel.tp.gather_ints([0 if reason else len(sizes)]))
    if not agreed:
        reason = reason or why_no_larger or "another rank of the engine cannot"
        say(f"steps are not captured, decoding is slower: {reason}", "WARNING")
        return
    sizes, token_counts = sizes[:agreed], _token_counts(args, model)
    if why_no_larger is not None:
        say(f"steps of more than {sizes[-1]} requests are not captured: {why_no_larger}", "WARNING")
    pieces = f", and pieces of steps of {_ranges(token_counts)} tokens" if token_counts else ""
    say(f"capturing steps of {_ranges(sizes)} requests{pieces}")
    before, began = available_memory_bytes(device), time.monotonic()
    try:
        if token_counts:
            runner.pieces = _pieces(runner, cache, token_counts, new_pool)
            runner.pieces.capture_all(runner.wants_routes)
        runner.graphs = _graphs(runner, cache, sampler, sizes, new_pool)
        runner.graphs.capture_all(runner.wants_routes)
        if isinstance(drafting, ModelDrafting):
            _capture_draft(args, runner, runner.graphs.sizes, cache, drafting.runner, new_pool)
    except RuntimeError as error:
        raise StartupError(
            f"capturing steps failed: {error}; give a smaller --cuda-graph-max-bs or "
            "--piecewise-cuda-graph-max-tokens, or --disable-cuda-graph"
        ) from error
    taken, seconds = before - available_memory_bytes(device), time.monotonic() - began
    say(f"captured {len(sizes) + len(token_counts)} sizes in {seconds:.1f} s and {max(taken, 0) / 2**20:.0f} MiB")


def _capture_draft(
    args: ServerArgs,
    runner: ModelRunner,
    sizes: list[int],
    cache: CacheManager,
    draft: DraftRunner,
    new_pool: Callable[[], GraphPool],
) -> None:
    """Capture the forwards of `draft` for the sizes of the captured steps, and give them to it.

    A draft that sends tokens to other ranks' experts runs in Python, as does one whose groups of ranks meet.
    """
    if args.moe_a2a_backend != "none" or draft.meets_groups or draft.attention.for_graph(1) is None:
        reason = "its attention or --moe-a2a-backend cannot be, or groups of ranks share its experts"
        say(f"forwards of the draft are not captured: {reason}", "WARNING")
        return
    kv_pool = draft.kv_pool
    forward, layers, hidden_size = _parts_of(draft, runner.state.model)
    like = torch.empty(hidden_size, dtype=kv_pool.dtype, device=kv_pool.k[0].device)
    buffers = GraphBuffers(sizes[-1], kv_pool, cache.pool, None, like, like.new_empty((0, 0), dtype=torch.int64))
    weights = [tensor for layer in layers for tensor in weight_tensors(layer)]
    given = like if draft.model.needs_hidden else None
    draft.graphs = DraftGraphs(
        forward, draft.attention, buffers, sizes, new_pool, given, runner.state, weights, draft.ranks
    )
    draft.graphs.capture_all()


def _parts_of(draft: DraftRunner, served: DecoderForCausalLM) -> tuple[Forward, list[Layer], int]:
    """Return the forward of a draft in Python, the layers that it reads, and the size of its hidden states."""
    model = draft.model
    if isinstance(model, StandaloneDraft):
        return model.in_python, [model.model], model.model.config.hidden_size
    assert isinstance(model, MtpHead)
    return model, [model, served], served.config.hidden_size


def obstacle(model: DecoderForCausalLM, attention: AttentionBackend, ops: Ops) -> str | None:
    """Return why no step of this engine can be captured; None if steps can be captured."""
    if not ops.graph_safe:
        return "layers run on plain torch, which waits for the device"
    if model.parallel.layout.ep_size > 1 and not ops.takes_empty_slots:
        return "the operator of the experts takes no empty slots, and waits for the number of filled ones"
    if attention.for_graph(1) is None:
        return f"{type(attention).__name__} cannot be captured; see --attention-backend"
    return None


def captured_sizes(args: ServerArgs, model: DecoderForCausalLM) -> tuple[list[int], str | None]:
    """Return the numbers of requests to capture, ascending, and why larger steps cannot be captured, if so."""
    sizes = _sizes(args)
    for place, size in enumerate(sizes):
        reason = model.capture_obstacle(size)
        if reason is not None:
            return sizes[:place], reason
    return sizes, None


def _token_counts(args: ServerArgs, model: DecoderForCausalLM) -> list[int]:
    """Return the numbers of tokens for which pieces of steps are captured, ascending; the same on all ranks.

    Models with recurrent layers have none: a state goes from token to token, through the padding of a step.
    """
    if any(layer is not None for layer in model.state_layers):
        return []
    most = args.piecewise_cuda_graph_max_tokens
    if args.step_prompt_tokens > 0:
        most = min(most, args.step_prompt_tokens + args.max_running_requests)
    counts = graph_token_counts(most) if most > 0 else []
    return list(takewhile(lambda count: model.capture_obstacle(count) is None, counts))


def bytes_to_reserve(
    args: ServerArgs, model: DecoderForCausalLM, partials: Callable[[Sequence[int]], int], draft_layers: int = 0
) -> int:
    """Estimate the device memory that the captures will take, as the KV pool is sized before.  Not measured so far.

    The intermediate results of the largest step, with several copies of its logits in float32, are held once for all
    sizes.  So are its sampling masks, with log-probabilities.  A rank's experts may get the tokens of all attention-DP
    ranks.  The driver holds each kernel of each recording, about 25 a layer, in some 2 KiB.  Steps in pieces hold the
    same once more, for tokens without logits.  A server of adapters records forwards with them and without.  A draft of
    `draft_layers` layers has recordings of its own, whose tokens are counted as the model's: they have no logits.
    `partials` returns the bytes that attention holds for the largest of some numbers of requests.  Captures have memory
    of their own for that; pieces have none, as attention runs between them.
    """
    if args.disable_cuda_graph or model.lm_head is None or graph_pools(torch.device(args.device)) is None:
        return 0
    config, sizes, token_counts = model.config, _sizes(args), _token_counts(args, model)
    forms = 2 if args.enable_lora else 1
    kernels = (25 * len(config.layers) + 50) * (len(sizes) + len(token_counts)) * forms
    groups, most = model.parallel.layout.attn_dp_size, max(token_counts, default=0)
    masks = 2 * min(args.sampling_mask_max_tokens, config.vocab_size)
    requests = 4 * sizes[-1] * (4 * config.vocab_size + 64 * config.hidden_size * groups + masks)
    tokens = 16 * most * config.hidden_size * max(config.num_experts_per_tok, 4) * groups
    of_draft = 0
    if draft_layers:
        of_draft = 256 * sizes[-1] * config.hidden_size + (25 * draft_layers + 50) * len(sizes) * 2048
    return requests + tokens + kernels * 2048 + of_draft + partials(sizes)


def _sizes(args: ServerArgs) -> list[int]:
    """Return the numbers of rows to capture: of all requests, with their drafts, up to the most that are captured."""
    return graph_batch_sizes(max_logits_rows(args, args.cuda_graph_max_bs or DEFAULT_MAX_BS))


def _graphs(
    runner: ModelRunner,
    cache: CacheManager,
    sampler: Sampler,
    sizes: list[int],
    new_pool: Callable[[], GraphPool],
) -> GraphRunner:
    capturer = runner.new_capturer()
    buffers = GraphBuffers(
        sizes[-1],
        *_like(runner, cache, capturer),
        has_states=runner.state_pool is not None,
        mask_width=min(sampler.mask_limit, runner.state.model.config.vocab_size),
    )
    return GraphRunner(runner.state, runner.attention, sampler, capturer, buffers, sizes, new_pool, runner.state_pool)


def _pieces(
    runner: ModelRunner, cache: CacheManager, token_counts: list[int], new_pool: Callable[[], GraphPool]
) -> PieceRunner:
    capturer = runner.new_capturer()
    buffers = TokenBuffers(token_counts[-1], *_like(runner, cache, capturer))
    return PieceRunner(runner.state, runner.attention, capturer, buffers, token_counts, new_pool)


def _like(
    runner: ModelRunner, cache: CacheManager, capturer: RoutedExpertsCapturer
) -> tuple[KVPool, ReqToTokenPool, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the arguments of buffers after their size: pools, the table of windows, and a token's outputs."""
    model, device = runner.state.model, runner.kv_pool.k[0].device
    window_table = cache.states.table if isinstance(cache.states, WindowPages) else None
    hidden = torch.empty(model.config.hidden_size, dtype=model.dtype, device=device)
    routes = torch.empty((capturer.num_moe_layers, capturer.top_k), dtype=capturer.dtype, device=device)
    return runner.kv_pool, cache.pool, window_table, hidden, routes


def _ranges(sizes: list[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 8 else ", ".join(map(str, sizes)) or "no"
