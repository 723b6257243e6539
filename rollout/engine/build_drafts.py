"""Builds the parts that draft and verify, and sizes their steps, from the server's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from eplb.errors import EplbError
from eplb.expert_location import trivial_location
from eplb.placement import ExpertPlacement
from rollout.attention.registry import create_attention_backend
from rollout.core.args.server_args import ServerArgs
from rollout.core.errors import StartupError
from rollout.core.specs.layer_specs import GatedDeltaSpec
from rollout.core.specs.model_config import ModelConfig
from rollout.distributed.parallel import Parallel
from rollout.drafts.costs import DraftChoice
from rollout.drafts.depth_choice import DepthChoice
from rollout.drafts.ngram import NgramDrafter
from rollout.executor.draft_runner import DraftRunner, StandaloneDraft
from rollout.executor.recorded_forward import RecordedForward
from rollout.families.registry import load_model_config
from rollout.kernels.ops import Ops
from rollout.layers.layer import Layer
from rollout.layers.moe.dispatchers.select import MoeBackend
from rollout.memory.kv_pool import KVPool, kv_bytes_per_token
from rollout.model.decoder import DecoderForCausalLM
from rollout.model.draft_model import DraftModel
from rollout.model.draft_state import DraftState
from rollout.model.load import load_model, load_mtp
from rollout.model.weight_loading import WeightIndex, weight_tensors
from rollout.sampling.base import Sampler
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.model_drafting import ModelDrafting
from rollout.scheduler.policy import MAX_PREFILL_TOKENS

Memory = Callable[[], AbstractContextManager[object]]


class LoadedDraft(NamedTuple):
    """A draft, with the dtype and the device of its KV.  `config`: of a draft that has a checkpoint of its own.

    `hidden_size`: the elements of the hidden states that it takes and gives.
    """

    model: DraftModel
    weights: WeightIndex
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel
    config: ModelConfig | None = None

    def state(self, weight_version: str) -> DraftState:
        """Return the state of its weights, which belong to this version of the model."""
        return DraftState(self.weights, weight_version, self.config)

    @property
    def layer(self) -> Layer:
        """The layers with its weights."""
        model = self.model.model if isinstance(self.model, StandaloneDraft) else self.model
        assert isinstance(model, Layer)
        return model

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's KV."""
        return kv_bytes_per_token(self.model.kv_layers, self.dtype)


class DraftTensors(NamedTuple):
    """The tensors of a draft that take memory: of its weights, and of its KV."""

    weights: Sequence[torch.Tensor]
    kv: Sequence[torch.Tensor]


class DraftParts(NamedTuple):
    """The parts of the served model's engine that a draft is built with.

    `kv_memory()`: entered while the tensors of its KV are made.
    """

    num_slots: int
    attention: str
    kernels_available: bool
    sampler: Sampler
    kv_memory: Memory


def load_draft(
    args: ServerArgs,
    served: DecoderForCausalLM,
    device: torch.device,
    ops: Ops,
    backend: MoeBackend,
    memory: Memory = nullcontext,
) -> LoadedDraft | None:
    """Load the model that drafts for the served one; None if there is none.

    A model with a checkpoint of its own may have other experts than `backend` was made for: its tokens go to all ranks.
    `memory()`: entered while the tensors of its weights are made.
    Raises `StartupError` for a model that cannot draft for it.
    """
    dtype, parallel = served.dtype, served.parallel
    if args.drafts_by_mtp:
        head = load_mtp(args.model_path, served, device, ops, backend, memory())
        return LoadedDraft(head, head.weights, served.config.hidden_size, dtype, device, parallel)
    path = args.speculative_draft_model_path
    if path is None:
        return None
    if not Path(path).is_dir():
        raise StartupError(f"--speculative-draft-model-path {path} is not a folder")
    draft = load_model_config(path)
    _check(draft, served.config, args)
    try:
        location = trivial_location(len(draft.moe_layer_ids), draft.num_experts)
        placement = ExpertPlacement(location, device, parallel.position.ep_rank, parallel.layout.ep_size)
    except EplbError as error:
        raise StartupError(f"--speculative-draft-model-path: --ep-size does not fit: {error}") from None
    model = load_model(path, draft, dtype, device, placement, ops, None, parallel, None, memory())
    is_alone = parallel.layout.world_size == 1
    recorded = RecordedForward(model) if ops.batch_invariant and is_alone and device.type == "cpu" else None
    alone = StandaloneDraft(model, recorded)
    return LoadedDraft(alone, model.weights, draft.hidden_size, dtype, device, parallel, draft)


