"""Samples of prompts as a trainer uses them, and the checks of what came with them.

Shapes: N samples of one prompt, S positions (prompt and longest output), O output positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from capture.routed_experts import RoutedExperts
from examples.demo.objective import PROMPT_TEMPLATE, reward
from rollout.client import GenerationOutput, RolloutClient

SEEDS_PER_ROUND = 1 << 20
GENERATE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt.  Output position o of a row is token `prompt_len + o`; rows are padded at the end.

    `input_ids_NS` int64; `mask_NO` true where a sample has an output token; `engine_logprobs_NO` float32, zero
    elsewhere; `routes` one record per sample with a row for every token but the last, None for a dense model;
    `rewards_N` float32.
    """

    prompt_len: int
    input_ids_NS: torch.Tensor
    mask_NO: torch.Tensor
    engine_logprobs_NO: torch.Tensor
    routes: list[RoutedExperts] | None
    rewards_N: torch.Tensor
    outputs: list[GenerationOutput]

    @property
    def num_tokens(self) -> int:
        return int(self.mask_NO.sum())


@dataclass(frozen=True)
class RolloutPlan:
    """The samples to take: `samples` answers of at most `max_new_tokens` tokens to each question (with its answer).

    `with_routes` is false for a dense model.
    """

    questions: Sequence[tuple[str, int]]
    samples: int
    max_new_tokens: int
    seed: int
    with_routes: bool = True


def roll_out(
    client: RolloutClient, plan: RolloutPlan, round_index: int, progress: Callable[[int, int], None]
) -> list[SampleGroup]:
    """Return one group per question, sampled at temperature 1.

    The samples are seeded: the same plan, round and weights give the same tokens.  All questions are asked at once, so
    that the engine batches them; `progress(done, total)` counts questions.
    """

    def ask(index: int) -> SampleGroup:
        question, answer = plan.questions[index]
        prompt_ids = client.tokenize(PROMPT_TEMPLATE.format(question=question))
        outputs = client.generate(
            input_ids=[prompt_ids],
            sampling_params={
                "temperature": 1.0,
                "max_new_tokens": plan.max_new_tokens,
                "n": plan.samples,
                "sampling_seed": plan.seed + SEEDS_PER_ROUND * round_index + plan.samples * index,
            },
            return_logprob=True,
            return_routed_experts=plan.with_routes,
            timeout=GENERATE_TIMEOUT_S,
        )
        assert isinstance(outputs, list)  # of a batch
        return sample_group(prompt_ids, outputs, answer)

    with ThreadPoolExecutor(max_workers=len(plan.questions)) as pool:
        futures = [pool.submit(ask, index) for index in range(len(plan.questions))]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            progress(done, len(futures))
    return [future.result() for future in futures]


def sample_group(prompt_ids: Sequence[int], outputs: list[GenerationOutput], answer: int) -> SampleGroup:
    """Return the group of one prompt's samples.

    The client has checked that log-probabilities and routes are complete.
    """
    lengths = [len(output.output_ids) for output in outputs]
    prompt_len, longest = len(prompt_ids), max(lengths)
    input_ids_NS = torch.zeros(len(outputs), prompt_len + longest, dtype=torch.int64)
    input_ids_NS[:, :prompt_len] = torch.tensor(prompt_ids)
    logprobs_NO = torch.zeros(len(outputs), longest)
    for row, (output, length) in enumerate(zip(outputs, lengths)):
        input_ids_NS[row, prompt_len : prompt_len + length] = torch.tensor(output.output_ids)
        logprobs_NO[row, :length] = torch.tensor(output.logprobs)
    return SampleGroup(
        prompt_len=prompt_len,
        input_ids_NS=input_ids_NS,
        mask_NO=torch.arange(longest) < torch.tensor(lengths)[:, None],
        engine_logprobs_NO=logprobs_NO,
        routes=_routes_of(outputs),
        rewards_N=torch.tensor([reward(output.text or "", answer) for output in outputs]),
        outputs=outputs,
    )


def version_problem(output: GenerationOutput, version: str) -> str | None:
    """Return what is wrong with a sample's reported weight versions, if `version` alone made it; None if nothing.

    Checks the output tokens, the prompt's KV, the oldest KV and the rows of routed experts.
    """
    meta, num_tokens = output.meta_info, len(output.output_ids)
    found = {
        "weight_version": (output.weight_version, version),
        "weight_versions": ([tuple(span[:3]) for span in output.weight_versions], [(version, 0, num_tokens)]),
        "weight_version_start": (meta.get("weight_version_start"), version),
        "weight_version_end": (meta.get("weight_version_end"), version),
        "prefill_weight_versions": (
            [(span["version"], span["start"], span["end"]) for span in meta.get("prefill_weight_versions", [])],
            [(version, 0, output.prompt_tokens)],
        ),
        "kv_weight_version_oldest": (meta.get("kv_weight_version_oldest"), version),
    }
    if (routes := output.routed_experts) is not None:
        found["versions of the routes"] = (list(routes.weight_versions), [(version, 0, len(routes))])
    wrong = [f"{name} is {got}, expected {expected}" for name, (got, expected) in found.items() if got != expected]
    return f"{output.rid}: {'; '.join(wrong)}" if wrong else None


def _routes_of(outputs: Sequence[GenerationOutput]) -> list[RoutedExperts] | None:
    """Return the routes of all samples, None if any sample has none.

    The client has checked that all samples have routes where they were asked for.
    """
    routes = [output.routed_experts for output in outputs if output.routed_experts is not None]
    return routes if len(routes) == len(outputs) else None
