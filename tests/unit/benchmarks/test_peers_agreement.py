"""benchmarks/peers: distinguishing rounding from other weights."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers.agreement import TOP, compare

pytestmark = pytest.mark.full

PROMPTS, VOCAB = 8, 1000


def _tops(logits: torch.Tensor) -> list[list[list[float]]]:
    """Return the top tokens as a worker sends them: lists of [token id, log-probability]."""
    values, ids = logits.log_softmax(-1).topk(TOP)
    return [[list(pair) for pair in zip(*row, strict=True)] for row in zip(ids.tolist(), values.tolist(), strict=True)]


def _logits() -> torch.Tensor:
    return torch.randn(PROMPTS, VOCAB, generator=torch.Generator().manual_seed(0))


def test_a_model_agrees_with_itself() -> None:
    tops, tokens = _tops(_logits()), [[1, 2, 3]] * PROMPTS
    found = compare(tops, tokens, tops, tokens)
    assert (found.same_first, found.near_ties, found.overlap, found.logprob_error) == (PROMPTS, 0, 1.0, 0.0)
    assert found.same_tokens == 3 and found.same_model


def test_rounding_is_the_same_model() -> None:
    tokens = [[1, 2, 3]] * PROMPTS
    found = compare(_tops(_logits().bfloat16().float()), tokens, _tops(_logits()), tokens)
    assert found.same_model and found.overlap > 0.8 and 0 < found.logprob_error < 0.1


def test_other_weights_are_not() -> None:
    other = torch.randn(PROMPTS, VOCAB, generator=torch.Generator().manual_seed(1))
    found = compare(_tops(other), [[9, 9]] * PROMPTS, _tops(_logits()), [[1, 2]] * PROMPTS)
    assert not found.same_model and found.overlap < 0.2 and found.same_tokens == 0


def test_a_swapped_leader_is_a_near_tie_only_within_the_error_of_both() -> None:
    reference = [[(1, -1.00), (2, -1.01), (3, -2.0)]]
    close = compare([[(2, -1.005), (1, -1.006), (3, -2.0)]], [[2]], reference, [[1]])
    assert (close.same_first, close.near_ties) == (0, 1)
    far = compare([[(3, -1.99), (1, -2.0), (2, -1.01)]], [[3]], [[(1, -1.0), (2, -1.01), (3, -4.0)]], [[1]])
    assert (far.same_first, far.near_ties) == (0, 1)  # the error itself is 2: the error column tells
    absent = compare([[(7, -1.0), (1, -1.0)]], [[7]], [[(1, -1.0), (2, -1.01)]], [[1]])
    assert (absent.same_first, absent.near_ties) == (0, 0)


def test_generated_tokens_count_up_to_the_first_that_differs() -> None:
    tops = _tops(_logits())[:2]
    found = compare(tops, [[1, 2, 9, 4], [1, 2, 3, 4]], tops, [[1, 2, 3, 4], [1, 2, 3, 4]])
    assert (found.same_tokens, found.generated) == (3.0, 4)
