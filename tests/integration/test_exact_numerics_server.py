"""200 samples of a real server, and a trainer under engine numerics: the same bits, also after a step and a refresh.

Samples of a question share its prefix and decode in one batch with samples of others.  Shapes: N samples of a
question, S positions, O output positions, T output tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from capture.replay import force_routes, pad_routes
from examples.demo.mismatch import LogprobMismatch, RouteMismatch, logprob_mismatch, route_mismatch
from examples.demo.objective import group_advantages, load_questions, policy_gradient_loss
from examples.demo.rollouts import RolloutPlan, SampleGroup, roll_out
from examples.make_checkpoint.run import CheckpointSpec, make_checkpoint
from rollout.numerics import engine_logprobs, use_engine_numerics, with_gradient_of
from tests.numerics import gradient_errors
from tests.server_process import ServerProcess
from weight_sync.sender import WeightSender

MAX_GRADIENT_ERROR = 1e-2  # by parameter, relative, in the 2-norm
QUESTIONS, SAMPLES, NEW_TOKENS = 25, 8, 32
# Of `lockstep make-checkpoint`, the demo's first: every kind of router; latent attention, windows and sinks, states.
OTHERS = ("glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
FAMILIES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


class Deal(NamedTuple):
    """A server of a checkpoint, and the same checkpoint as a trainer holds it."""

    server: ServerProcess
    model: Any

    def groups(self, round_index: int) -> list[SampleGroup]:
        plan = RolloutPlan(load_questions()[:QUESTIONS], SAMPLES, NEW_TOKENS, seed=0)
        found = roll_out(self.server.client, plan, round_index, lambda *_: None)
        assert sum(len(group.outputs) for group in found) == QUESTIONS * SAMPLES
        return found


@pytest.fixture(params=FAMILIES)
def deal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Deal]:
    """The trainer has float32 masters of what the server holds in bfloat16, and two threads where that has one."""
    folder = make_checkpoint(tmp_path / "m", CheckpointSpec(family=request.param))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    settings = {"max_total_tokens": 16384, "max_running_requests": 64, "num_threads": 1, "chunked_prefill_size": 48}
    with ServerProcess(folder, dtype="bfloat16", enable_return_routed_experts=True, **settings) as server:
        yield Deal(server, model)
    torch.set_num_threads(threads)


Logprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, token_ids[..., None]).squeeze(-1)


def output_logprobs(model: Any, group: SampleGroup, logprobs_of: Logprobs) -> torch.Tensor:
    """Return the log-probabilities of the outputs, [N, O].

    Padding stands behind the samples, where causal attention does not look.
    """
    logits = model(input_ids=group.input_ids_NS, use_cache=False).logits[:, group.prompt_len - 1 : -1]
    return logprobs_of(logits, group.input_ids_NS[:, group.prompt_len :])


def compared(model: Any, groups: list[SampleGroup]) -> tuple[LogprobMismatch, RouteMismatch]:
    """Compare engine and trainer, which routes by itself; routes are compared for all rows that the engine has."""
    sides: list[list[torch.Tensor]] = [[], [], [], []]
    with use_engine_numerics(model) as numerics, torch.no_grad():
        for group in groups:
            ours = output_logprobs(model, group, engine_logprobs)
            assert group.routes is not None and numerics.routes is not None
            theirs = pad_routes(group.routes, group.routes[0].num_experts, group.input_ids_NS.shape[1])
            has_row = theirs[:, :, 0, 0] >= 0
            pairs = (group.engine_logprobs_NO, ours, theirs[has_row], numerics.routes[has_row])
            for side, values in zip(sides, (*(x[group.mask_NO] for x in pairs[:2]), *pairs[2:])):
                side.append(values)
    engine_T, trainer_T, engine_TLK, trainer_TLK = (torch.cat(side) for side in sides)
    assert torch.equal(engine_TLK, trainer_TLK) == (route_mismatch(engine_TLK, trainer_TLK).token_layer_share == 0)
    return logprob_mismatch(engine_T, trainer_T), route_mismatch(engine_TLK, trainer_TLK)


def step(model: Any, groups: list[SampleGroup]) -> None:
    """Take one step of Adam under engine numerics; check that each ratio to the sampler's probabilities is one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    num_tokens = sum(group.num_tokens for group in groups)
    with use_engine_numerics(model):
        for group in groups:
            logprobs_NO = output_logprobs(model, group, engine_logprobs)
            ratios = (logprobs_NO - group.engine_logprobs_NO)[group.mask_NO].exp()
            assert torch.equal(ratios, torch.ones_like(ratios))
            advantages_N = group_advantages(group.rewards_N)
            policy_gradient_loss(logprobs_NO, group.mask_NO, advantages_N, num_tokens).backward()
        optimizer.step()


