"""The reverse KL of student and teacher, from the teacher's likeliest tokens.

The teacher states K tokens at each place.  All others count as one: their probability is what the K leave.  The KL of
these K + 1 outcomes is never above the KL of all tokens.

Shapes: T output tokens, V vocabulary, K likeliest tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep_rl import ScoredSequence

LEAST_REST = 1e-6  # of a probability: log-probabilities of the K are float32, and their sum may round to 1


@dataclass(frozen=True)
class TeacherScores:
    """The teacher's likeliest tokens at each place and their log-probabilities, best first."""

    ids_TK: torch.Tensor
    logprobs_TK: torch.Tensor


def joined(scored: Sequence[ScoredSequence]) -> TeacherScores:
    """Join the scores of sequences, in their order."""
    ids_TK = np.concatenate([each.top_ids for each in scored]).astype(np.int64)
    logprobs_TK = np.concatenate([each.top_logprobs for each in scored]).astype(np.float32)
    return TeacherScores(torch.from_numpy(ids_TK), torch.from_numpy(logprobs_TK))


def reverse_kl(logits_TV: torch.Tensor, teacher: TeacherScores) -> torch.Tensor:
    """Return KL(student, teacher) [T] over the teacher's K tokens and the rest, with gradients to the logits."""
    total_T = logits_TV.logsumexp(-1)
    student_TK = logits_TV.gather(-1, teacher.ids_TK) - total_T[:, None]
    rest_TV = logits_TV.scatter(-1, teacher.ids_TK, -torch.inf)
    student_rest_T = rest_TV.logsumexp(-1) - total_T
    teacher_rest_T = (1 - teacher.logprobs_TK.double().exp().sum(-1)).clamp(min=LEAST_REST).log().float()
    named_T = (student_TK.exp() * (student_TK - teacher.logprobs_TK)).sum(-1)
    return named_T + student_rest_T.exp() * (student_rest_T - teacher_rest_T)


def agreement(logits_TV: torch.Tensor, teacher: TeacherScores) -> float:
    """Return the share of places at which student and teacher have the same likeliest token."""
    return float((logits_TV.argmax(-1) == teacher.ids_TK[:, 0]).double().mean())
