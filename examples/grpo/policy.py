"""The trainer's side: a small MoE model, its log-probabilities of the engine's samples, and the two kinds of steps.

Three ways to compute them, `VARIANTS`:

    replay   float32 transformers, experts as the engine chose them, renormalised over the engine's sampling masks
    plain    float32 transformers, its own experts, all tokens
    exact    the engine's own operators in bfloat16, renormalised over its masks; nothing to replay, the bits are equal

Weights are float32 masters.  The model computes with them rounded to bfloat16, and the server gets them so, too.

Shapes: N samples, S positions, O output positions, T output tokens, V vocabulary, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from capture.replay import force_routes, masked_logprobs
from examples.grpo.rollouts import Batch
from examples.grpo.task import Problem
from examples.make_checkpoint.run import make_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec
from rollout.numerics import engine_logprobs

Variant = Literal["replay", "plain", "exact"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
WARMUP_STEPS = 20


def new_model(folder: Path, spec: CheckpointSpec, seed: int) -> Any:
    """Return a randomly initialised model; `folder` gets its configuration and tokenizer."""
    make_checkpoint(folder, spec, force=True)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=torch.float32
    )


class Masters:
    """AdamW over float32 masters of a model's weights; the model gets them rounded to bfloat16 after each step.

    The learning rate rises over the first steps, and falls to a tenth over `num_steps` where that is given.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float, num_steps: int | None = None) -> None:
        self._weights = list(model.parameters())
        self._masters = [weight.detach().clone() for weight in self._weights]
        self._adam = torch.optim.AdamW(self._masters, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))

        def share(step: int) -> float:
            falling = 1.0 if num_steps is None else 1.0 - 0.9 * min(step / num_steps, 1.0)
            return min((step + 1) / WARMUP_STEPS, 1.0) * falling

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adam, share)
        self._round()

    def step(self) -> float:
        """Apply the gradients of the weights and clear them; return their norm before it was clipped to 1."""
        for master, weight in zip(self._masters, self._weights):
            master.grad, weight.grad = weight.grad, None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        self._schedule.step()
        self._adam.zero_grad()
        self._round()
        return float(norm)

    @torch.no_grad()
    def _round(self) -> None:
        for master, weight in zip(self._masters, self._weights):
            weight.copy_(master.to(torch.bfloat16))


def supervised_step(
    model: Any, optimizer: Masters, examples: Sequence[list[int]], prompt_len: int, balance: float = 0.0
) -> float:
    """Take one step on whole examples of one length, prompt and answer; return the loss over the answers.

    `balance` times the load-balancing loss of transformers is added to it, as in the pretraining of such models.
    """
    ids_NS = torch.tensor(examples)
    output = model(input_ids=ids_NS, use_cache=False, output_router_logits=balance > 0)
    logits_NOV = output.logits[:, prompt_len - 1 : -1]
    loss = F.cross_entropy(logits_NOV.flatten(0, 1), ids_NS[:, prompt_len:].flatten())
    (loss + balance * output.aux_loss if balance > 0 else loss).backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def expected_reward(
    model: Any, encode: Callable[[str], list[int]], end_id: int, problems: Iterable[Problem], count: int = 256
) -> float:
    """Return the probability of right answers to problems at temperature 1, without sampling any."""
    chosen = list(islice(problems, count))
    ids_NS = torch.tensor([[*encode(each.question + each.answer), end_id] for each in chosen])
    prompt_len = len(encode(chosen[0].question))
    logits_NOV = model(input_ids=ids_NS, use_cache=False).logits[:, prompt_len - 1 : -1]
    logprobs_NO = logits_NOV.log_softmax(-1).gather(-1, ids_NS[:, prompt_len:, None]).squeeze(-1)
    return float(logprobs_NO.sum(-1).exp().mean())


def replaying(model: Any, batch: Batch, variant: Variant) -> AbstractContextManager[Any]:
    """Have the model follow the engine's routes inside the block, in the variant that replays them."""
    return force_routes(model, batch.routes) if variant == "replay" else nullcontext()


def output_logits(model: Any, batch: Batch, variant: Variant) -> torch.Tensor:
    """Return the trainer's logits [T, V] of the positions that predict output tokens."""
    with replaying(model, batch, variant):
        logits_NSV = model(input_ids=batch.input_ids_NS, use_cache=False).logits
    logits_TV: torch.Tensor = logits_NSV[:, batch.prompt_len - 1 : -1][batch.mask_NO]
    return logits_TV


def trainer_logprobs(logits_TV: torch.Tensor, batch: Batch, variant: Variant) -> torch.Tensor:
    """Return the log-probability of every output token [T], as the loss takes it."""
    if variant == "plain" or batch.masks is None:
        return full_logprobs(logits_TV, batch)
    return masked_logprobs(logits_TV, batch.target_ids_NO[batch.mask_NO], batch.masks)


def full_logprobs(logits_TV: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the log-probability of every output token [T] among all tokens, by the engine's operator."""
    return engine_logprobs(logits_TV, batch.target_ids_NO[batch.mask_NO])


def behaviour_logprobs(batch: Batch, variant: Variant) -> torch.Tensor:
    """Return the log-probabilities of sampling [T] as the loss takes them: of the same distribution."""
    return (batch.logprobs_NO if variant == "plain" else batch.masked_logprobs_NO)[batch.mask_NO]


def policy_loss(logprobs_T: torch.Tensor, engine_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    """Return the clipped objective, a mean over tokens: each token's ratio is to the version that sampled it.

    The ratio is clipped at 0.2 below and 0.28 above (DAPO, Yu et al. 2025).
    """
    ratios_T = (logprobs_T - engine_T).exp()
    clipped_T = ratios_T.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratios_T * advantages_T, clipped_T * advantages_T).mean()