def policy_gradients(
    model: Any, groups: list[SampleGroup], terms_of: Callable[[SampleGroup], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss of terms [N, O] times advantages."""
    model.zero_grad()
    num_tokens = sum(group.num_tokens for group in groups)
    for group in groups:
        advantages_N = group_advantages(group.rewards_N)
        policy_gradient_loss(terms_of(group), group.mask_NO, advantages_N, num_tokens).backward()
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


@pytest.mark.full
def test_gradients_of_float32_at_the_engines_values(deal: Deal) -> None:
    """An engine in bfloat16: importance ratios of exactly one, with gradients as of transformers in float32."""
    groups, model = deal.groups(0), deal.model

    def plain(group: SampleGroup) -> torch.Tensor:
        """Return the log-probabilities, whose gradient is the gradient of a ratio of one."""
        with force_routes(model, group.routes or []):
            return output_logprobs(model, group, plain_logprobs)

    def joined(group: SampleGroup) -> torch.Tensor:
        with use_engine_numerics(model) as numerics, torch.no_grad():
            ours = output_logprobs(model, group, engine_logprobs)
        assert numerics.routes is not None
        with force_routes(model, numerics.routes):
            logprobs_NO = with_gradient_of(ours, output_logprobs(model, group, plain_logprobs))
        ratios_NO = torch.where(group.mask_NO, logprobs_NO - group.engine_logprobs_NO, 0.0).exp()
        assert torch.equal(ratios_NO, torch.ones_like(ratios_NO))
        return ratios_NO

    def rounded(group: SampleGroup) -> torch.Tensor:
        with use_engine_numerics(model):
            return output_logprobs(model, group, engine_logprobs)

    wanted = policy_gradients(model, groups, plain)
    found, by_formulas = (policy_gradients(model, groups, each) for each in (joined, rounded))
    assert max(gradient_errors(found, wanted).values()) < MAX_GRADIENT_ERROR
    assert max(gradient_errors(by_formulas, wanted).values()) > MAX_GRADIENT_ERROR, "activations in bfloat16 are seen"


def test_exact_agreement_before_and_after_a_refresh(deal: Deal) -> None:
    groups = deal.groups(0)
    logprobs, routes = compared(deal.model, groups)
    assert (logprobs.kl, logprobs.max_abs, routes.token_share) == (0.0, 0.0, 0.0)
    step(deal.model, groups)
    stale, _ = compared(deal.model, groups)
    assert stale.kl > 0, "the step changed the policy"
    sender = WeightSender(deal.server.client)
    sender.connect()
    try:
        sender.refresh(deal.model, weight_version="1", dtype=torch.bfloat16)
    finally:
        sender.close()
    groups = deal.groups(1)
    assert {output.weight_version for group in groups for output in group.outputs} == {"1"}
    logprobs, routes = compared(deal.model, groups)
    assert (logprobs.kl, logprobs.max_abs, routes.token_share) == (0.0, 0.0, 0.0)
    with force_routes(deal.model, groups[0].routes or []):
        usual = output_logprobs(deal.model, groups[0], plain_logprobs)[groups[0].mask_NO]
    assert not torch.equal(usual, groups[0].engine_logprobs_NO[groups[0].mask_NO]), "plain transformers differ"
