"""The trainer's side: log-probabilities of the engine's samples, with each prompt computed once for its whole group.

A row holds a group: the prompt, then its answers one after the other.  An answer sees the prompt and itself, and its
positions follow the positions of the prompt.  Separate rows would give the same numbers.

Shapes: G groups, S positions of a row, T output tokens of all groups, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from examples.grpo.rollouts import advantages
from examples.real_model.rollouts import Group


@dataclass(frozen=True)
class Packed:
    """Rows of groups.  `visible_GSS`: which positions see which.

    Of the output tokens of all groups, sample by sample: `rows_T` and `columns_T` name the position that predicts each,
    then follow its id, the engine's log-probability, its weight version and the advantage of its sample.
    """

    input_ids_GS: torch.Tensor
    positions_GS: torch.Tensor
    visible_GSS: torch.Tensor
    rows_T: torch.Tensor
    columns_T: torch.Tensor
    targets_T: torch.Tensor
    engine_T: torch.Tensor
    versions_T: torch.Tensor
    advantages_T: torch.Tensor


def pack(groups: Sequence[Group]) -> Packed:
    """Pack groups whose outputs carry log-probabilities and the ids of the prompt."""
    lengths = [len(group.prompt_ids) + sum(len(output.output_ids) - 1 for output in group.outputs) for group in groups]
    shape = (len(groups), max(lengths))
    input_ids_GS, positions_GS = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    visible_GSS = torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1)  # padding sees itself alone
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    engine: list[float] = []
    versions: list[int] = []
    advantages_T: list[torch.Tensor] = []
    for row, group in enumerate(groups):
        prompt_len = at = len(group.prompt_ids)
        input_ids_GS[row, :at] = torch.tensor(group.prompt_ids)
        positions_GS[row, :at] = torch.arange(at)
        visible_GSS[row, :at, :at] = _triangle(at)
        for output, advantage in zip(group.outputs, advantages(group.rewards)):
            ids = output.output_ids
            end = at + len(ids) - 1  # nothing is predicted from the last token
            input_ids_GS[row, at:end] = torch.tensor(ids[:-1], dtype=torch.int64)
            positions_GS[row, at:end] = torch.arange(prompt_len, prompt_len + end - at)
            visible_GSS[row, at:end, :prompt_len] = True
            visible_GSS[row, at:end, at:end] = _triangle(end - at)
            rows += [row] * len(ids)
            columns += [prompt_len - 1, *range(at, end)]
            targets += ids
            engine += output.logprobs or []
            versions += [int(span.version) for span in output.weight_versions for _ in range(span.start, span.end)]
            advantages_T.append(advantage.expand(len(ids)))
            at = end
    if not len(targets) == len(engine) == len(versions):
        raise ValueError(f"{len(targets)} tokens have {len(engine)} log-probabilities and {len(versions)} versions")
    return Packed(
        input_ids_GS,
        positions_GS,
        visible_GSS,
        torch.tensor(rows),
        torch.tensor(columns),
        torch.tensor(targets),
        torch.tensor(engine),
        torch.tensor(versions),
        torch.cat(advantages_T),
    )


def output_logits(model: Any, packed: Packed) -> torch.Tensor:
    """Return the logits float32 [T, V] that predict the output tokens; the output matrix sees no other position."""
    dtype = model.dtype
    bias_GSS = torch.zeros(packed.visible_GSS.shape, dtype=dtype)
    bias_GSS.masked_fill_(~packed.visible_GSS, torch.finfo(dtype).min)
    hidden_GSH = model.model(
        input_ids=packed.input_ids_GS,
        attention_mask=bias_GSS[:, None],
        position_ids=packed.positions_GS,
        use_cache=False,
    ).last_hidden_state
    logits_TV: torch.Tensor = model.lm_head(hidden_GSH[packed.rows_T, packed.columns_T]).float()
    return logits_TV


def output_logprobs(model: Any, packed: Packed) -> torch.Tensor:
    """Return the trainer's log-probability of every output token [T]."""
    return -F.cross_entropy(output_logits(model, packed), packed.targets_T, reduction="none")


def _triangle(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()
