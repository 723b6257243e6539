"""The trainer's side: a small MoE model, demonstrations for its supervised steps, and the loss of episodes.

Shapes: N episodes, S positions, T sampled tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from capture.replay import force_routes
from capture.routed_experts import RoutedExperts
from examples.agent.episodes import TURN_END, TURN_START, Episode, ids_of
from examples.agent.task import Problem, problems
from examples.grpo.policy import Masters
from examples.make_checkpoint.run import make_checkpoint
from examples.make_checkpoint.spec import CheckpointSpec

SPEC = CheckpointSpec(
    vocab_size=320, hidden_size=96, layers=3, dense_first=0, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2,
    moe_intermediate_size=96, context_length=256,
)  # fmt: skip
CALL_START, CALL_END = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
NEW_TOKENS = (CALL_START, CALL_END)  # each a token of the vocabulary; it can also be spelled in letters


def new_model(folder: Path, seed: int) -> Any:
    """Return a randomly initialised model; `folder` gets its configuration, and a tokenizer with tokens for calls."""
    make_checkpoint(folder, SPEC, force=True)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in NEW_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.vocab_size = tokenizer.get_vocab_size()
    config.save_pretrained(folder)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True)
class Demonstration:
    """The ids of a whole episode, and which of them the agent is to sample."""

    ids: list[int]
    is_sampled: list[bool]


def demonstrate(tokenizer: Tokenizer, problem: Problem, *, uses_tool: bool) -> Demonstration:
    """Return an episode with the right answer: by calls of the tool, or at once, as the model cannot know it."""
    ids, is_sampled = [], []
    results = [str(problem.a * problem.b), problem.answer] if uses_tool else []
    calls = [f"{CALL_START}{call}{CALL_END}" for call in problem.calls] if uses_tool else []
    given = [f"{TURN_START}user\n{problem.question}", *(f"\n{TURN_START}tool\n{result}" for result in results)]
    for text, sampled in zip(given, [*calls, problem.answer]):
        for part, is_mine in ((f"{text}{TURN_END}\n{TURN_START}assistant\n", False), (f"{sampled}{TURN_END}", True)):
            new = ids_of(tokenizer, part)
            ids += new
            is_sampled += [is_mine] * len(new)
    return Demonstration(ids, is_sampled)


def demonstrations(tokenizer: Tokenizer, seed: int, tool_share: float) -> Iterator[Demonstration]:
    """Yield demonstrations of training problems; this share of them uses the tool."""
    generator = random.Random(seed)
    for problem in problems(seed, held_out=False):
        yield demonstrate(tokenizer, problem, uses_tool=generator.random() < tool_share)


@dataclass(frozen=True)
class Batch:
    """Sequences padded at the end; `mask_NS` is true where the next position's token was sampled."""

    input_ids_NS: torch.Tensor
    mask_NS: torch.Tensor

    @property
    def target_ids_T(self) -> torch.Tensor:
        return self.input_ids_NS.roll(-1, 1)[self.mask_NS]


def padded(sequences: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Batch:
    """Join ids, and which of them were sampled, to a batch."""
    longest = max(len(ids) for ids, _ in sequences)
    ids_NS = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask_NS = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, (ids, is_sampled) in enumerate(sequences):
        ids_NS[row, : len(ids)] = torch.tensor(ids)
        mask_NS[row, : len(ids) - 1] = torch.tensor(is_sampled[1:])
    return Batch(ids_NS, mask_NS)


def supervised_step(model: Any, optimizer: Masters, chosen: Sequence[Demonstration]) -> float:
    """Take one step on demonstrations; return the loss over what the agent is to sample."""
    batch = padded([(each.ids, each.is_sampled) for each in chosen])
    logits_TV = model(input_ids=batch.input_ids_NS, use_cache=False).logits[batch.mask_NS]
    loss = F.cross_entropy(logits_TV, batch.target_ids_T)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def expected_reward(model: Any, tokenizer: Tokenizer, count: int = 128) -> float:
    """Return the probability of the demonstrated way to use the tool, on training problems, at temperature 1."""
    chosen = [
        demonstrate(tokenizer, problem, uses_tool=True) for problem in islice(problems(-1, held_out=False), count)
    ]
    batch = padded([(each.ids, each.is_sampled) for each in chosen])
    logprobs_NSV = model(input_ids=batch.input_ids_NS, use_cache=False).logits.log_softmax(-1)
    logprobs_NS = logprobs_NSV.gather(-1, batch.input_ids_NS.roll(-1, 1)[..., None]).squeeze(-1)
    return float(torch.where(batch.mask_NS, logprobs_NS, 0.0).sum(1).exp().mean())


def sampled_logprobs(model: Any, batch: Batch, routes: Sequence[RoutedExperts]) -> torch.Tensor:
    """Return the trainer's log-probability of every sampled token [T], with the experts that the engine chose."""
    with force_routes(model, routes):
        logits_TV = model(input_ids=batch.input_ids_NS, use_cache=False).logits[batch.mask_NS]
    logprobs_T: torch.Tensor = logits_TV.log_softmax(-1).gather(-1, batch.target_ids_T[:, None]).squeeze(-1)
    return logprobs_T


def recorded_logprobs(episodes: Sequence[Episode]) -> torch.Tensor:
    """Return the engine's log-probability of every sampled token [T], in the order of `padded`."""
    return torch.tensor(
        [
            logprob
            for episode in episodes
            for logprob, is_sampled in zip(episode.record.logprobs, episode.record.is_sampled)
            if is_sampled
        ]
    )
