"""Builds the parts that draft and verify, and sizes their steps, from the server's settings."""

from __future__ import annotations

from rollout.core.args.server_args import ServerArgs
from rollout.core.specs.model_config import ModelConfig
from rollout.drafts.costs import DraftChoice
from rollout.drafts.ngram import NgramDrafter
from rollout.scheduler.drafting import Drafting
from rollout.scheduler.policy import MAX_PREFILL_TOKENS


def build_drafting(args: ServerArgs, config: ModelConfig) -> Drafting | None:
    """Return the drafting of a scheduler; None if no step verifies drafts."""
    if args.speculative_algorithm is None:
        return None
    drafter = NgramDrafter(history_tokens=args.speculative_ngram_capacity)
    most = args.step_prompt_tokens if args.step_prompt_tokens > 0 else MAX_PREFILL_TOKENS
    return Drafting(drafter, DraftChoice(), config.vocab_size, args.speculative_num_draft_tokens, most)


def max_logits_rows(args: ServerArgs, num_tokens: int) -> int:
    """Return the maximum rows of logits in one step, of `num_tokens` tokens or fewer: of requests and their drafts."""
    drafted = 0 if args.speculative_algorithm is None else args.speculative_num_draft_tokens
    return min(args.max_running_requests * (1 + drafted), num_tokens)
