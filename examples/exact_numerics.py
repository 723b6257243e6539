"""A trainer that agrees with the engine bit for bit: plain transformers and engine numerics on the same samples.

    lockstep make-checkpoint ./checkpoint
    lockstep serve ./checkpoint --dtype bfloat16 --enable-return-routed-experts
    python examples/exact_numerics.py --model-path ./checkpoint --url http://127.0.0.1:30000

The script sends its weights to the server and samples some answers.  It scores them twice: by the model as transformers
computes it, and by the same model under `use_engine_numerics`.  It then takes a step and does all of that again.

Shapes: N samples, S positions, O output positions, T output tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from lockstep_rl import Client, GenerationOutput, WeightSender, engine_logprobs, pad_routes, use_engine_numerics

PROMPT = "Once upon a time"


class Samples(NamedTuple):
    """Samples of one prompt as tensors: `input_ids_NS`, `is_output_NO`, and the engine's `logprobs_T`."""

    outputs: list[GenerationOutput]
    prompt_len: int
    input_ids_NS: torch.Tensor
    is_output_NO: torch.Tensor
    logprobs_T: torch.Tensor


def sample(client: Client, n: int, seed: int) -> Samples:
    """Sample `n` answers of at most 48 tokens."""
    prompt_ids = client.tokenize(PROMPT)
    sampling = {"temperature": 1.0, "max_new_tokens": 48, "n": n, "sampling_seed": seed}
    outputs = client.generate(
        input_ids=[prompt_ids], sampling_params=sampling, return_logprob=True, return_routed_experts=True
    )
    assert isinstance(outputs, list)
    lengths = torch.tensor([len(output.output_ids) for output in outputs])
    input_ids_NS = torch.zeros(n, len(prompt_ids) + int(lengths.max()), dtype=torch.int64)
    for row, output in enumerate(outputs):
        tokens = [*prompt_ids, *output.output_ids]
        input_ids_NS[row, : len(tokens)] = torch.tensor(tokens)
    is_output_NO = torch.arange(int(lengths.max())) < lengths[:, None]
    engine_T = torch.cat([torch.tensor(output.logprobs) for output in outputs])
    return Samples(outputs, len(prompt_ids), input_ids_NS, is_output_NO, engine_T)


def logits_of(model: Any, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits before each output token [N, O, V], and the output tokens [N, O].

    Padding stands after a sample, where causal attention does not look, so that no mask is needed.
    """
    logits = model(input_ids=samples.input_ids_NS, use_cache=False).logits
    return logits[:, samples.prompt_len - 1 : -1], samples.input_ids_NS[:, samples.prompt_len :]


def compare(name: str, samples: Samples, trainer_T: torch.Tensor) -> bool:
    """Print how the trainer's log-probabilities differ from the engine's; return whether every bit is equal."""
    difference = trainer_T.double() - samples.logprobs_T.double()
    equal = int((trainer_T == samples.logprobs_T).sum())
    kl = (difference.expm1() - difference).mean().item()
    print(
        f"  {name:<20} KL {kl:.3g}, largest |Δ log-prob| {difference.abs().max():.3g}, "
        f"equal bits {equal} of {len(trainer_T)}"
    )
    return equal == len(trainer_T)


@torch.no_grad()
def agree(model: Any, samples: Samples) -> bool:
    """Compare both ways of computing with the engine, routes too; return whether engine numerics are exact."""
    mask_NO = samples.is_output_NO
    logits, targets_NO = logits_of(model, samples)
    plain_NO = logits.log_softmax(-1).gather(-1, targets_NO[..., None]).squeeze(-1)
    compare("plain transformers", samples, plain_NO[mask_NO])

    with use_engine_numerics(model) as numerics:
        logits, targets_NO = logits_of(model, samples)
        exact = compare("engine numerics", samples, engine_logprobs(logits, targets_NO)[mask_NO])
        if numerics.routes is not None:  # None: a dense model
            exact &= same_routes(samples, numerics.routes)
    return exact


def same_routes(samples: Samples, trainer_NSLK: torch.Tensor) -> bool:
    """Print how many rows of routes are equal; return whether all are."""
    routes = [output.routed_experts for output in samples.outputs if output.routed_experts is not None]
    engine_NSLK = pad_routes(routes, routes[0].num_experts, samples.input_ids_NS.shape[1])
    has_row_NS = engine_NSLK[:, :, 0, 0] >= 0
    equal = (engine_NSLK[has_row_NS] == trainer_NSLK[has_row_NS]).flatten(1).all(1)
    print(f"  {'':<20} equal routes {int(equal.sum())} of {len(equal)} tokens, without replay")
    return bool(equal.all())


def step(model: Any, samples: Samples) -> None:
    """Make the samples likelier, long ones most, by a step with gradients through the engine's operators."""
    advantages_N = samples.is_output_NO.sum(1) - samples.is_output_NO.sum(1).float().mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with use_engine_numerics(model):
        logprobs_NO = engine_logprobs(*logits_of(model, samples))
        loss = -torch.where(samples.is_output_NO, (advantages_N + 1.0)[:, None] * logprobs_NO, 0.0).mean()
        loss.backward()
    optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32, trust_remote_code=False).eval()
    with Client(args.url) as client:
        sender = WeightSender(client)
        sender.connect()
        try:
            exact = True
            for seed, version in enumerate(["before-the-step", "after-the-step"]):
                sender.refresh(model, weight_version=version, dtype=torch.bfloat16)
                samples = sample(client, args.samples, seed)
                print(f"weight version {samples.outputs[0].weight_version}")
                exact &= agree(model, samples)
                step(model, samples)
        finally:
            sender.close()
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
