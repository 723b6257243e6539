"""A whole reinforcement-learning loop against a running server, in plain PyTorch and transformers.

    lockstep make-checkpoint ./checkpoint
    lockstep serve ./checkpoint --dtype bfloat16 --enable-return-routed-experts
    python examples/minimal_trainer.py --model-path ./checkpoint --url http://127.0.0.1:30000

Each step: sample, recompute the log-probabilities under the engine's routes, step, refresh the server.  The reward is
the share of vowels among an answer's letters, so that there is something to learn.  `examples/demo/trainer.py` is the
same loop with every claim checked.

Shapes: N samples, S positions, O output positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from lockstep_rl import Client, GenerationOutput, WeightSender, force_routes

PROMPT = "Once upon a time"


def reward(text: str) -> float:
    """Return the share of vowels among the letters of a text, 0 where it has none."""
    letters = [character for character in text.lower() if character.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)


def sample(client: Client, prompt_ids: Sequence[int], n: int, seed: int) -> list[GenerationOutput]:
    """Sample `n` answers with log-probabilities and routed experts.  The client refuses incomplete ones."""
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "n": n, "sampling_seed": seed}
    outputs = client.generate(
        input_ids=[prompt_ids], sampling_params=sampling, return_logprob=True, return_routed_experts=True
    )
    assert isinstance(outputs, list)
    return outputs


def logprobs_under_routes(
    model: torch.nn.Module, prompt_ids: Sequence[int], outputs: list[GenerationOutput]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every output token [N, O], and a mask [N, O] that is true where there is a token.

    Every expert is chosen as in the engine.
    """
    lengths = torch.tensor([len(output.output_ids) for output in outputs])
    input_ids_NS = torch.zeros(len(outputs), len(prompt_ids) + int(lengths.max()), dtype=torch.int64)
    for row, output in enumerate(outputs):
        tokens = [*prompt_ids, *output.output_ids]
        input_ids_NS[row, : len(tokens)] = torch.tensor(tokens)
    # Padding stands after the sample, where causal attention does not look, so that no mask is needed.
    with force_routes(model, [output.routed_experts for output in outputs if output.routed_experts is not None]):
        logits = model(input_ids=input_ids_NS, use_cache=False).logits[:, len(prompt_ids) - 1 : -1]
    targets_NO = input_ids_NS[:, len(prompt_ids) :]
    logprobs_NO = logits.log_softmax(-1).gather(-1, targets_NO[..., None]).squeeze(-1)
    return logprobs_NO, torch.arange(targets_NO.shape[1]) < lengths[:, None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--samples", type=int, default=16)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32, trust_remote_code=False).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    with Client(args.url) as client:
        prompt_ids = client.tokenize(PROMPT)
        sender = WeightSender(client)
        sender.connect()  # joins a gloo group with the server
        try:
            for step in range(args.steps):
                outputs = sample(client, prompt_ids, args.samples, seed=1000 * step)
                rewards_N = torch.tensor([reward(output.text or "") for output in outputs])
                logprobs_NO, mask_NO = logprobs_under_routes(model, prompt_ids, outputs)
                engine = torch.cat([torch.tensor(output.logprobs) for output in outputs])
                mismatch = (logprobs_NO[mask_NO].detach() - engine).abs().mean()

                advantages_N = rewards_N - rewards_N.mean()
                loss = -torch.where(mask_NO, advantages_N[:, None] * logprobs_NO, 0.0).sum() / mask_NO.sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

                sender.refresh(model, weight_version=f"step-{step + 1}", dtype=torch.bfloat16)
                print(
                    f"step {step + 1}: sampled by {outputs[0].weight_version}, reward {rewards_N.mean():.3f}, "
                    f"mean |Δ log-prob| {mismatch:.4f}, now serving {client.weight_version()}"
                )
        finally:
            sender.close()


if __name__ == "__main__":
    main()
