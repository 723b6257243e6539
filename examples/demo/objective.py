"""The objective of the demo: rewards of answers, advantages, and the policy-gradient loss.

Pure functions.  The model starts from random weights, so almost no answer is right; a second term, the share of digits
in the answer, distinguishes samples from the first step on.  It shows that learning moves weights, not that a
small random model learns arithmetic.

Shapes: N samples of one prompt, O output positions.
"""

from __future__ import annotations

import re

import torch

from examples.demo.questions import load_questions

__all__ = ["group_advantages", "load_questions", "policy_gradient_loss", "reward"]

PROMPT_TEMPLATE = "Question: {question}\nAnswer:"
DIGITS_WEIGHT = 0.5


def reward(text: str, answer: int) -> float:
    """Return 1 if the first whole number in `text` is `answer`, else 0, plus a term for digits.

    The term is `DIGITS_WEIGHT` times the share of digits in `text`.
    """
    first = re.search(r"-?[0-9]+", text)
    right = first is not None and int(first.group()) == answer
    digits = sum(character in "0123456789" for character in text)
    return float(right) + DIGITS_WEIGHT * digits / max(len(text), 1)


def group_advantages(rewards_N: torch.Tensor) -> torch.Tensor:
    """Return the rewards [N] of a prompt's samples less their mean.

    That is the baseline of GRPO (Shao et al. 2024, arXiv:2402.03300), without its division by the standard deviation.
    """
    return rewards_N - rewards_N.mean()


def policy_gradient_loss(
    logprobs_NO: torch.Tensor, mask_NO: torch.Tensor, advantages_N: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return the loss of REINFORCE (Williams 1992) with an advantage per sample: a mean over the step's `num_tokens`.

    The losses of the step's groups add up.  `mask_NO` is false beyond the end of a sample.
    """
    weighted_NO = torch.where(mask_NO, advantages_N[:, None] * logprobs_NO, 0.0)
    return -weighted_NO.sum() / num_tokens