def build_drafting(
    args: ServerArgs, config: ModelConfig, draft: LoadedDraft | None, parts: DraftParts
) -> Drafting | None:
    """Return the drafting of a scheduler; None if no step verifies drafts."""
    if args.speculative_algorithm is None:
        return None
    step_tokens = args.step_prompt_tokens if args.step_prompt_tokens > 0 else MAX_PREFILL_TOKENS
    if draft is not None:
        runner = _runner(draft, parts, _most(args))
        return ModelDrafting(runner, parts.sampler, DepthChoice(), config.vocab_size, _most(args), step_tokens)
    drafter = NgramDrafter(history_tokens=args.speculative_ngram_capacity)
    return Drafting(drafter, DraftChoice(), config.vocab_size, _most(args), step_tokens)


def max_logits_rows(args: ServerArgs, num_tokens: int) -> int:
    """Return the maximum rows of logits in one step, of `num_tokens` tokens or fewer: of requests and their drafts."""
    drafted = 0 if args.speculative_algorithm is None else _most(args)
    return min(args.max_running_requests * (1 + drafted), num_tokens)


def draft_token_bytes(draft: LoadedDraft | None) -> int:
    """Return the bytes of a token's KV in the draft."""
    return 0 if draft is None else draft.token_bytes


def draft_tensors(draft: LoadedDraft | None, drafting: Drafting | None) -> DraftTensors:
    """Return the tensors of a draft's weights and KV, none where no model drafts."""
    if draft is None or not isinstance(drafting, ModelDrafting):
        return DraftTensors((), ())
    return DraftTensors(weight_tensors(draft.layer), drafting.runner.kv_pool.tensors)


def _runner(draft: LoadedDraft, parts: DraftParts, most: int) -> DraftRunner:
    with parts.kv_memory():
        kv_pool = KVPool(parts.num_slots, draft.model.kv_layers, draft.dtype, draft.device)
    if draft.model.needs_hidden:  # some tokens never get their KV, as of a prompt that is only scored
        for tensor in kv_pool.tensors:
            tensor.zero_()  # a NaN there would spoil all drafts behind it
    attention = create_attention_backend(parts.attention, kv_pool, parts.kernels_available, draft.parallel.tp)
    return DraftRunner(draft.model, kv_pool, attention, draft.parallel, most)


def _most(args: ServerArgs) -> int:
    """Return the most drafted tokens of a request in one step."""
    return args.speculative_num_draft_tokens if args.speculative_algorithm == "NGRAM" else args.speculative_num_steps


def _check(draft: ModelConfig, config: ModelConfig, args: ServerArgs) -> None:
    """Check that the model of `draft` can draft for the one of `config`.  Raises `StartupError`."""
    name = draft.architecture
    if draft.vocab_size != config.vocab_size or draft.head != "vocabulary":
        raise StartupError(
            f"--speculative-draft-model-path: {name} has {draft.vocab_size} tokens, "
            f"but the served model has {config.vocab_size}"
        )
    longest = min(args.context_length or config.max_position_embeddings, config.max_position_embeddings)
    if draft.max_position_embeddings < longest:
        raise StartupError(
            f"--speculative-draft-model-path: {name} has {draft.max_position_embeddings} positions, "
            f"but a context has {longest}: lower --context-length"
        )
    if any(isinstance(layer.attention, GatedDeltaSpec) for layer in draft.layers):
        raise StartupError(
            f"--speculative-draft-model-path: {name} has recurrent layers, "
            "which a draft cannot have: its tokens are dropped"
        )
